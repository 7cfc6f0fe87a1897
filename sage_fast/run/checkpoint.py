"""Checkpoints and final weights of a run. No RNG state: seeds are derived.

<run>/checkpoints/iteration-N/           manifest.json and the weights, as sampling and export read them
<run>/checkpoints/iteration-N/training/  what only a resume reads: state.json with the trainer's counters;
                                         optimizer.json with the optimizer's name and the steps of each weight;
                                         trainable-*, ema-*, anchor-*, optimizer-<moment>-*, as run/shards.py has them

A checkpoint is the state between two iterations, never within one. It is written to a temporary folder, which is
renamed once every file is on disk. The manifest holds each file's size and SHA-256; loading verifies them. Of the best
checkpoint, once it is old, only the weights are kept.

Only rank 0 lists folders. On a network file system the other ranks may not see new files yet.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sage_fast.eval.scores import composite, mean_and_margin
from sage_fast.models.policy import State, check_names
from sage_fast.parallel import Engine
from sage_fast.run.folder import MANIFEST, STATE, TRAINING, RunFolder, digest, fault_of, iteration_of, keep_weights
from sage_fast.run.shards import Layout, SavedParts
from sage_fast.run.weights import save_weights
from sage_fast.util.console import wrapped
from sage_fast.util.errors import RankError, UserError, reason
from sage_fast.util.files import PARTIAL, atomic_path, read_json, remove_folder, sync, write_json
from sage_fast.util.ranks import all_gather_object, broadcast_object, fail_together, rank, world_size

log = logging.getLogger(__name__)

MOMENT = "optimizer-"
OPTIMIZER = "optimizer.json"


def save_checkpoint(
    run: Path, iteration: int, engine: Engine, counters: Mapping[str, Any], anchor: State | None
) -> None:
    """Write `checkpoints/iteration-N` atomically. Collective.

    An intact checkpoint of the same iteration (such as the one just resumed from) is left alone. Later checkpoints
    are removed: loading must have skipped them.

    Args:
        run: the run folder.
        iteration: the iteration to continue with.
        engine: whose state is saved.
        counters: the trainer's counters, small and JSON-serialisable.
        anchor: weights of the KL anchor, if there is one.

    Raises:
        OSError: a file cannot be written; earlier checkpoints are untouched.
        RankError: another rank cannot write its part; earlier checkpoints are untouched.
    """
    folder = RunFolder(run).checkpoint(iteration)
    if broadcast_object(folder.is_dir(), 0) and _fault(folder) is None:
        return
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        with fail_together():
            if rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                state = {"iteration": iteration, "optimizer_steps": engine.steps, **counters}
                write_json(state, partial / STATE)
        written = [partial / STATE] if rank() == 0 else []
        written += save_training_state(partial / TRAINING, engine, anchor)
        written += save_weights(engine.policy, partial, engine.ema)
        write_manifest(partial, written)
        with fail_together():
            if rank() == 0:
                for inner in [path for path in partial.rglob("*") if path.is_dir()]:
                    sync(inner)
                for other in [other for other in RunFolder(run).checkpoints() if iteration_of(other) >= iteration]:
                    remove_folder(other)
                partial.replace(folder)
                sync(folder.parent)
    except (OSError, RankError):
        if rank() == 0:  # free the space: the disk may be full
            shutil.rmtree(partial, ignore_errors=True)
        raise


def save_final_weights(run: Path, iteration: int, engine: Engine) -> None:
    """Write `weights/` atomically: the weights after the last iteration. Collective."""
    with atomic_path(RunFolder(run).weights) if rank() == 0 else contextlib.nullcontext() as made:
        partial = broadcast_object(made, 0)
        write_manifest(partial, save_weights(engine.policy, partial, engine.ema), iteration=iteration)


def prune_checkpoints(run: Path, keep: int, weights: Mapping[str, float] | None) -> None:
    """Remove all but the last `keep` checkpoints and the weights of the best one. On rank 0 only.

    A checkpoint whose evaluation cannot be compared may be the best one, and its weights are kept too.

    Args:
        weights: weights of the composite in which checkpoints are compared; None does not keep the best one.
    """
    found = RunFolder(run).checkpoints()
    rewards = {} if weights is None else _rewards(run, found, weights)
    best = _best_of(rewards)
    for folder in found[:-keep]:
        kept = folder == best or math.isnan(rewards.get(folder, 0.0))
        if kept and folder != best and (folder / TRAINING).is_dir():
            log.info(wrapped(f"note: the weights of {folder.name} are kept: its evaluation cannot be compared"))
        try:
            (keep_weights if kept else remove_folder)(folder)
        except (OSError, UserError) as error:
            log.info(wrapped(f"note: an old checkpoint cannot be removed: {reason(error)}"))


def is_best(run: Path, iteration: int, weights: Mapping[str, float]) -> bool:
    """Whether this iteration's evaluation is better under `weights` than that of every checkpoint. Collective."""
    folder = RunFolder(run).checkpoint(iteration)
    return bool(
        broadcast_object(_best_of(_rewards(run, [*RunFolder(run).checkpoints(), folder], weights)) == folder, 0)
    )


def _rewards(run: Path, folders: Iterable[Path], weights: Mapping[str, float]) -> dict[Path, float]:
    """Return the mean held-out composite of each evaluated checkpoint; NaN if its evaluation cannot tell.

    A resume may have changed the weights, so the composite is computed from the stored parts.
    """
    rewards = {}
    for folder in folders:
        try:
            if (scores := RunFolder(run).evaluation(folder.name)) is not None:
                rewards[folder] = mean_and_margin(scores["prompts"], composite(scores, weights))[0]
            elif not (folder / TRAINING).is_dir():  # only weights are left: it was the best one
                rewards[folder] = math.nan
        except (OSError, UserError):
            rewards[folder] = math.nan
    return rewards


def _best_of(rewards: Mapping[Path, float]) -> Path | None:
    """Return the checkpoint with the highest reward, the oldest of equals; None if there is none."""
    return max((f for f in rewards if math.isfinite(rewards[f])), key=rewards.__getitem__, default=None)


def load_checkpoint(run: Path, engine: Engine) -> tuple[int, dict[str, Any], State | None] | None:
    """Restore the engine from the newest intact checkpoint of `run`. Collective.

    Returns:
        The iteration to continue with, the trainer's counters and the anchor; None if there is no checkpoint yet.

    Raises:
        UserError: there are checkpoints, but none can be resumed.
    """
    faults = []
    for folder in reversed(broadcast_object(RunFolder(run).checkpoints(), 0)):
        fault = _fault(folder)
        if fault is None:
            counters = read_json(folder / STATE)
            anchor = load_training_state(folder / TRAINING, engine, counters["optimizer_steps"])
            return counters["iteration"], counters, anchor
        faults.append(f"{folder.name}: {fault}")
        log.info(wrapped(f"note: checkpoint {folder.name} cannot be resumed and is skipped: {fault}"))
    if faults:
        raise UserError(
            f"{str(run / 'checkpoints')!r}: no checkpoint can be used ({'; '.join(faults)}); put a sound copy "
            "there, or start another run with --output and no --resume; nothing was changed"
        )
    return None


# -- the state of an engine, which any number of ranks and any other engine can read ----------------------------------


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


# -- checksums --------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, written: Iterable[Path], **facts: int) -> None:
    """Write the manifest of a folder. Collective: each rank fsyncs and hashes its own files.

    Args:
        written: the files in `folder` that this rank has written.
        facts: what the manifest says beside the files.
    """
    with fail_together():
        for file in written:
            sync(file)
        own = {file.relative_to(folder).as_posix(): digest(file) for file in written}
    files = {name: entry for of_rank in all_gather_object(own) for name, entry in of_rank.items()}
    with fail_together():
        if rank() == 0:
            write_json({**facts, "files": dict(sorted(files.items()))}, folder / MANIFEST)


def _fault(folder: Path) -> str | None:
    """Return why a checkpoint cannot be resumed, None if it can. Collective: the ranks share the hashing."""
    with fail_together():
        own = fault_of(folder, lambda names: names[rank() :: world_size()], needed=STATE)
    return next((fault for fault in all_gather_object(own) if fault is not None), None)
