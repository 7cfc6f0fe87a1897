"""Drive a policy through a transition table and keep what training needs.

The loop is plain: per step one velocity (two with guidance) and one fused `transition_step`. Latents stay float32
between steps, so that rollout and training see the same numbers. All randomness is a function of each sample's seed,
so a sample comes out the same in any batch and on any rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sage_fast.ops import transition_step
from sage_fast.ops.philox import STREAM_INITIAL_LATENTS, philox_normal
from sage_fast.ops.transition_step import guided
from sage_fast.policy.hunyuan import HunyuanVideo15Policy
from sage_fast.policy.text import TextEmbedding, collate
from sage_fast.profiling import annotate
from sage_fast.transitions import TransitionTable


@dataclasses.dataclass(kw_only=True)
class Trajectories:
    """B rollouts.

    Attributes:
        latents: float32 `[B, C, T, H, W]`, the final samples (VAE-scaled).
        states: step -> float32 `[B, C, T, H, W]` latents before that step; the kept steps and their successors alone.
        log_probs: step -> float32 `[B]`, for the kept steps.
        velocities: step -> `[B, C, T, H, W]` guided velocity of the rollout policy, where it was asked for.
    """

    latents: Tensor
    states: dict[int, Tensor]
    log_probs: dict[int, Tensor]
    velocities: dict[int, Tensor]

    @staticmethod
    def concatenate(parts: Sequence[Trajectories]) -> Trajectories:
        """Join batches of rollouts along B."""

        def join(rows: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
            return {step: torch.cat([row[step] for row in rows]) for step in rows[0]}

        return Trajectories(
            latents=torch.cat([part.latents for part in parts]),
            states=join([part.states for part in parts]),
            log_probs=join([part.log_probs for part in parts]),
            velocities=join([part.velocities for part in parts]),
        )


def initial_latents(seeds: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal latents at sigma = 1, float32 `[B, *shape]`, a function of the seeds alone."""
    return philox_normal(
        seeds.to(device), torch.zeros((), dtype=torch.int64, device=device), shape, STREAM_INITIAL_LATENTS
    )


@torch.no_grad()
def rollout(
    policy: HunyuanVideo15Policy,
    table: TransitionTable,
    coefs: Tensor,
    texts: Sequence[TextEmbedding],
    negative: TextEmbedding | None,
    seeds: Tensor,
    latents: Tensor,
    *,
    keep: Sequence[int] = (),
    keep_velocities: bool = False,
    on_step: Callable[[], object] | None = None,
) -> Trajectories:
    """Sample from sigma = 1 to 0.

    Args:
        policy: gives the velocity.
        table: the transitions, host side.
        coefs: `table.coefficients(...)` on the policy's device.
        texts: B prompts.
        negative: the negative prompt, needed with guidance.
        seeds: int64 `[B]`, noise key of each sample.
        latents: float32 `[B, C, T, H, W]` at sigma = 1.
        keep: steps whose transition is kept for training.
        keep_velocities: keep the velocities of these steps too (closed-form KL).
        on_step: called after every step (progress).
    """
    device = policy.device
    text = collate(texts, device, policy.dtype)
    no_text = collate([negative] * len(texts), device, policy.dtype) if policy.uses_guidance and negative else None
    seeds = seeds.to(device)
    steps = torch.arange(len(table), device=device)
    sigmas = table.sigmas.to(device, torch.float32)
    guidance = torch.tensor(policy.guidance_scale, device=device) if policy.uses_guidance else None

    out = Trajectories(latents=latents, states={}, log_probs={}, velocities={})
    x = latents
    for t in range(len(table)):
        with annotate("step", t):
            with annotate("transformer"):
                v, v_uncond = policy.velocities(x, sigmas[t].expand(len(x)), text, no_text)
            with annotate("transition"):
                x_next, log_prob = transition_step(x, v, coefs, steps[t], seeds, v_uncond, guidance)
        if t in keep:
            out.states[t], out.states[t + 1], out.log_probs[t] = x, x_next, log_prob
            if keep_velocities:
                out.velocities[t] = guided(v, v_uncond, guidance, x.dtype) if v_uncond is not None else v
        x = x_next
        if on_step is not None:
            on_step()
    out.latents = x
    return out
