"""The rollouts of an iteration, with everything else its updates need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from sage_fast.algorithm.schedule import Transition
from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.models.protocol import Conditions, Key
from sage_fast.rollout.trajectories import Trajectories, on_device


@dataclasses.dataclass(kw_only=True)
class Batch:
    """Data shared by the updates of one iteration."""

    table: TransitionTable
    coefs: Tensor
    trajectories: Trajectories
    conditioning: Conditions
    keys: Sequence[Key]
    advantages: Tensor
    anchor_velocities: dict[int, Tensor]

    def anchor_of(self, micro: Sequence[Transition]) -> Tensor | None:
        """Return the anchor's velocities; None if no transition has one.

        A transition without one gets that of another step as a stand-in. Its KL has weight 0.
        """
        known = [t for _, t in micro if t in self.anchor_velocities]
        if not known:
            return None
        stand_ins = [(i, t if t in self.anchor_velocities else known[0]) for i, t in micro]
        return self.trajectories.gather(self.anchor_velocities, stand_ins)

    def position_weight(self, micro: Sequence[Transition]) -> Tensor:
        """Return the weights `[B]` of the KL to the anchor: trained steps / steps with an anchor velocity, or 0."""
        inverse = len(self.trajectories.steps) / max(len(self.anchor_velocities), 1)
        weights = [inverse if t in self.anchor_velocities else 0.0 for _, t in micro]
        return on_device(weights, self.advantages.device)
