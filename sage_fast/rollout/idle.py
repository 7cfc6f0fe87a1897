"""Dummy forwards: what a rank with less work than the others runs, so that collectives match.

Forwards may be collective (ZeRO-3, sequence parallelism), and so may backwards (ZeRO). All ranks
then have to run the same number of them, whatever samples they have: one rank may have more than
another, none whose reward is known, or none at all. A dummy forward therefore needs nothing of a
rank's samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sage_fast.models.interface import ConditionKey, ConditionTable
from sage_fast.models.policy import Policy


class IdleForwards:
    """Forwards of zero latents at the first noise level, with a prompt that every rank has.

    Each gathers what the forward that it stands for gathers, and adds nothing to values or
    gradients.

    Args:
        policy: runs the forwards.
        conditioning: conditions at the noise levels, those of `key` included.
        key: key of the prompt.
        shape: (C, T, H, W) of a sample's latents.
    """

    def __init__(
        self, policy: Policy, conditioning: ConditionTable, key: ConditionKey, shape: Sequence[int]
    ) -> None:
        self.policy = policy
        self.conditioning = conditioning
        self.key = key
        self.latents = torch.zeros(1, *shape, device=policy.device)
        self.step = torch.zeros(1, dtype=torch.int64, device=policy.device)

    @torch.no_grad()
    def denoise(self) -> None:
        """Stand for a step of a rollout, which reads its conditions from the table."""
        inputs = self.conditioning.of([self.key]).at(self.step)
        self.policy.velocities(self.latents, inputs)

    def replay(self) -> Tensor:
        """Stand for a forward of `Replay`, which may compute its conditions again; return the
        velocity."""
        inputs = self.conditioning.at([self.key], self.step)
        return self.policy.guided_velocity(self.latents, inputs)

    def loss(self) -> Tensor:
        """Stand for a training forward: return a loss, whose gradient is exactly zero in every
        trained weight."""
        return (0 * self.replay().float()).sum()
