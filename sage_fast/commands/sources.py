"""Sources of the commands: settings, runs, checkpoints and folders of videos.

Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_fast.config.fields import settings_of
from sage_fast.config.loader import from_overrides, keys_of, load
from sage_fast.config.schema import Config, SamplingConfig
from sage_fast.run.manifest import (
    MANIFEST,
    check_weights,
    checkpoints,
    fault_of_weights,
    iteration_of,
    iteration_of_weights,
)
from sage_fast.run.resume import check_run, value_of
from sage_fast.util.errors import UserError
from sage_fast.util.files import VIDEOS
from sage_fast.util.imports import heavy_imports

log = logging.getLogger(__name__)

BASE = "base"
"""The source that stands for the model of the other sources, without trained weights."""

SAMPLED = ("shift", "num_frames", "height", "width")
"""Fields of `sampling` that ODE samples depend on, beside the guidance scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A source to evaluate: a model if it has settings, else a folder of videos.

    Attributes:
        label: name in tables and pages.
        path: as given.
        config: settings, including the weights.
        iteration: iterations the weights were trained for; 0 for settings and `base`.
    """

    label: str
    path: str
    config: Config | None = None
    iteration: int = 0


def labelled(arguments: Sequence[str]) -> dict[str, str]:
    """Parse `SOURCE` and `LABEL=SOURCE` arguments into label -> source.

    The default label of a path is its last part.

    Raises:
        UserError: two sources have the same label, or a source is given twice.
    """
    labels: dict[str, str] = {}
    for argument in arguments:
        label, _, source = argument.partition("=")
        if not label or not source or "/" in label or Path(argument).exists():
            label, source = Path(argument).name or argument, argument
        if label in labels:
            raise UserError(f"two sources are called {label!r}; name them, as in before={source}")
        labels[label] = source
    return labels


def read_source(label: str, source: str, overrides: Mapping[str, str]) -> Source:
    """Read one source: settings, a run, a checkpoint or a folder of videos.

    Raises:
        UserError: it is none of these.
    """
    path = Path(source)
    if (path / VIDEOS).is_file():
        return Source(label=label, path=source)
    if is_checkpoint(path):
        if not (path / MANIFEST).is_file():
            raise UserError(f"{source!r}: no such checkpoint, or a damaged one: {MANIFEST} is missing")
        config, _ = load_run(str(path.parent.parent), {"model.weights": str(path), **overrides})
        return Source(label=label, path=source, config=config, iteration=iteration_of(path))
    if path.is_dir() and not (path / "config.yaml").is_file():
        raise UserError(
            f"{source!r} is no run folder: config.yaml is missing; nor a folder of videos: {VIDEOS}, with the columns "
            "file and prompt, is missing"
        )
    config, iteration = load_run(source, overrides)
    return Source(label=label, path=source, config=config, iteration=iteration or 0)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of a checkpoint in a run folder."""
    return path.parent.name == "checkpoints" and re.fullmatch(r"iteration-\d+", path.name) is not None


def read_sources(arguments: Sequence[str], overrides: Mapping[str, str]) -> list[Source]:
    """Read all sources, in the order given.

    All are sampled with the settings of the first source that has settings. Of the others, only the `model` section is
    used.

    Raises:
        UserError: a source is wrong.
    """
    if len(arguments) > 1 and "model.weights" in overrides:
        raise UserError("--model.weights goes with one source; give the runs or checkpoints of the weights as sources")
    names = labelled(arguments)
    found = {
        label: read_source(label, source, overrides)
        for label, source in names.items()
        if source != BASE or Path(source).exists()
    }
    lead = next((source.config for source in found.values() if source.config is not None), None)
    for label, source in names.items():
        if label in found:
            continue
        if lead is None:
            raise UserError(f"{source!r} is the model of a run or of settings without trained weights: name those too")
        base = dataclasses.replace(lead, model=dataclasses.replace(lead.model, weights=None))
        found[label] = Source(label=label, path=source, config=base)
    return [found[label] for label in names]


def settings_for(sources: Sequence[Source], overrides: Mapping[str, str]) -> Config:
    """Return the settings that sample and score all sources.

    Raises:
        UserError: there are only videos, and no reward is given.
    """
    for source in sources:
        if source.config is not None:
            return source.config
    if "reward.name" not in overrides and not any(key.startswith("reward.several") for key in overrides):
        raise UserError("only videos are given: --reward.name NAME, and --reward.weights, say what scores them")
    return from_overrides(overrides)


def notes_on(sources: Sequence[Source], sampling: SamplingConfig, guidance_scale: float) -> list[str]:
    """Return lines that name the evaluated weights and the settings of a source that are ignored."""
    lines = []
    for source in sources:
        if source.config is None:
            continue
        if source.iteration:
            lines.append(f"weights of iteration {source.iteration}: {source.config.model.weights}")
        both = [
            (f"sampling.{name}", getattr(source.config.sampling, name), getattr(sampling, name)) for name in SAMPLED
        ]
        both.append(("eval.guidance_scale", source.config.eval_guidance_scale, guidance_scale))
        lines += [
            f"note: {source.label} has {name} = {own}, but is sampled with {used}, like the first"
            for name, own, used in both
            if own != used
        ]
    return lines


def load_source(command: str, source: str, overrides: Mapping[str, str]) -> Config:
    """Load the settings of a command's run folder or YAML file, and import PyTorch; announce both."""
    config, iteration = load_run(source, overrides)
    if iteration is not None:
        log.info(f"weights of iteration {iteration}: {config.model.weights}")
    with heavy_imports(command):
        import sage_fast.models.load  # noqa: F401  # most of what the commands import
    return config


def load_run(source: str, overrides: Mapping[str, str]) -> tuple[Config, int | None]:
    """Load settings from a run folder or a YAML file. A run gets its newest weights unless `overrides` name others.

    Returns:
        The settings, and the iteration of the run's weights; None for a YAML file or overridden weights.

    Raises:
        UserError: as `load`; or the folder is no run, the run has no weights, or the named weights are damaged.
    """
    run = existing(source)
    if run.is_dir() and not (run / "config.yaml").is_file():
        raise UserError(f"{source!r} is no run folder: config.yaml is missing")
    if not run.is_dir() or "model.weights" in overrides:
        config = load(run / "config.yaml" if run.is_dir() else run, overrides)
        check_weights(config.model.weights)
        return config, None
    weights, iteration = newest_weights(run)
    return load(run / "config.yaml", {"model.weights": str(weights)} | dict(overrides)), iteration


def check_folder(folder: Path) -> None:
    """Check a command's --folder.

    Raises:
        UserError: it is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--folder {str(folder)!r}: a file; expected a folder; it is created if missing")


def existing(source: str, expected: str = "a YAML file or a run folder") -> Path:
    """Return the path of a source.

    Raises:
        UserError: there is none; names a run beside it, or in `runs`, with a similar name.
    """
    path = Path(source)
    if not path.exists():
        runs = [str(file.parent) for folder in (path.parent, Path("runs")) for file in folder.glob("*/config.yaml")]
        close = difflib.get_close_matches(source, runs, n=1)
        question = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{source!r}: no such file or folder; expected {expected}{question}")
    return path


def newest_weights(run: Path) -> tuple[Path, int]:
    """Return the folder of the newest weights and their iteration.

    This is `weights/`, unless a checkpoint is newer because the run was resumed and stopped again. Both hold the
    averaged weights if the run averages. Damaged ones are skipped.

    Raises:
        UserError: the run has no weights yet, or all are damaged.
    """
    found: list[tuple[int | None, Path]] = [(iteration_of(folder), folder) for folder in checkpoints(run)]
    if (final := run / "weights").is_dir():
        found.append((iteration_of_weights(final), final))
        found.sort(key=lambda entry: math.inf if entry[0] is None else entry[0])
    if not found:
        raise UserError(f"run {str(run)!r} has neither a checkpoint nor weights yet")
    faults = []
    for iteration, folder in reversed(found):
        fault = fault_of_weights(folder) or (f"{MANIFEST} names no iteration" if iteration is None else None)
        if fault is None and iteration is not None:
            return folder, iteration
        faults.append(f"{folder.name}: {fault}")
        what = "weights/" if folder == final else f"checkpoint {folder.name}"
        log.info(f"note: {what} is damaged and is skipped: {fault}")
    raise UserError(f"run {str(run)!r}: no checkpoint can be used ({'; '.join(faults)})")


def resumed_settings(source: str, overrides: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Return the settings for `train SOURCE --resume`: the run's own, with `overrides`.

    A run folder, or the config.yaml in one, is the run itself. Any other file is only used to find the run folder: it
    may have changed since, and it lacks the options of the start.

    Returns:
        The settings, and one line for each setting of the file that is ignored.

    Raises:
        UserError: there is no run, or as `load`.
    """
    path = existing(source)
    own = path if path.is_dir() else path.parent
    is_run = path.is_dir() or (path.name == "config.yaml" and (own / "run.json").is_file())
    file = own / "config.yaml" if is_run else path
    run = own if is_run and "output" not in overrides else Path(load(file, overrides).output)
    check_run(run)
    config = dataclasses.replace(load(run / "config.yaml", overrides), output=str(run))  # the folder may have moved
    lines = []
    if file.resolve() != (run / "config.yaml").resolve():
        given = load(file)
        names = [name for name in keys_of(file) if name not in ("output", *_settings_in(overrides))]
        lines = [
            f"{name} stays {value_of(config, name)!r} as in the run, not {value_of(given, name)!r} as in {file}; "
            f"--{name} would change it"
            for name in names
            if value_of(given, name) != value_of(config, name)
        ]
    return config, lines


def _settings_in(overrides: Mapping[str, str]) -> set[str]:
    """Return the names of the settings that dotted keys set; a key may name an entry of a mapping."""
    return {name for name in settings_of(Config) for key in overrides if f"{key}.".startswith(f"{name}.")}
