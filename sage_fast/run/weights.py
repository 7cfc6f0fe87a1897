"""A run folder as the source of a command: its settings, and which of its weights stand for it.

Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sage_fast.config import Config
from sage_fast.errors import UserError
from sage_fast.files import read_json
from sage_fast.settings import load


def load_run(source: str, overrides: Mapping[str, str]) -> tuple[Config, int | None]:
    """The settings of a run folder, with its newest weights unless `overrides` name others; or those of a YAML file.

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
    weights, iteration = newest_weights(run)
    return load(run / "config.yaml", {"model.weights": str(weights)} | dict(overrides)), iteration


def newest_weights(run: Path) -> tuple[Path, int]:
    """The folder of the weights that were trained longest, and their iteration.

    `weights/` unless a checkpoint is newer, as in a run that was resumed and stopped again. Both hold the averaged
    weights if there is an average.

    Raises:
        UserError: the run has left none yet.
    """
    found = {number(folder): folder for folder in checkpoints(run)}
    final, scores = run / "weights", run / "eval" / "after.json"
    if final.is_dir() and scores.is_file():
        iteration = read_json(scores).get("iteration")
        if not isinstance(iteration, int):
            raise UserError(f"{scores}: expected a whole number as 'iteration'")
        found[iteration] = final
    if not found:
        raise UserError(f"run {str(run)!r} has neither a checkpoint nor weights with their eval/after.json yet")
    return found[max(found)], max(found)


def checkpoints(run: Path) -> list[Path]:
    """Folders of the whole checkpoints, the newest last."""
    found = [path for path in (run / "checkpoints").glob("iteration-*") if re.fullmatch(r"iteration-\d+", path.name)]
    return sorted(found, key=number)


def number(folder: Path) -> int:
    """The iteration that a checkpoint continues with."""
    return int(folder.name.removeprefix("iteration-"))
