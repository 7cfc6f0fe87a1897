"""What a command or a call from Python names: settings, a run, a checkpoint or videos.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sage_fast.config.loader import keys_of, load
from sage_fast.config.schema import Config
from sage_fast.config.shipped import shipped_hint
from sage_fast.run_folder import RunFolder, check_weights, fault_of_weights, iteration_of
from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError
from sage_fast.util.paths import as_path, expanded

if TYPE_CHECKING:
    from sage_fast.run.train import Run

log = logging.getLogger(__name__)

Source: TypeAlias = "str | os.PathLike[str] | Config | Run"
"""What a call from Python may name: a path as on the command line, settings, or a run."""
SETTINGS_LABEL = "settings"
"""Label of a source that is a `Config`, which has no name of its own."""


def as_typed(source: Source) -> str | Config:
    """Return a source as a command has it: settings, or the text of a path.

    Raises:
        UserError: it is none, or as `expanded`.
    """
    if isinstance(source, Config):
        return source
    place: Any = getattr(source, "folder", source)  # a run stands for its folder
    if not isinstance(place, str | os.PathLike):
        raise UserError(f"{source!r}: expected a path, settings or a run")
    return str(as_path(place))


def labelled_sources(
    sources: Source | Iterable[Source] | Mapping[str, Source],
) -> dict[str, str | Config]:
    """Return label -> source for the sources of a call from Python: one, several, or by their
    labels.

    Raises:
        UserError: as `labelled` and `as_typed`, or there is none.
    """
    if isinstance(sources, Mapping):
        found = {str(label): as_typed(source) for label, source in sources.items()}
    elif isinstance(sources, str) or not isinstance(sources, Iterable):
        found = _labelled_one_by_one([sources])
    else:
        found = _labelled_one_by_one(sources)

    if not found:
        raise UserError("no source is given; expected a run, settings, a checkpoint or 'base'")
    return found


def _labelled_one_by_one(sources: Iterable[Any]) -> dict[str, str | Config]:
    found: dict[str, str | Config] = {}
    for source in sources:
        if isinstance(source, Config):
            labels: Mapping[str, str | Config] = {SETTINGS_LABEL: source}
        elif isinstance(source, str):
            labels = labelled([source])
        else:
            typed = str(as_typed(source))
            labels = {Path(typed).name or typed: typed}

        for label in labels:
            if label in found:
                raise UserError(
                    f"two sources are called {label!r}; name them, as in {{'before': ...}}"
                )
        found |= labels
    return found


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
            source = expanded(argument)
            label = Path(source).name or source
        else:
            source = expanded(source)
        if label in labels:
            raise UserError(f"two sources are called {label!r}; name them, as in before={source}")
        labels[label] = source
    return labels


def existing(source: str, expected: str = "a YAML file or a run folder") -> Path:
    """Return the path of a source.

    Raises:
        UserError: there is none; names a run beside it, or in `runs`, with a similar name.
    """
    path = Path(source)
    if not path.exists():
        runs = [
            str(file.parent)
            for folder in (path.parent, Path("runs"))
            for file in folder.glob("*/config.yaml")
        ]
        close = difflib.get_close_matches(source, runs, n=1)
        question = f"; did you mean {close[0]!r}?" if close else ""
        hint = question or shipped_hint(path)
        raise UserError(f"{source!r}: no such file or folder; expected {expected}{hint}")
    return path


def run_and_weights(path: Path) -> tuple[RunFolder, Path, int]:
    """Return the run of a path, the weights that the path stands for, and their iteration.

    A run folder stands for its newest weights, a checkpoint in one for itself.

    Raises:
        UserError: the path is no run and no checkpoint, the run has no weights yet, or they are
            damaged.
    """
    run = RunFolder.of_checkpoint(path)
    if run is None:
        run = RunFolder(path)
        run.check()
        weights, iteration = run.newest_weights()
        return run, weights, iteration

    run.check()
    fault = fault_of_weights(path)
    if fault:
        raise UserError(f"{str(path)!r}: damaged: {fault}")
    return run, path, iteration_of(path)


def load_run(
    source: str | Config, overrides: Mapping[str, Any] | None = None
) -> tuple[Config, int | None]:
    """Load settings from a YAML file, a run folder or a checkpoint in one, with its weights.

    `model.weights` in `overrides` replaces the weights of a run.

    Args:
        source: a path; or settings, which are taken as they are.
        overrides: as for `load`, by their dotted names.

    Returns:
        The settings, and the iteration of the run's weights; None for settings, a YAML file or
        overridden weights.

    Raises:
        UserError: as `load` and `run_and_weights`, or the named weights are damaged.
    """
    overrides = overrides or {}
    if isinstance(source, Config):
        config = load(None, overrides, overlays=[dataclasses.asdict(source)])
        check_weights(config.model.weights)
        return config, None

    path = existing(source)
    if path.is_dir() and "model.weights" not in overrides:
        run, weights, iteration = run_and_weights(path)
        return run.settings({"model.weights": str(weights), **overrides}), iteration

    config = RunFolder(path).settings(overrides) if path.is_dir() else load(path, overrides)
    check_weights(config.model.weights)
    return config, None


def load_source(command: str, source: str | Config, overrides: Mapping[str, Any]) -> Config:
    """Load the settings of a command's source, and import PyTorch; announce both."""
    config, iteration = load_run(source, overrides)
    if iteration is not None:
        log.info(f"weights of iteration {iteration}: {config.model.weights}")
    with heavy_imports(command):
        import sage_fast.models.load  # noqa: F401  # most of what the commands import
    return config


def check_folder(folder: Path, option: str = "--folder") -> None:
    """Check the folder that an option gives to a command.

    Raises:
        UserError: it is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{option} {str(folder)!r}: a file; expected a folder; it is created if missing"
        )


def split_output(
    options: argparse.Namespace, overrides: Mapping[str, str]
) -> tuple[Path | None, dict[str, str]]:
    """Return the folder that a command writes, by --folder or by --output, and the settings.

    `output` is a setting, the folder of a run. For a command that makes no run it means the
    command's own folder.

    Raises:
        UserError: both are given, or as `expanded`.
    """
    settings = dict(overrides)
    output = settings.pop("output", None)
    if output is None:
        return options.folder, settings
    if options.folder is not None:
        raise UserError(
            f"--folder {str(options.folder)!r} and --output {output!r}: both name the folder to "
            "write; give one"
        )
    return Path(expanded(output)), settings


def resumed_settings(source: str, overrides: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Return the settings for `train SOURCE --resume`: the run's own, with `overrides`.

    A run folder, or the config.yaml in one, is the run itself. Any other file is only used to find
    the run folder: it may have changed since, and it lacks the options of the start. If the folder
    holds no run, one begins there.

    Returns:
        The settings, and one line for each setting of the file that is ignored.

    Raises:
        UserError: a run is named and there is none, or as `load`.
    """
    path = existing(source)
    own = RunFolder(path if path.is_dir() else path.parent)
    is_run = path.is_dir() or (path == own.config_file and own.holds_record)
    file = own.config_file if is_run else path
    run = own
    if not is_run or "output" in overrides:
        run = RunFolder(load(file, overrides).output)

    if not is_run and not run.can_continue():
        return load(file, overrides), []

    run.check_resumable()
    # the folder may have moved
    config = dataclasses.replace(run.settings(overrides), output=str(run.path))
    if file.resolve() == run.config_file.resolve():
        return config, []
    return config, _ignored_lines(config, file, overrides)


def _ignored_lines(config: Config, file: Path, overrides: Mapping[str, str]) -> list[str]:
    """Return a line for each setting of a file that a resumed run, whose own settings are `config`,
    ignores."""
    lines = []
    settings_of_file = load(file)
    for name in keys_of(file):
        value_of = attrgetter(name)
        kept, ignored = value_of(config), value_of(settings_of_file)
        # an entry, such as --reward.weights.red, gives its whole setting
        is_given = any(f"{key}.".startswith(f"{name}.") for key in overrides)
        if kept != ignored and name != "output" and not is_given:
            lines.append(f"{name} {_ignored(kept, ignored, file)}; --{name} changes it")
    return lines


def _ignored(kept: Any, ignored: Any, file: Path) -> str:
    """Return what a setting of a run stays, and not as in a file; of lists only what differs."""
    if isinstance(kept, list | tuple) and isinstance(ignored, list | tuple):
        only_kept = ", ".join(repr(entry) for entry in kept if entry not in ignored)
        only_ignored = ", ".join(repr(entry) for entry in ignored if entry not in kept)
        if only_kept and only_ignored:
            return f"stays with {only_kept} as in the run, not {only_ignored} as in {file}"
        if only_kept:
            return f"stays with {only_kept} as in the run, which {file} lacks"
        if only_ignored:
            return f"stays as in the run, without {only_ignored}, which {file} has"
    return f"stays {kept!r} as in the run, not {ignored!r} as in {file}"
