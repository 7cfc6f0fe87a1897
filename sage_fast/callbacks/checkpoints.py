"""When a run saves a checkpoint, and which ones it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_fast.callbacks.interface import Callback
from sage_fast.eval.scores import composite, mean_and_margin
from sage_fast.run_folder import RunFolder, iteration_of
from sage_fast.util.errors import UserError
from sage_fast.util.files import only_safer, remove_folder
from sage_fast.util.ranks import broadcast_object

if TYPE_CHECKING:
    from sage_fast.run.train import Run


class Checkpoints(Callback):
    """Saves a checkpoint every `train.checkpoint_interval` iterations and, with `train.keep_best`,
    whenever an evaluation finds a better policy than those saved, or a callback has asked for one;
    removes those that are not kept.

    The run itself saves the last iteration.
    """

    def __init__(self) -> None:
        self._found_best = False

    def on_iteration_start(self, run: Run, iteration: int) -> None:
        self._found_best = False

    def on_evaluation_end(self, run: Run, name: str, scores: Mapping[str, Any]) -> None:
        weights = _weights_of_best(run)
        if weights is not None and name not in ("before", "after"):
            is_best = run.is_main and _is_best(run, scores, weights)
            self._found_best = broadcast_object(is_best, 0)

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        is_due = run.iteration % run.config.train.checkpoint_interval == 0
        if is_due or self._found_best or run.checkpoint_wanted:
            run.save()

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        if not run.is_main:
            return
        config = run.config
        prune_checkpoints(
            run.folder, config.train.keep_checkpoints, _weights_of_best(run), config.eval.interval
        )


def _weights_of_best(run: Run) -> Mapping[str, float] | None:
    """Return the weights of the parts by which the best policy is found; None if none is kept.

    Parts of a reward that compares the videos of a prompt do not count: they do not rise when all
    videos become better.
    """
    weights = run.setup.reward.pointwise_weights
    if not run.config.train.keep_best or not any(weights.values()):
        return None
    return weights


def _is_best(run: Run, scores: Mapping[str, Any], weights: Mapping[str, float]) -> bool:
    """Whether an evaluation is better than that of every checkpoint; on rank 0 only."""
    saved = heldout_rewards(
        run.folder, RunFolder(run.folder).checkpoints(), weights, run.config.eval.interval
    )
    reward = mean_and_margin(scores["prompts"], composite(scores, weights))[0]
    comparable = [other for other in saved.values() if math.isfinite(other)]
    return math.isfinite(reward) and all(reward > other for other in comparable)


def prune_checkpoints(
    run: Path, keep: int, weights: Mapping[str, float] | None, interval: int = 0
) -> None:
    """Remove all but the last `keep` checkpoints and the best one. On rank 0 only.

    The best one has the highest mean held-out composite. One whose evaluation is lost, or cannot be
    read or compared, may be the best, and stays too.

    Args:
        weights: weights of the composite, since a resume may have changed them; None does not keep
            the best one.
        interval: `eval.interval`: which checkpoints have been evaluated; 0: those that have scores.
    """
    found = RunFolder(run).checkpoints()
    rewards: dict[Path, float] = {}
    if weights is not None:
        rewards = heldout_rewards(run, found, weights, interval)
    comparable = [folder for folder in rewards if math.isfinite(rewards[folder])]
    best = max(comparable, key=rewards.__getitem__, default=None)

    for folder in found[:-keep]:
        may_be_best = math.isnan(rewards.get(folder, 0.0))
        if folder == best or may_be_best:
            continue
        with only_safer("remove", folder):
            remove_folder(folder)


def heldout_rewards(
    run: Path, checkpoints: Iterable[Path], weights: Mapping[str, float], interval: int
) -> dict[Path, float]:
    """Return evaluated checkpoint -> its mean held-out composite; NaN where that is lost or cannot
    be compared."""
    rewards: dict[Path, float] = {}
    for folder in checkpoints:
        try:
            scores = RunFolder(run).evaluation(folder.name)
            if scores is not None:
                rewards[folder] = mean_and_margin(scores["prompts"], composite(scores, weights))[0]
            elif interval > 0 and iteration_of(folder) % interval == 0:
                rewards[folder] = math.nan
        except (OSError, UserError):
            rewards[folder] = math.nan
    return rewards
