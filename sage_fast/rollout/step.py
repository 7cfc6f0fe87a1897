"""One denoising step of a rollout: a velocity, two with guidance, and the fused transition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.models.interface import Inputs
from sage_fast.models.policy import Policy
from sage_fast.ops import transition_step
from sage_fast.util.profiling import annotate


class History(NamedTuple):
    """What a second-order sampler needs of the step before.

    Attributes:
        weights: float32 `[T]`, `TransitionTable.extrapolation`.
        velocity: float32 `[B, C, T, H, W]`, that of the step before, guidance included; zeros before the first.
    """

    weights: Tensor
    velocity: Tensor

    @classmethod
    def of(cls, table: TransitionTable, latents: Tensor) -> History | None:
        """Return the history at the start of a rollout from `latents`; None for a sampler of first order."""
        if table.extrapolation is None:
            return None
        return cls(table.extrapolation.to(latents), torch.zeros_like(latents))


def denoise(
    policy: Policy,
    coefs: Tensor,
    inputs: Inputs,
    seeds: Tensor,
    x: Tensor,
    step: Tensor,
    history: History | None = None,
) -> tuple[Tensor, ...]:
    """Run one step of B samples; return x_next, log-prob `[B]` and the velocity, or two for `Policy.guided` to combine.

    Only the velocities are differentiable.

    Args:
        inputs: of B samples at `step`.
        step: int64 `[1]`.
        history: of a second-order sampler; it then holds this step's velocity.
    """
    with annotate("transformer"):
        v, v_uncond = policy.velocities(x, inputs)
    with annotate("transition"):
        if history is None:
            with torch.no_grad():
                x_next, log_prob = transition_step(x, v, coefs, step[0], seeds, v_uncond, policy.guidance)
            return (x_next, log_prob, v) if v_uncond is None else (x_next, log_prob, v, v_uncond)
        v = policy.guided(v, v_uncond)
        along = v + history.weights[step] * (v - history.velocity)
        history.velocity.copy_(v)
        x_next, log_prob = transition_step(x, along, coefs, step[0], seeds)
        return x_next, log_prob, v
