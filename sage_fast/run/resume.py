"""What a resumed run keeps of its settings, and whether torchrun restarted it.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import socket
from operator import attrgetter
from pathlib import Path
from typing import Any

from sage_fast.config.rewards import CLIENTS
from sage_fast.config.schema import Config, RewardEntry
from sage_fast.run.folder import RunFolder
from sage_fast.util.errors import UserError

KEPT = (
    "seed",
    *(f"model.{name}" for name in ("path", "dtype", "tuning", "weights", "lora_rank", "lora_alpha", "lora_targets")),
    "data.eval_prompts",
    *(f"sampling.{name}" for name in ("num_frames", "height", "width", "shift", "guidance_scale")),
    *(f"reward.{name}" for name in ("several", "name", "args", "prefix")),
    *(f"eval.{name}" for name in ("steps", "guidance_scale", "num_prompts", "seeds_per_prompt", "judge")),
)
"""Settings that a resume must not change. Otherwise the checkpoint belongs to another policy, or the evaluations before
and after training are not paired."""


def check_kept(config: Config) -> None:
    """Check that no setting in `KEPT` has changed.

    Raises:
        UserError: the run in `config.output` began with another value of one of them.
    """
    begun = RunFolder(config.output).settings()
    for name in KEPT:
        if _kept(begun, name) != _kept(config, name):
            old, new = map(attrgetter(name), (begun, config))
            raise UserError(
                f"{name} = {new!r}: the run in {config.output!r} began with {old!r} and keeps it; continue without "
                f"--{name}, or begin another run with another --output and no --resume; nothing was changed"
            )


def _kept(config: Config, name: str) -> Any:
    """Return the part of a setting that must not change; for rewards, all that their parts depend on."""
    if name == "reward.several":
        return [_scored_by(entry) for entry in config.reward.entries] if config.reward.several else []
    if name == "eval.judge":
        return None if config.eval.judge is None else _scored_by(RewardEntry(name=config.eval.judge))
    if name.startswith("reward."):
        return _scored_by(config.reward)[name.removeprefix("reward.")]
    return attrgetter(name)(config)


def _scored_by(entry: RewardEntry) -> dict[str, Any]:
    """Return all that a reward's parts depend on. Where it runs does not matter; a server may change its address."""
    name, args = ("a server", {}) if entry.is_address else (entry.name, entry.args)
    args = {key: value for key, value in args.items() if key != "url" or entry.name not in CLIENTS}
    return {"name": name, "args": args, "prefix": entry.prefix}


# -- restarts by torchrun ---------------------------------------------------------------------------------------------


def launcher() -> str | None:
    """Return an id of this rank's torchrun process, which is stable over restarts; None without torchrun.

    It consists of host, process id and start time. The rendezvous id is not enough: commands often share it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]  # ticks since the machine booted
    return f"{socket.gethostname()} {parent} {started}"


def began_here(run: RunFolder) -> bool:
    """Whether this process is a restart of the run in `run` by the torchrun that began it."""
    own, file = launcher(), run.launchers_file
    return own is not None and file.is_file() and own in file.read_text(encoding="utf-8").splitlines()
