"""The rollouts of an iteration and what its updates need beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sage_fast.policy.conditioning import ConditioningTable
from sage_fast.rollout.schedule import Transition
from sage_fast.rollout.trajectories import Trajectories, on_device
from sage_fast.transitions import TransitionTable


@dataclasses.dataclass(kw_only=True)
class Batch:
    """What the updates of one iteration share."""

    table: TransitionTable
    coefs: Tensor
    trajectories: Trajectories
    conditioning: ConditioningTable
    prompts: Sequence[str]
    advantages: Tensor
    anchor_velocities: dict[int, Tensor]

    def log_prob_old(self, micro: Sequence[Transition]) -> Tensor:
        """The rollout's log-probs, `[B]`."""
        return torch.stack([self.trajectories.log_probs[t][i] for i, t in micro])

    def anchor_of(self, micro: Sequence[Transition]) -> Tensor | None:
        """The anchor's velocities; where there is none, that of another step, whose KL has weight 0."""
        known = [t for _, t in micro if t in self.anchor_velocities]
        if not known:
            return None
        stand_ins = [(i, t if t in self.anchor_velocities else known[0]) for i, t in micro]
        return self.trajectories.gather(self.anchor_velocities, stand_ins)

    def position_weight(self, micro: Sequence[Transition]) -> Tensor:
        """`[B]` of the KL to the anchor: the inverse of the share of the trained steps that have it, else 0."""
        inverse = len(self.trajectories.steps) / max(len(self.anchor_velocities), 1)
        weights = [inverse if t in self.anchor_velocities else 0.0 for _, t in micro]
        return on_device(weights, self.advantages.device)
