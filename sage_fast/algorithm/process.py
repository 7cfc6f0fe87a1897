"""The process that training scores: the rollout's steps (reverse), or final samples with new noise (forward).

A process defines which transitions are scored, what is kept of a rollout, and where the old log-prob comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import TransitionTable, forward_table

if TYPE_CHECKING:
    from sage_fast.rollout.batch import Batch
    from sage_fast.rollout.replay import Replay
    from sage_fast.rollout.trajectories import Trajectories


class Process(Protocol):
    """A process that training scores.

    Attributes:
        scores_rollout: whether the rollout itself yields the log-probs and velocities of the trained transitions.
    """

    scores_rollout: bool

    def table(self, rollout: TransitionTable) -> TransitionTable:
        """Return the scored transitions, one for each step of the rollout."""

    def successors(self, steps: Sequence[int], length: int) -> dict[int, int]:
        """Return trained step -> index of the latents its transition leads to; the rollout has `length` steps."""

    def record(
        self, kept: Trajectories, rows: slice, step: int, x: Tensor, x_next: Tensor, log_prob: Tensor, velocity: Tensor
    ) -> None:
        """Store what training needs of one step of samples `rows`."""

    def finish(self, kept: Trajectories, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        """Store what training needs of the final latents of samples `rows`."""

    def score_old(self, replay: Replay, batch: Batch) -> None:
        """Score the trained transitions with the rollout's weights, the present ones; no-op if nothing needs it."""

    def log_prob_old(self, kept: Trajectories, micro: Sequence[tuple[int, int]], log_prob: Tensor) -> Tensor:
        """Return the log-probs `[B]` under the rollout policy; `log_prob` is under the policy in training."""


class Reverse:
    """Reverse process: scores the rollout's steps x_t -> x_{t+1}, with the log-probs the rollout recorded."""

    scores_rollout = True

    def table(self, rollout: TransitionTable) -> TransitionTable:
        return rollout

    def successors(self, steps: Sequence[int], length: int) -> dict[int, int]:
        return {t: t + 1 for t in steps}

    def record(
        self, kept: Trajectories, rows: slice, step: int, x: Tensor, x_next: Tensor, log_prob: Tensor, velocity: Tensor
    ) -> None:
        kept.record(rows, step, x, x_next, log_prob, velocity)

    def finish(self, kept: Trajectories, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        pass

    def score_old(self, replay: Replay, batch: Batch) -> None:
        pass

    def log_prob_old(self, kept: Trajectories, micro: Sequence[tuple[int, int]], log_prob: Tensor) -> Tensor:
        return torch.stack([kept.log_probs[t][i] for i, t in micro])


class Forward:
    """Forward process (docs/math.md): adds new noise to the final samples and scores them clean."""

    scores_rollout = False

    def table(self, rollout: TransitionTable) -> TransitionTable:
        return forward_table(rollout.sigmas)

    def successors(self, steps: Sequence[int], length: int) -> dict[int, int]:
        return dict.fromkeys(steps, length)

    def record(
        self, kept: Trajectories, rows: slice, step: int, x: Tensor, x_next: Tensor, log_prob: Tensor, velocity: Tensor
    ) -> None:
        pass

    def finish(self, kept: Trajectories, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        kept.noise_again(rows, latents, seeds, sigmas)

    def score_old(self, replay: Replay, batch: Batch) -> None:
        replay.score_noised(batch)

    def log_prob_old(self, kept: Trajectories, micro: Sequence[tuple[int, int]], log_prob: Tensor) -> Tensor:
        if not kept.scored:  # both policies are equal, or the loss needs the old one's log-prob up to a constant only
            return log_prob.detach()
        return torch.stack([kept.log_probs[t][i] for i, t in micro])


REVERSE, FORWARD = Reverse(), Forward()
