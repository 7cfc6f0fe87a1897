"""The training state of an engine on disk: every rank writes its parts, and any number of ranks reads them.

<folder>/trainable-*.safetensors ema-* anchor-* optimizer-<moment>-*  as run/shards.py has them
<folder>/optimizer.json                                               name of the optimizer, and steps of each weight
"""

from __future__ import annotations

from pathlib import Path

import torch

from sage_fast.models.policy import State, check_names
from sage_fast.parallel import Engine
from sage_fast.run.shards import Layout, SavedParts
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, write_json
from sage_fast.util.ranks import fail_together, rank

MOMENT = "optimizer-"
OPTIMIZER = "optimizer.json"


def save_training_state(folder: Path, engine: Engine, anchor: State | None = None) -> list[Path]:
    """Write this rank's parts into an existing folder, and return its files. Collective.

    All engines write the same files, so a run can resume with another engine.
    """
    states = {"trainable": engine.policy.parts()}
    states |= {kind: state for kind, state in (("ema", engine.ema), ("anchor", anchor)) if state is not None}
    steps = {}
    for name, values in engine.optimizer_state.items():
        for key, value in values.items():
            if key == "step":
                steps[name] = int(value)
            else:
                states.setdefault(MOMENT + key, {})[name] = value
    layout = Layout(engine.policy)
    with fail_together():
        written = [layout.write(folder, kind, state) for kind, state in states.items()]
        if rank() == 0:
            write_json({"optimizer": engine.config.optimizer, "steps": steps}, folder / OPTIMIZER)
            written.append(folder / OPTIMIZER)
    return written


def load_training_state(folder: Path, engine: Engine, steps: int) -> State | None:
    """Restore what was saved at optimizer step `steps`, and return the anchor, if there is one. Collective.

    Raises:
        UserError: `train.ema_decay` has been switched on since, `train.optimizer` is another one, or the files do not
            hold these weights.
    """
    saved, optimizer, config = SavedParts(folder), read_json(folder / OPTIMIZER), engine.config
    if engine.ema is not None and "ema" not in saved.kinds:
        raise UserError(
            f"train.ema_decay = {config.ema_decay}: the checkpoint holds no average to continue; resume with 0 (and "
            "sampling.averaged_weights = false), or start another run with --model.weights"
        )
    if optimizer["optimizer"] != config.optimizer:
        raise UserError(
            f"train.optimizer = {config.optimizer!r}: the checkpoint is of {optimizer['optimizer']!r}; resume with "
            "that, or start another run with --model.weights"
        )
    layout, parts = Layout(engine.policy), engine.policy.parts()
    check_names(parts, saved.kinds.get("trainable", {}))
    state = {name: {"step": torch.tensor(float(step))} for name, step in optimizer["steps"].items()}
    for kind, slices in saved.kinds.items():
        if kind.startswith(MOMENT):
            moments = saved.read(kind, {name: engine.optimized[name] for name in slices}, layout)
            for name, moment in moments.items():
                state.setdefault(name, {})[kind.removeprefix(MOMENT)] = moment
    if engine.ema is not None:
        engine.ema = saved.read("ema", parts, layout)
    engine.restore(saved.read("trainable", parts, layout), state, steps)
    return saved.read("anchor", parts, layout) if "anchor" in saved.kinds else None
