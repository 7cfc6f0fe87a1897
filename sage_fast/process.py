"""What training scores: the steps of the rollout (reverse process), or final samples noised again (forward process).

Each process says which transitions it scores, what it keeps of a rollout and where its old log-prob comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sage_fast.transitions import TransitionTable, forward_table

if TYPE_CHECKING:
    from sage_fast.rollout.batch import Batch
    from sage_fast.rollout.replay import Replay
    from sage_fast.rollout.trajectories import Trajectories


class Process(Protocol):
    """
    Attributes:
        scores_rollout: the rollout itself gives the log-probs and velocities of what is trained.
    """

    scores_rollout: bool

    def table(self, rollout: TransitionTable) -> TransitionTable:
        """The transitions that are scored, one for each step of the rollout."""

    def successors(self, steps: Sequence[int], length: int) -> dict[int, int]:
        """step -> index of the latents that its transition leads to, for the trained `steps` of `length`."""

    def record(
        self, kept: Trajectories, rows: slice, step: int, x: Tensor, x_next: Tensor, log_prob: Tensor, velocity: Tensor
    ) -> None:
        """Keep what is needed of one step of samples `rows`."""

    def finish(self, kept: Trajectories, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        """Keep what is needed of the final latents of samples `rows`."""

    def score_old(self, replay: Replay, batch: Batch, quiet: bool) -> None:
        """Score what is trained with the rollout's weights, if the rollout did not; they are the present ones."""

    def log_prob_old(self, kept: Trajectories, micro: Sequence[tuple[int, int]], log_prob: Tensor) -> Tensor:
        """Log-probs `[B]` under the rollout policy; `log_prob` is that of the policy in training."""


class Reverse:
    """Score the steps x_t -> x_{t+1} of the rollout, with the log-probs that it recorded."""

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

    def score_old(self, replay: Replay, batch: Batch, quiet: bool) -> None:
        pass

    def log_prob_old(self, kept: Trajectories, micro: Sequence[tuple[int, int]], log_prob: Tensor) -> Tensor:
        return torch.stack([kept.log_probs[t][i] for i, t in micro])


class Forward:
    """Noise the final samples again, and score each clean sample from its noise level (DiffusionNFT, docs/math.md)."""

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

    def score_old(self, replay: Replay, batch: Batch, quiet: bool) -> None:
        if batch.trajectories.velocities:  # else an iteration has one update, where both policies are the same
            replay.score_noised(batch, quiet)

    def log_prob_old(self, kept: Trajectories, micro: Sequence[tuple[int, int]], log_prob: Tensor) -> Tensor:
        if not kept.velocities:
            return log_prob.detach()
        return torch.stack([kept.log_probs[t][i] for i, t in micro])


REVERSE, FORWARD = Reverse(), Forward()
