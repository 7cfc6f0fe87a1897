"""Score a stored transition under the current policy: log-prob and both KLs, differentiable in both
velocities.

    v           = v_uncond + g (v_cond - v_uncond)   if v_uncond is given, else v
    logp        = w mean((x_next - a x - b v)^2) + k
    kl_anchor   = m mean((v - v_anchor)^2)           position term of the dual KL (Eq. 13),
                                                     0 without v_anchor
    kl_old      = m mean((v - v_old)^2)              velocity term in closed form (Eq. 12),
                                                     0 without v_old
    error_plus  = mean |x_next - a x - b v+|         v+ = (1-beta) v_old + beta v, 0 without beta
    error_minus = mean |x_next - a x - b v-|         v- = (1+beta) v_old - beta v, 0 without beta

    dv = 2/D [ -g_logp w b (x_next - a x - b v) + g_anchor m (v - v_anchor) + g_old m (v - v_old) ]
    dv_cond = g dv, dv_uncond = (1 - g) dv

D is the number of elements per sample. The errors weigh the branches of DiffusionNFT and have no
gradient. Forward and backward each read every input once; the backward writes each gradient once.
No intermediate of latent size is stored. Bytes per element with fp32 x and x_next and bf16
velocities, with v_anchor and without v_old: forward 12, backward 14. With guidance, whose v_anchor
is fp32: forward 16, backward 20.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import check, compute_dtype, per_sample, row, sample_mean, sample_numel
from sage_fast.ops._dispatch import register
from sage_fast.ops.guidance import guided


def transition_score(
    x: Tensor,
    x_next: Tensor,
    v: Tensor,
    coefs: Tensor,
    step: Tensor,
    v_anchor: Tensor | None = None,
    v_old: Tensor | None = None,
    beta: float | None = None,
    v_uncond: Tensor | None = None,
    guidance: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the log-prob of `x_next` given `x`, the KLs to the anchor and to the rollout policy,
    and two mean errors.

    Args:
        x: `[B, ...]` latents before the transition, float32 or bfloat16.
        x_next: `[B, ...]` latents after the transition, in the dtype of x.
        v: `[B, ...]` velocity of the trained policy (conditional if `v_uncond` is given), float32,
            bfloat16 or float16.
        coefs: float32 `[T, 6]` from `TransitionTable.coefficients`.
        step: int64 `[]` or `[B]`; a training batch may mix steps.
        v_anchor: `[B, ...]` velocity of the anchor, guidance included, or None.
        v_old: `[B, ...]` velocity of the rollout policy, guidance included, or None, which stands
            for v in the errors.
        beta: weight of v in DiffusionNFT's positive and negative predictions, or None if their
            errors are not needed.
        v_uncond: `[B, ...]` unconditional velocity for classifier-free guidance.
        guidance: the guidance scale; required with `v_uncond`.

    Returns:
        logp, kl_anchor, kl_old, error_plus, error_minus, each float32 `[B]`; the first three are 0
        at steps with c = 0. Differentiable in v and v_uncond; the errors have no gradient.

    Raises:
        ValueError: the shape, dtype or device of a tensor does not fit, or only one of `v_uncond`
            and `guidance` is given.
    """
    velocities = {"v": v, "v_uncond": v_uncond, "v_anchor": v_anchor, "v_old": v_old}
    check(x, coefs, step, guidance, {"x_next": x_next, **velocities})
    if x_next.dtype != x.dtype:
        raise ValueError(f"x_next: expected the dtype of x {x.dtype}, got {x_next.dtype}")
    return torch.ops.sage_fast.transition_score(
        x, x_next, v, v_uncond, guidance, v_anchor, v_old, coefs, step, beta
    )


def transition_score_reference(
    x: Tensor,
    x_next: Tensor,
    v: Tensor,
    v_uncond: Tensor | None,
    guidance: float | None,
    v_anchor: Tensor | None,
    v_old: Tensor | None,
    coefs: Tensor,
    step: Tensor,
    beta: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Specification in plain PyTorch; autograd can differentiate it."""
    dtype = compute_dtype(x)
    coef = row(coefs, step, x)
    v = guided(v, v_uncond, guidance, dtype)
    residual = x_next.to(dtype) - per_sample(coef.a, x) * x.to(dtype) - per_sample(coef.b, x) * v
    logp = coef.w * sample_mean(residual.square()) + coef.k
    kl_anchor, kl_old = (
        torch.zeros_like(coef.m)
        if other is None
        else coef.m * sample_mean((v - other.to(dtype)).square())
        for other in (v_anchor, v_old)
    )
    error_plus, error_minus = torch.zeros_like(logp), torch.zeros_like(logp)
    if beta is not None:
        shift = 0 if v_old is None else per_sample(coef.b, x) * (v - v_old.to(dtype))
        error_plus = sample_mean((residual + (1 - beta) * shift).abs()).detach()
        error_minus = sample_mean((residual + (1 + beta) * shift).abs()).detach()
    return logp, kl_anchor, kl_old, error_plus, error_minus


def transition_score_backward_reference(
    grad_logp: Tensor,
    grad_kl_anchor: Tensor,
    grad_kl_old: Tensor,
    x: Tensor,
    x_next: Tensor,
    v: Tensor,
    v_uncond: Tensor | None,
    guidance: float | None,
    v_anchor: Tensor | None,
    v_old: Tensor | None,
    coefs: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients in v and v_uncond, in plain PyTorch; the second is empty (`[0]`) without
    guidance."""
    dtype = compute_dtype(x)
    coef = row(coefs, step, x)
    scale = 2 / sample_numel(x)
    v32 = guided(v, v_uncond, guidance, dtype)
    residual = x_next.to(dtype) - per_sample(coef.a, x) * x.to(dtype) - per_sample(coef.b, x) * v32
    dv = per_sample(-scale * grad_logp * coef.w * coef.b, x) * residual
    for grad, other in ((grad_kl_anchor, v_anchor), (grad_kl_old, v_old)):
        if other is not None:
            dv = dv + per_sample(scale * grad * coef.m, x) * (v32 - other.to(dtype))
    if v_uncond is None or guidance is None:
        return dv.to(v.dtype).contiguous(), v.new_empty(0)
    return (guidance * dv).to(v.dtype).contiguous(), ((1 - guidance) * dv).to(
        v_uncond.dtype
    ).contiguous()


register(transition_score_backward_reference)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *before, ctx.guidance, v_anchor, v_old, coefs, step, _ = inputs
    ctx.save_for_backward(*before, v_anchor, v_old, coefs, step)
    ctx.mark_non_differentiable(*output[3:])


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *before, v_anchor, v_old, coefs, step = ctx.saved_tensors
    dv, dv_uncond = torch.ops.sage_fast.transition_score_backward(
        *grads[:3], *before, ctx.guidance, v_anchor, v_old, coefs, step
    )
    return None, None, dv, None if ctx.guidance is None else dv_uncond, *[None] * 6


register(transition_score_reference, backward=_backward, setup_context=_setup_context)
