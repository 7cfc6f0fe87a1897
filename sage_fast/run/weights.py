"""Read the settings and the newest weights of a run folder.

Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sage_fast.config.load import load
from sage_fast.config.schema import Config
from sage_fast.util.console import Say, say_nothing
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json

MANIFEST = "manifest.json"
"""File in a checkpoint that holds the size and SHA-256 of every other file."""

FOR_TRAINING = ("state.json", "trainable.safetensors", "ema.safetensors", "anchor.safetensors", "optimizer.pt")
"""Checkpoint files that only a resume reads."""


def load_run(source: str, overrides: Mapping[str, str], tell: Say = say_nothing) -> tuple[Config, int | None]:
    """Load settings from a run folder or a YAML file. A run gets its newest weights unless `overrides` name others.

    Args:
        tell: receives a note for each damaged checkpoint.

    Returns:
        The settings, and the iteration of the run's weights; None for a YAML file or overridden weights.

    Raises:
        UserError: as `load`; or the folder is no run, or the run has no weights.
    """
    run = Path(source)
    if not run.is_dir():
        return load(run, overrides), None
    if not (run / "config.yaml").is_file():
        raise UserError(f"{source!r} is no run folder: config.yaml is missing")
    if "model.weights" in overrides:
        return load(run / "config.yaml", overrides), None
    weights, iteration = newest_weights(run, tell)
    return load(run / "config.yaml", {"model.weights": str(weights)} | dict(overrides)), iteration


def newest_weights(run: Path, tell: Say = say_nothing) -> tuple[Path, int]:
    """Return the folder of the newest weights and their iteration.

    This is `weights/`, unless a checkpoint is newer because the run was resumed and stopped again. Both hold the
    averaged weights if the run averages. A checkpoint with damaged weights is skipped.

    Args:
        tell: receives a note for each checkpoint that is skipped.

    Raises:
        UserError: the run has no weights yet, or all are damaged.
    """
    found = {iteration_of(folder): folder for folder in checkpoints(run)}
    final, scores = run / "weights", run / "eval" / "after.json"
    if final.is_dir() and scores.is_file():
        iteration = read_json(scores).get("iteration")
        if not isinstance(iteration, int):
            raise UserError(f"{scores}: expected a whole number as 'iteration'")
        found[iteration] = final
    if not found:
        raise UserError(f"run {str(run)!r} has neither a checkpoint nor weights with their eval/after.json yet")
    faults = []
    for iteration, folder in sorted(found.items(), reverse=True):
        fault = None if folder == final else fault_of_weights(folder)
        if fault is None:
            return folder, iteration
        faults.append(f"{folder.name}: {fault}")
        tell(f"note: checkpoint {folder.name} is damaged and is skipped: {fault}")
    raise UserError(f"run {str(run)!r}: no checkpoint can be used ({'; '.join(faults)})")


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first."""
    found = [path for path in (run / "checkpoints").glob("iteration-*") if re.fullmatch(r"iteration-\d+", path.name)]
    return sorted(found, key=iteration_of)


def iteration_of(folder: Path) -> int:
    """Return the iteration that a checkpoint continues with."""
    return int(folder.name.removeprefix("iteration-"))


def digest(file: Path) -> dict[str, Any]:
    """Return a file's manifest entry: size and SHA-256."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def fault_of_weights(checkpoint: Path) -> str | None:
    """Return `fault_of` for the files that sampling and evaluation read."""
    return fault_of(checkpoint, lambda names: [name for name in names if name not in FOR_TRAINING])


def fault_of(folder: Path, chosen: Callable[[list[str]], Iterable[str]]) -> str | None:
    """Return why a checkpoint cannot be used; None if the manifest's `chosen` files match their checksums."""
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        files = read_json(folder / MANIFEST)["files"]
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (UserError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not what was written"
    for name in chosen(sorted(expected)):
        size, sha256 = expected[name]
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
        if digest(file)["sha256"] != sha256:
            return f"{name} has changed since it was written (SHA-256)"
    return None
