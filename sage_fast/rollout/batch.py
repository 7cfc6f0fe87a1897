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
    """This rank's N samples of an iteration; its updates share them.

    Attributes:
        numbers: number of each sample among those of all ranks.
        keys: key of each sample's condition.
        table: transitions of the rollouts, T steps.
        coefs: float32 `[T, 6]` on the device, `TransitionTable.coefficients` of the scored transitions.
        conditioning: conditions at the T noise levels.
        trajectories: what is stored of the rollouts.
        advantages: float32 `[N]` on the device; 0 until the rewards are known.
        anchor_velocities: step -> `[N, C, T, H, W]`, guidance included; lacks the steps without a KL to the anchor.
    """

    numbers: Sequence[int]
    keys: Sequence[Key]
    table: TransitionTable
    coefs: Tensor
    conditioning: Conditions
    trajectories: Trajectories
    advantages: Tensor
    anchor_velocities: dict[int, Tensor]

    def own(self, transitions: Sequence[Transition]) -> list[Transition]:
        """Return the transitions of this rank's samples, renumbered from 0; those given are of all ranks' samples."""
        places = {number: place for place, number in enumerate(self.numbers)}
        return [(places[number], t) for number, t in transitions if number in places]

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
