"""Manifests of checkpoints and final weights: whether one is whole.

Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, remove, write_json

MANIFEST = "manifest.json"
"""File in a checkpoint and in `weights/` that holds the size and SHA-256 of every other file."""

NOT_WRITTEN = f"{MANIFEST} is not what was written"
"""Fault of a checkpoint whose manifest cannot be read as one."""

TRAINING = "training"
"""Folder in a checkpoint of the files that only a resume reads."""

STATE = f"{TRAINING}/state.json"
"""File in a checkpoint that holds the trainer's counters."""


def check_weights(weights: str | None) -> None:
    """Check the weights that `model.weights` names, if a run wrote them.

    Raises:
        UserError: they are damaged.
    """
    folder = Path(weights or "")
    if weights is not None and (folder / MANIFEST).is_file() and (fault := fault_of_weights(folder)):
        raise UserError(f"model.weights = {str(folder)!r}: damaged: {fault}; expected what the run wrote, or a copy")


def iteration_of(folder: Path) -> int:
    """Return the iteration that a checkpoint continues with."""
    return int(folder.name.removeprefix("iteration-"))


def digest(file: Path) -> dict[str, Any]:
    """Return a file's manifest entry: size and SHA-256."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def iteration_of_weights(folder: Path) -> int | None:
    """Return the iteration of `weights/`; None if its manifest is missing or damaged."""
    try:
        found = read_json(folder / MANIFEST).get("iteration")
    except (OSError, UserError):
        return None
    return found if isinstance(found, int) else None


def fault_of_weights(checkpoint: Path) -> str | None:
    """Return `fault_of` for the files that sampling and evaluation read."""
    return fault_of(checkpoint, lambda names: [name for name in names if not _is_for_training(name)])


def _is_for_training(name: str) -> bool:
    return name.startswith(f"{TRAINING}/")


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries: name of a file -> its size and SHA-256.

    Raises:
        UserError: the manifest is damaged.
    """
    found = read_json(folder / MANIFEST)
    try:
        return {str(name): {key: entry[key] for key in ("bytes", "sha256")} for name, entry in found["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(NOT_WRITTEN) from error


def keep_weights(checkpoint: Path) -> None:
    """Remove the files that only a resume reads. The manifest comes first: a kill then leaves only superfluous files.

    Raises:
        OSError: a file cannot be changed.
        UserError: the manifest is damaged.
    """
    kept = {name: entry for name, entry in _files(checkpoint).items() if not _is_for_training(name)}
    write_json({"files": kept}, checkpoint / MANIFEST)
    remove(checkpoint / TRAINING)


def fault_of(folder: Path, chosen: Callable[[list[str]], Iterable[str]], needed: str | None = None) -> str | None:
    """Return why a checkpoint cannot be used; None if the manifest's `chosen` files match their checksums.

    Args:
        needed: a file that the manifest must list.
    """
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        expected = _files(folder)
    except UserError:
        return NOT_WRITTEN
    if needed not in {None, *expected}:
        return f"it has no {needed}: only its weights were kept, or another version of sage-fast wrote it"
    for name in chosen(sorted(expected)):
        size, file = expected[name]["bytes"], folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
        if digest(file)["sha256"] != expected[name]["sha256"]:
            return f"{name} has changed since it was written (SHA-256)"
    return None
