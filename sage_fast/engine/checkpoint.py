"""Checkpoints of a run: weights, optimizer, anchor, EMA and counters. Randomness needs none: seeds are derived."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from sage_fast.engine.distributed import barrier, rank

if TYPE_CHECKING:
    from sage_fast.trainer import Trainer

KEPT_CHECKPOINTS = 2


def save_checkpoint(trainer: Trainer, run: Path, iteration: int) -> None:
    """Write `checkpoints/iteration-N`; the folder appears whole or not at all, and the last two are kept."""
    if rank() == 0:
        folder = run / "checkpoints" / f"iteration-{iteration:06d}"
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        trainer.engine.save(partial)
        trainer.policy.save_weights(partial)
        if trainer.anchor is not None:
            save_file({k: v.contiguous() for k, v in trainer.anchor.items()}, partial / "anchor.safetensors")
        state = {"iteration": iteration} | trainer.state_dict()
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        for old in _checkpoints(run)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
    barrier()


def load_checkpoint(trainer: Trainer, run: Path) -> int:
    """Restore the newest checkpoint of `run`; returns the iteration to go on with (0 if there is none yet)."""
    found = _checkpoints(run)
    if not found:
        return 0
    state = json.loads((found[-1] / "state.json").read_text())
    trainer.engine.load(found[-1], state["optimizer_steps"])
    if trainer.anchor is not None:
        trainer.anchor = load_file(found[-1] / "anchor.safetensors", device=str(trainer.device))
    trainer.load_state_dict(state)
    return int(state["iteration"])


def _checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in (run / "checkpoints").glob("iteration-*") if path.suffix != ".partial")
