"""What a run is resumed with: its own settings, and of the new ones those that may change.

Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.config.fields import settings_of
from sage_fast.config.load import keys_of, load
from sage_fast.config.schema import Config, RewardEntry
from sage_fast.errors import UserError

KEPT = (
    "seed",
    *(f"model.{name}" for name in ("path", "dtype", "tuning", "weights", "lora_rank", "lora_alpha", "lora_targets")),
    "data.eval_prompts",
    *(f"sampling.{name}" for name in ("num_frames", "height", "width", "shift", "guidance_scale")),
    *(f"reward.{name}" for name in ("several", "name", "args", "normalisation", "prefix")),
    *(f"eval.{name}" for name in ("steps", "num_prompts", "seeds_per_prompt", "judge")),
)
"""Settings without which a checkpoint is that of another policy, or the evaluation before training is not a pair of the
one after it."""


def resumed_settings(source: str, overrides: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The settings that `train SOURCE --resume` goes on with: those of the run, and `overrides`.

    A run folder, or the config.yaml in one, is the run itself. Any other file only says where the run is: it may have
    changed since, and the run began with options that it does not hold.

    Returns:
        The settings, and one line for each setting that the file has and that is not used.

    Raises:
        UserError: there is no run, or as `load`.
    """
    path = Path(source)
    own = path if path.is_dir() else path.parent
    is_run = path.is_dir() or (path.name == "config.yaml" and (own / "run.json").is_file())
    if is_run:
        check_run(own)
    file = own / "config.yaml" if is_run else path
    run = own if is_run and "output" not in overrides else Path(load(file, overrides).output)
    check_run(run)
    config = dataclasses.replace(load(run / "config.yaml", overrides), output=str(run))  # it may have been moved
    lines = []
    if file.resolve() != (run / "config.yaml").resolve():
        said = load(file)
        names = [name for name in keys_of(file) if name not in ("output", *_settings_in(overrides))]
        lines = [
            f"{name} stays {value_of(config, name)!r}, as the run has it, and not {value_of(said, name)!r} as {file} "
            f"says; --{name} would change it"
            for name in names
            if value_of(said, name) != value_of(config, name)
        ]
    return config, lines


def check_run(run: Path) -> None:
    """
    Raises:
        UserError: the folder holds no run.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"output = {str(run)!r}: no run to resume there; leave --resume out to start one")


def check_kept(config: Config) -> None:
    """
    Raises:
        UserError: the run in `config.output` began with another value of a setting that it has to keep.
    """
    begun = load(Path(config.output) / "config.yaml")
    for name in KEPT:
        old, new = value_of(begun, name), value_of(config, name)
        if _kept(begun, name) != _kept(config, name):
            raise UserError(
                f"{name} = {new!r}: the run in {config.output!r} began with {old!r} and keeps it; go on without "
                f"--{name}, or begin another run with another --output and no --resume; nothing was changed"
            )


def _kept(config: Config, name: str) -> Any:
    """What must stay of a setting: of rewards all that their parts depend on, and not their weights."""
    if name == "reward.several":
        return [_scored_by(entry) for entry in config.reward.entries] if config.reward.several else []
    if name == "eval.judge":
        return None if config.eval.judge is None else _scored_by(RewardEntry(name=config.eval.judge))
    if name.startswith("reward."):
        return _scored_by(config.reward)[name.removeprefix("reward.")]
    return value_of(config, name)


def _scored_by(entry: RewardEntry) -> dict[str, Any]:
    """All that the parts of a reward depend on: not where it runs, be it a server at another address."""
    name, args = ("a server", {}) if entry.is_address else (entry.name, entry.args)
    return {"name": name, "args": args, "normalisation": entry.normalisation, "prefix": entry.prefix}


def differences(begun: Config, config: Config) -> list[str]:
    """One line for each setting that is not what it was."""
    pairs = {name: (value_of(begun, name), value_of(config, name)) for name in settings_of(Config)}
    return [f"{name} = {new!r} from here on; it was {old!r}" for name, (old, new) in pairs.items() if old != new]


def value_of(config: Config, name: str) -> Any:
    """That of the setting with a dotted name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _settings_in(overrides: Mapping[str, str]) -> set[str]:
    """Names of settings among dotted keys, which may be those of the entries of a mapping."""
    return {name for name in settings_of(Config) for key in overrides if f"{key}.".startswith(f"{name}.")}


# -- restarts by torchrun ---------------------------------------------------------------------------------------------

LAUNCHERS = "launchers"
"""File of a run folder: the torchrun processes that started the ranks that began the run, one a line."""


def launcher() -> str | None:
    """This rank's torchrun, the same for every restart and never that of another command; None without torchrun.

    Its host, process id and time of start: the id of the rendezvous is often that of other commands too.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]  # ticks since the machine booted
    return f"{socket.gethostname()} {parent} {started}"


def began_here(run: Path) -> bool:
    """Whether the torchrun that started this process began the run in `run`, so that this is a restart of it."""
    own, file = launcher(), run / LAUNCHERS
    return own is not None and file.is_file() and own in file.read_text(encoding="utf-8").splitlines()
