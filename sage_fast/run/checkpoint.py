"""Checkpoints of a run: weights, optimizer, anchor, EMA and counters. Randomness needs none: seeds are derived.

<run>/checkpoints/iteration-N/  state.json anchor.safetensors, and what the engine writes
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.distributed import barrier, rank
from sage_fast.engine import Engine
from sage_fast.files import read_json
from sage_fast.policy.hunyuan import State

KEPT_CHECKPOINTS = 2


def save_checkpoint(
    run: Path, iteration: int, engine: Engine, counters: Mapping[str, Any], anchor: State | None
) -> None:
    """Write `checkpoints/iteration-N`; every rank calls. The folder appears whole or not at all; the last two are kept.

    Args:
        run: the run folder.
        iteration: the one to continue with.
        engine: saves its own part.
        counters: the trainer's, small and JSON.
        anchor: weights of the KL's anchor, if there is one.
    """
    folder = run / "checkpoints" / f"iteration-{iteration:06d}"
    partial = folder.with_name(folder.name + ".partial")
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    engine.save(partial)
    if anchor is not None:
        engine.save_state(anchor, partial / "anchor.safetensors")
    if rank() == 0:
        state = {"iteration": iteration, "optimizer_steps": engine.steps, **counters}
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        for old in checkpoints(run)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
    barrier()


def load_checkpoint(run: Path, engine: Engine) -> tuple[int, dict[str, Any], State | None] | None:
    """Restore the engine from the newest checkpoint of `run`; every rank calls.

    Returns:
        The iteration to continue with, the trainer's counters and the anchor; None if there is no checkpoint yet.
    """
    found = checkpoints(run)
    if not found:
        return None
    counters = read_json(found[-1] / "state.json")
    engine.load(found[-1], counters["optimizer_steps"])
    anchor = found[-1] / "anchor.safetensors"
    return counters["iteration"], counters, engine.load_state(anchor) if anchor.is_file() else None


def checkpoints(run: Path) -> list[Path]:
    """Folders of the whole checkpoints, the newest last."""
    return sorted(path for path in (run / "checkpoints").glob("iteration-*") if path.suffix != ".partial")
