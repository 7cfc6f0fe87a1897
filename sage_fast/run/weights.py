"""A run folder as the source of a command: its settings, and which of its weights stand for it.

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
from sage_fast.console import Say, say_nothing
from sage_fast.errors import UserError
from sage_fast.files import read_json

MANIFEST = "manifest.json"
"""File of a checkpoint: size and SHA-256 of each of the others."""

FOR_TRAINING = ("state.json", "trainable.safetensors", "ema.safetensors", "anchor.safetensors", "optimizer.pt")
"""Files of a checkpoint that only a resume reads."""


def load_run(source: str, overrides: Mapping[str, str], tell: Say = say_nothing) -> tuple[Config, int | None]:
    """The settings of a run folder, with its newest weights unless `overrides` name others; or those of a YAML file.

    Args:
        tell: told which checkpoints are damaged.

    Returns:
        The settings, and the iteration of the weights of a run.

    Raises:
        UserError: as `load`; or the folder is no run, or a run without weights.
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
    """The folder of the weights that were trained longest, and their iteration.

    `weights/` unless a checkpoint is newer, as in a run that was resumed and stopped again. Both hold the averaged
    weights if there is an average. A checkpoint whose weights are not what was written is skipped.

    Args:
        tell: told which are skipped, and why.

    Raises:
        UserError: the run has left none yet, or none that is sound.
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
    """Folders of the whole checkpoints, the newest last."""
    found = [path for path in (run / "checkpoints").glob("iteration-*") if re.fullmatch(r"iteration-\d+", path.name)]
    return sorted(found, key=iteration_of)


def iteration_of(folder: Path) -> int:
    """The iteration that a checkpoint continues with."""
    return int(folder.name.removeprefix("iteration-"))


def digest(file: Path) -> dict[str, Any]:
    """Size and SHA-256, as the manifest has them."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def fault_of_weights(checkpoint: Path) -> str | None:
    """`fault_of` those files that are read to sample and evaluate."""
    return fault_of(checkpoint, lambda names: [name for name in names if name not in FOR_TRAINING])


def fault_of(folder: Path, chosen: Callable[[list[str]], Iterable[str]]) -> str | None:
    """Why a checkpoint cannot be used; None if the files that are `chosen` of its manifest's are what was written."""
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
