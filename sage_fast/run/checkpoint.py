"""Checkpoints and final weights of a run. No RNG state: seeds are derived.

<run>/checkpoints/iteration-N/           manifest.json and the weights, as sampling and export read
                                         them
<run>/checkpoints/iteration-N/training/  what only a resume reads: state.json with the trainer's
                                         counters;
                                         optimizer.json with the optimizer's name, the steps of each
                                         weight, and the kinds of parts;
                                         trainable-*, ema-*, anchor-*, optimizer-<moment>-*, as
                                         run/shards.py has them

A checkpoint is the state between two iterations, never within one. It is written to a temporary
folder, which is renamed once every file is on disk. The manifest holds each file's size and
SHA-256; loading verifies them.

Only rank 0 lists folders. On a network file system the other ranks may not see new files yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sage_fast.config.engines import OPTIMIZERS
from sage_fast.config.fields import is_finite
from sage_fast.models.policy import State, check_names
from sage_fast.parallel import Engine
from sage_fast.run.shards import SavedParts, ShardLayout
from sage_fast.run.weights import save_weights
from sage_fast.run_folder import (
    MANIFEST,
    SKIPPED,
    STATE,
    TRAINING,
    RunFolder,
    digest,
    fault_of,
    files_of,
    iteration_of,
)
from sage_fast.util.errors import RankError, UserError
from sage_fast.util.files import (
    PARTIAL,
    atomic_path,
    discard,
    only_safer,
    put_in_place,
    read_json,
    remove_folder,
    sync,
    write_json,
)
from sage_fast.util.presence import entries
from sage_fast.util.ranks import (
    all_gather_object,
    broadcast_object,
    fail_together,
    rank,
    world_size,
)

MOMENT = "optimizer-"
OPTIMIZER = "optimizer.json"
MOMENTS = ({"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})
"""What an optimizer holds of a weight: AdamW, Muon."""


def save_checkpoint(
    run: Path, iteration: int, engine: Engine, counters: Mapping[str, Any], anchor: State | None
) -> None:
    """Write `checkpoints/iteration-N` atomically. Collective.

    An intact checkpoint of the same iteration (such as the one just resumed from) is left alone.
    Later checkpoints are removed, and those set aside by a resume: loading has skipped them.

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
                discard(partial)
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
                put_in_place(partial, folder)
                for other in RunFolder(run).checkpoints():
                    if iteration_of(other) > iteration:
                        remove_folder(other)
                for other in entries(folder.parent):
                    if other.name.endswith(SKIPPED):  # nothing reads it
                        with only_safer("remove", other):
                            remove_folder(other)
    except (OSError, RankError):
        if rank() == 0:  # free the space: the disk may be full
            discard(partial)
        raise


def save_final_weights(run: Path, iteration: int, engine: Engine) -> None:
    """Write `weights/` atomically: the weights after the last iteration. Collective."""
    with atomic_path(RunFolder(run).weights) if rank() == 0 else contextlib.nullcontext() as made:
        partial = broadcast_object(made, 0)
        write_manifest(
            partial, save_weights(engine.policy, partial, engine.ema), iteration=iteration
        )


def load_checkpoint(
    run: Path, engine: Engine, counters: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any], State | None] | None:
    """Restore the engine from the newest sound checkpoint of `run`. Collective.

    A checkpoint is the files that its manifest lists. One that is damaged, or that does not hold
    what a run writes, is skipped with a note; nothing is restored from it.

    Args:
        counters: those of the trainer as they are now: the saved ones must be of their kinds.

    Returns:
        The iteration to continue with, the trainer's counters with the states of `callbacks`, and
        the anchor; None if there is no checkpoint yet.

    Raises:
        UserError: as `RunFolder.first_sound` or `TrainingState.restore`.
        OSError: a checkpoint cannot be read. To skip it would undo what it holds for a fault of
            this moment.
    """

    def read(folder: Path) -> tuple[int, dict[str, Any], TrainingState]:
        try:
            fault = _fault(folder)
        except OSError as error:
            why = (
                f"{error.strerror}: cannot be read now; try again, or move {folder.name} away to "
                "continue without it; nothing was changed"
            )
            raise OSError(error.errno, why, error.filename) from error
        if fault:
            raise UserError(fault)
        with fail_together():
            state, iteration = read_json(folder / STATE), iteration_of(folder)
            # of any kind, as users write them; earlier versions saved none
            callbacks = state.pop("callbacks", {})
            expected = {**(counters or state), "iteration": iteration, "optimizer_steps": 0}
            is_whole = _is_like(state, expected) and isinstance(callbacks, dict)
            if not is_whole or state["iteration"] != iteration:
                missing = [key for key in expected if key not in state]
                which = f": {', '.join(missing)} of this version" if missing else ""
                raise UserError(
                    f"{STATE} does not hold what a run writes after iteration {iteration}{which}"
                )
        state["callbacks"] = callbacks
        training = TrainingState(
            folder / TRAINING, engine, state["optimizer_steps"], files_of(folder)
        )
        return iteration, state, training

    folder = RunFolder(run)
    newest_first = broadcast_object(folder.checkpoints()[::-1], 0)
    found = folder.first_sound(newest_first, read)
    if found is None:
        return None
    iteration, state, training = found
    return iteration, state, training.restore(engine)


def _is_like(value: Any, expected: Any) -> bool:
    """Whether a value of a JSON file is of the kind of `expected`, at any depth; numbers are
    finite, counts from 0."""
    if isinstance(expected, dict):
        same = isinstance(value, dict) and value.keys() == expected.keys()
        return same and all(_is_like(value[key], item) for key, item in expected.items())
    if isinstance(expected, list):
        return isinstance(value, list) and all(_is_like(item, 0.0) for item in value)
    if isinstance(expected, float):
        return type(value) in (int, float) and is_finite(value)
    return type(value) is type(expected) and (type(value) is not int or 0 <= value < 2**53)


# -- the state of an engine, which any number of ranks and any other engine can read ---------------


def save_training_state(folder: Path, engine: Engine, anchor: State | None = None) -> list[Path]:
    """Write the ranks' parts into an existing folder; return the files of this rank. Collective.

    All engines write the same files, so a run can resume with another engine.
    """
    states = {"trainable": engine.policy.parts()}
    if engine.ema is not None:
        states["ema"] = engine.ema
    if anchor is not None:
        states["anchor"] = anchor
    steps = {}
    for name, values in engine.optimizer_state.items():
        for key, value in values.items():
            if key == "step":
                steps[name] = int(value)
            else:
                states.setdefault(MOMENT + key, {})[name] = value
    layout = ShardLayout(engine.policy)
    files = layout.gather(states)
    with fail_together():
        written: list[Path] = []
        for kind, slices in files.items():
            written += layout.write(folder, kind, slices)
        if rank() == 0:
            facts = {"optimizer": engine.config.optimizer, "steps": steps, "parts": sorted(files)}
            write_json(facts, folder / OPTIMIZER)
            written.append(folder / OPTIMIZER)
    return written


class TrainingState:
    """What was saved of an engine, as this rank's parts: all of it is read before anything is
    restored. Collective.

    Args:
        folder: where it was saved.
        engine: says which parts this rank needs; it stays as it is.
        steps: the optimizer step at which it was saved.
        files: the names of its files in `folder`, by default all that are there.

    Raises:
        UserError: the files do not hold these weights, or not what an engine writes.
    """

    def __init__(
        self, folder: Path, engine: Engine, steps: int, files: Collection[str] | None = None
    ) -> None:
        self.steps = steps
        self.optimizer: dict[str, Any] = {}
        with fail_together():
            if files is None or OPTIMIZER in files:
                self.optimizer = read_json(folder / OPTIMIZER)
        saved = SavedParts(folder, files)
        layout = ShardLayout(engine.policy)
        parts = engine.policy.parts()
        self._check_optimizer(sorted(saved.kinds))
        check_names(parts, saved.kinds.get("trainable", {}))

        self.moments: dict[str, dict[str, Any]] = {}
        for name, step in self.optimizer["steps"].items():
            self.moments[name] = {"step": torch.tensor(float(step))}
        for kind, slices in saved.kinds.items():
            if not kind.startswith(MOMENT):
                continue
            optimized = {name: engine.optimized[name] for name in slices if name in parts}
            for name, moment in saved.read(kind, optimized, layout).items():
                self.moments.setdefault(name, {})[kind.removeprefix(MOMENT)] = moment
        for name, moments in self.moments.items():
            if name not in parts or moments.keys() not in MOMENTS:
                raise UserError(f"the optimizer's state of {name} is not whole")

        self.weights = saved.read("trainable", parts, layout)
        self.ema: State | None = None
        if engine.ema is not None and "ema" in saved.kinds:
            self.ema = saved.read("ema", parts, layout)
        self.anchor: State | None = None
        if "anchor" in saved.kinds:
            self.anchor = saved.read("anchor", parts, layout)

    def _check_optimizer(self, kinds: list[str]) -> None:
        """Check the content of `OPTIMIZER`.

        Args:
            kinds: of the parts that are there.
        """
        is_known = self.optimizer.get("optimizer") in [*OPTIMIZERS]
        has_its_parts = self.optimizer.get("parts", kinds) == kinds
        steps = self.optimizer.get("steps")
        are_counts = isinstance(steps, dict) and all(_is_like(step, 0) for step in steps.values())
        if not (is_known and has_its_parts and are_counts):
            raise UserError(f"{OPTIMIZER} does not hold what a run writes, or not what is there")

    def restore(self, engine: Engine) -> State | None:
        """Put it into the engine; return the anchor, if there is one.

        Raises:
            UserError: `train.ema_decay` has been switched on since, or `train.optimizer` is another
                one.
        """
        config, optimizer = engine.config, self.optimizer["optimizer"]
        if engine.ema is not None and self.ema is None:
            raise UserError(
                f"train.ema_decay = {config.ema_decay}: the checkpoint holds no average to "
                "continue; resume with 0 (and sampling.averaged_weights = false), or start "
                "another run with --model.weights"
            )
        if optimizer != config.optimizer:
            raise UserError(
                f"train.optimizer = {config.optimizer!r}: the checkpoint is of {optimizer!r}; "
                "resume with that, or start another run with --model.weights"
            )
        engine.ema = self.ema
        engine.restore(self.weights, self.moments, self.steps)
        return self.anchor


# -- checksums -------------------------------------------------------------------------------------


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
    """Return why a checkpoint cannot be resumed, None if it can. Collective: the ranks share the
    hashing.

    Raises:
        OSError: on all ranks, if one cannot read a file: the checkpoint may be sound, so it is not
            a fault of it.
    """
    own, unread = None, None
    with fail_together():
        try:
            own = fault_of(folder, lambda names: names[rank() :: world_size()], needed=STATE)
        except OSError as error:
            unread = error.errno, error.strerror, str(error.filename or folder)
    found = all_gather_object((own, unread))
    for _, why in found:
        if why is not None:
            raise OSError(*why)
    return next((fault for fault, _ in found if fault is not None), None)
