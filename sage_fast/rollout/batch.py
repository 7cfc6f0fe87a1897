"""The rollouts of an iteration, with everything else its updates need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from sage_fast.algorithm.iteration_plan import Sample, Transition
from sage_fast.models.interface import ConditionTable
from sage_fast.rollout.idle import IdleForwards
from sage_fast.rollout.trajectories import Trajectories, on_device


@dataclasses.dataclass(kw_only=True)
class Batch:
    """This rank's N samples of an iteration; its updates share them.

    Attributes:
        numbers: number of each sample among those of all ranks.
        samples: the samples.
        coefs: float32 `[T, 6]` on the device, `TransitionTable.coefficients` of the scored
            transitions.
        conditioning: conditions at the T noise levels.
        idle: dummy forwards, which need none of the samples.
        trajectories: what is stored of the rollouts.
        advantages: float32 `[N]` on the device; 0 until the rewards are known.
        anchor_velocities: transition -> `[C, T, H, W]`, guidance included, of those at which the KL
            to the anchor is computed; empty without an anchor.
        anchor_weight: weight of that KL, as in the plan.
        videos: index of a sample -> its video, uint8 `[F, 3, H, W]` on the CPU, of those that are
            kept.
    """

    numbers: Sequence[int]
    samples: Sequence[Sample]
    coefs: Tensor
    conditioning: ConditionTable
    idle: IdleForwards
    trajectories: Trajectories
    advantages: Tensor
    anchor_velocities: dict[Transition, Tensor]
    anchor_weight: float = 1.0
    videos: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def own(self, transitions: Sequence[Transition]) -> list[Transition]:
        """Return the transitions of this rank's samples, renumbered from 0; those given are of all
        ranks' samples."""
        rows = {number: row for row, number in enumerate(self.numbers)}
        return [(rows[number], t) for number, t in transitions if number in rows]

    def anchor_of(self, micro: Sequence[Transition]) -> tuple[Tensor | None, Tensor | float]:
        """Return the anchor's velocities at B transitions and the weights of their KL.

        Returns:
            `[B, C, T, H, W]`, or None if the anchor has no forward at any of them; and `[B]`, 0 at
            those without a forward, or one number for all.
        """
        velocities = self.anchor_velocities
        anchored = [transition for transition in micro if transition in velocities]
        if not anchored:
            return None, 0.0
        if len(anchored) == len(micro):
            return self.trajectories.gather(velocities, micro), self.anchor_weight

        # Any finite velocity will do where the weight is 0.
        stand_in = anchored[0]
        used = [transition if transition in velocities else stand_in for transition in micro]
        weights = [self.anchor_weight if t in velocities else 0.0 for t in micro]
        return (
            self.trajectories.gather(velocities, used),
            on_device(weights, self.trajectories.device),
        )
