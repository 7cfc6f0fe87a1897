"""Replay: forwards at an iteration's stored transitions, with the policy's weights or the
anchor's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import Transition
from sage_fast.algorithm.objective import Objective, TransitionScores
from sage_fast.models.interface import Condition, Inputs, pass_lengths
from sage_fast.models.policy import Policy, State
from sage_fast.ops import transition_score
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.loop import bucket_by_length
from sage_fast.rollout.trajectories import on_device
from sage_fast.util.console import progress


class Replay:
    """Runs and scores forwards at stored transitions.

    Args:
        policy: the policy.
        objective: the resolved settings.
        batch_size: largest number of samples of a forward without gradients.
        embeddings: key -> condition, for every training sample, including negative ones.

    Attributes:
        lengths: key -> condition length in each pass of a forward.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        batch_size: int,
        embeddings: Mapping[Any, Condition],
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.batch_size = batch_size
        self.lengths = pass_lengths(embeddings, guided=policy.uses_guidance)

    def micro_batches(
        self, batch: Batch, transitions: Sequence[Transition], size: int
    ) -> list[Sequence[Transition]]:
        """Return transitions that share a forward: at most `size` neighbours with prompts of one
        length, unpadded."""
        lengths = [self.lengths[batch.samples[i].prompt] for i, _ in transitions]
        return [transitions[rows] for rows in bucket_by_length(lengths, size)]

    @property
    def velocity_dtype(self) -> torch.dtype:
        return torch.float32 if self.policy.uses_guidance else self.policy.dtype

    def score(
        self, batch: Batch, micro: Sequence[Transition], v_old: Tensor | None = None
    ) -> TransitionScores:
        """Run a forward at `micro` and score its B transitions, in float32.

        `v_old`, if given, replaces the rollout's stored velocity.
        """
        stored = batch.trajectories
        x = stored.gather(stored.states, micro)
        v, v_uncond = self.policy.velocities(x, self._inputs(batch, micro))
        if v_old is None and self.objective.stores_velocities:
            v_old = stored.gather(stored.velocities, micro)
        v_anchor, anchor_weight = batch.anchor_of(micro)
        x_next = stored.next_states(micro)

        device = self.policy.device
        samples = on_device([i for i, _ in micro], device)
        step = on_device([t for _, t in micro], device)

        uses_errors = self.objective.surrogate.uses_errors
        beta = self.objective.settings.nft_beta if uses_errors else None
        log_prob, kl_anchor, kl_old, *errors = transition_score(
            x, x_next, v, batch.coefs, step, v_anchor, v_old, beta, v_uncond, self.policy.guidance
        )
        return TransitionScores(
            log_prob=log_prob,
            log_prob_old=stored.log_prob_old(micro, log_prob),
            kl_anchor=kl_anchor,
            anchor_weight=anchor_weight,
            kl_old=kl_old,
            advantage=batch.advantages[samples],
            errors=errors,
        )

    def velocity(self, batch: Batch, micro: Sequence[Transition]) -> Tensor:
        """Return the guided velocity `[B, C, T, H, W]` at the stored latents."""
        x = batch.trajectories.gather(batch.trajectories.states, micro)
        return self.policy.guided_velocity(x, self._inputs(batch, micro))

    def _inputs(self, batch: Batch, micro: Sequence[Transition]) -> Inputs:
        """Return the forward's inputs; equal steps are passed as a single row."""
        keys = [batch.samples[i].prompt for i, _ in micro]
        steps = [t for _, t in micro]
        if len(set(steps)) == 1:
            steps = steps[:1]
        return batch.conditioning.at(keys, on_device(steps, self.policy.device))

    @torch.no_grad()
    def anchor_velocities(
        self, batch: Batch, transitions: Sequence[Transition], anchor: State
    ) -> dict[Transition, Tensor]:
        """Return transition -> velocity `[C, T, H, W]` under the anchor's weights: one forward
        each. Collective."""
        stored = batch.trajectories
        velocities = stored.empty(transitions, self.velocity_dtype)
        with self.policy.using(anchor):
            for micro in self._work(batch, transitions):
                stored.put(velocities, micro, self.velocity(batch, micro))
        return velocities

    @torch.no_grad()
    def score_noised(self, batch: Batch) -> None:
        """Fill in the rollout's log-probs and kept velocities at the renoised final samples: one
        forward each.

        Collective. Call it before the first update, with the rollout's weights.
        """
        stored = batch.trajectories
        stored.scored = True
        for micro in self._work(batch, stored.trained):
            x = stored.gather(stored.states, micro)
            step = on_device(micro[0][1], stored.device)  # the same for all of `micro`
            v, v_uncond = self.policy.velocities(x, self._inputs(batch, micro))
            log_probs, *_ = transition_score(
                x,
                stored.next_states(micro),
                v,
                batch.coefs,
                step,
                v_uncond=v_uncond,
                guidance=self.policy.guidance,
            )
            stored.log_probs |= zip(micro, log_probs, strict=True)
            if stored.velocities:
                stored.put(stored.velocities, micro, self.policy.guided(v, v_uncond))

    def _work(
        self, batch: Batch, transitions: Sequence[Transition]
    ) -> Iterable[Sequence[Transition]]:
        """Yield the transitions of each forward, which are of one step; then run dummy forwards, as
        other ranks need.

        `transitions` are ordered by step.
        """
        batch_keys = [(t, self.lengths[batch.samples[i].prompt]) for i, t in transitions]
        work = [transitions[rows] for rows in bucket_by_length(batch_keys, self.batch_size)]
        padded = self.policy.states.pad_to_largest(work, batch.idle.replay)
        return progress(padded, "anchor", len(work), "forward")
