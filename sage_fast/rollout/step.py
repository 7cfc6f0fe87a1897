"""One denoising step of a rollout: a velocity, two with guidance, and the fused transition."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.models.interface import Inputs
from sage_fast.models.policy import Policy
from sage_fast.ops import transition_step
from sage_fast.util.profiling import annotate


def denoise(
    policy: Policy, coefs: Tensor, inputs: Inputs, seeds: Tensor, x: Tensor, step: Tensor
) -> tuple[Tensor, ...]:
    """Run one step of B samples; return x_next, log-prob `[B]` and the velocity, or two for
    `Policy.guided` to combine.

    Only the velocities are differentiable.

    Args:
        inputs: of B samples at `step`.
        step: int64 `[1]`.
    """
    with annotate("transformer"):
        v, v_uncond = policy.velocities(x, inputs)
    with annotate("transition"), torch.no_grad():
        x_next, log_prob = transition_step(x, v, coefs, step[0], seeds, v_uncond, policy.guidance)
    return (x_next, log_prob, v) if v_uncond is None else (x_next, log_prob, v, v_uncond)
