"""Forwards at the stored transitions of an iteration, with the policy's weights or the anchor's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.objective import stores_rollout_velocities
from sage_fast.algorithm.schedule import Transition
from sage_fast.config.schema import Config
from sage_fast.models.policy import Policy, State
from sage_fast.models.protocol import Condition, Inputs, Key, pass_lengths
from sage_fast.ops import transition_score
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.loop import equal_runs
from sage_fast.rollout.trajectories import on_device
from sage_fast.util.console import progress


class Replay:
    """
    Args:
        policy: whose forwards these are.
        config: of the run.
        embeddings: key -> condition, of every training sample and its negative one.

    Attributes:
        lengths: key -> length of the condition in each pass of a forward.
    """

    def __init__(self, policy: Policy, config: Config, embeddings: Mapping[Any, Condition]) -> None:
        self.policy = policy
        self.config = config
        self.lengths = pass_lengths(embeddings, guided=policy.uses_guidance)

    def runs(self, keys: Sequence[Key], size: int) -> list[slice]:
        """Neighbours that go through one forward: at most `size` conditions of one length, so that none is padded."""
        return equal_runs([self.lengths[key] for key in keys], size)

    @property
    def velocity_dtype(self) -> torch.dtype:
        return torch.float32 if self.policy.uses_guidance else self.policy.dtype

    def score(
        self, batch: Batch, micro: Sequence[Transition], v_old: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Forward at `micro`; its log-probs, KL to the anchor and KL to the rollout's velocity (to `v_old`, if it is
        given), each float32 `[B]`.
        """
        rows = batch.trajectories
        x = rows.gather(rows.states, micro)
        return transition_score(
            x,
            rows.next_states(micro),
            self.velocity(batch, micro, x),
            batch.coefs,
            on_device([t for _, t in micro], self.policy.device),
            batch.anchor_of(micro),
            rows.gather(rows.velocities, micro) if v_old is None and stores_rollout_velocities(self.config) else v_old,
        )

    def velocity(self, batch: Batch, micro: Sequence[Transition], x: Tensor | None = None) -> Tensor:
        """`[B, C, T, H, W]`, guidance included, at the stored latents (`x`, if they are at hand)."""
        if x is None:
            x = batch.trajectories.gather(batch.trajectories.states, micro)
        return self.policy.guided_velocity(x, self._inputs(batch, micro))

    def _inputs(self, batch: Batch, micro: Sequence[Transition]) -> Inputs:
        """One row of steps where all of them are the same."""
        keys, steps = [batch.keys[i] for i, _ in micro], [t for _, t in micro]
        same = len(set(steps)) == 1
        return batch.conditioning.at(keys, on_device(steps[:1] if same else steps, self.policy.device))

    @torch.no_grad()
    def anchor_velocities(
        self, batch: Batch, steps: Sequence[int], anchor: State, quiet: bool = True
    ) -> dict[int, Tensor]:
        """step -> `[N, C, T, H, W]`: one forward of the anchor's weights for each sample and step."""
        velocities = {t: batch.trajectories.empty(self.velocity_dtype) for t in steps}
        with self.policy.using(anchor):
            for t, run, micro in self._work(batch, steps, quiet):
                velocities[t][run].copy_(self.velocity(batch, micro), non_blocking=True)
        return velocities

    @torch.no_grad()
    def score_noised(self, batch: Batch, quiet: bool = True) -> None:
        """Fill in the velocities and log-probs of the rollout's weights, which are the present ones, at final samples
        that were noised again: one forward each."""
        rows = batch.trajectories
        for t, run, micro in self._work(batch, sorted(rows.velocities), quiet):
            x, at = rows.gather(rows.states, micro), on_device(t, rows.device)
            v = self.velocity(batch, micro, x)
            rows.log_probs[t][run] = transition_score(x, rows.next_states(micro), v, batch.coefs, at)[0]
            rows.velocities[t][run].copy_(v, non_blocking=True)

    def _work(self, batch: Batch, steps: Sequence[int], quiet: bool) -> Iterable[tuple[int, slice, list[Transition]]]:
        """(step, samples, their transitions) of forwards at every sample and step; as many on every rank."""
        runs = self.runs(batch.keys, self.config.sampling.batch_size)
        work = [(t, run, [(i, t) for i in range(run.start, run.stop)]) for t in steps for run in runs]
        work = [item for item, _ in self.policy.states.lockstep(work, work[-1])]
        return progress(work, "anchor", len(work), "forward", quiet=quiet)
