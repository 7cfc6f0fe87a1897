"""Score a stored transition on the GPU: log-prob, both KLs and both errors in one pass, the
gradients in another.

    v           = v_uncond + g (v_cond - v_uncond)   with guidance, else v
    logp        = w mean((x_next - a x - b v)^2) + k
    kl_anchor   = m mean((v - v_anchor)^2)
    kl_old      = m mean((v - v_old)^2)
    error_plus  = mean |x_next - a x - b v + (1-beta) b (v - v_old)|
    error_minus = mean |x_next - a x - b v + (1+beta) b (v - v_old)|
    dv          = 2/D [ -g_logp w b (x_next - a x - b v)
                        + g_anchor m (v - v_anchor) + g_old m (v - v_old) ]
    dv_cond     = g dv, dv_uncond = (1 - g) dv       with guidance

x, x_next, v, v_uncond, v_anchor, v_old `[B, ...]` flattened to `[B, numel]`, numel = D; coefs `[T,
6]`; step `[]` or `[B]`; results and their gradients `[B]`. Bytes per element with fp32 x and x_next
and bf16 velocities, with v_anchor and without v_old: forward 12, backward 14. With guidance, whose
v_anchor is fp32: forward 16, backward 20. The gradients are the only tensors of latent size that
are written. `sage_fast.ops.transition_score` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sage_fast.kernels.common import (
    BLOCK,
    LAUNCH_OPTIONS,
    _inside,
    _load,
    _mean,
    _row,
    _tile,
    _velocity,
    contiguous,
    reduce,
    split,
    vec,
)
from torch import Tensor


@triton.jit
def _transition_score_fwd_kernel(
    x_ptr,
    x_next_ptr,
    v_ptr,
    v_uncond_ptr,
    guidance,
    v_anchor_ptr,
    v_old_ptr,
    coefs_ptr,
    step_ptr,
    partial_ptr,
    beta,
    numel,
    steps,
    programs,
    HAS_GUIDANCE: tl.constexpr,
    HAS_ANCHOR: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_BETA: tl.constexpr,
    STEP_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Store three sums of squares and two of magnitudes over this program's tiles.

    Grid `(B, programs)`.
    """
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    a, b, _, _, _, _, _ = _row(coefs_ptr, step_ptr, sample, steps, STEP_STRIDE)
    inner = _tile(BLOCK, VEC)
    total = tl.zeros([BLOCK // VEC, VEC], tl.float32)
    # per thread, as the next three: more sums spill
    total_anchor = tl.zeros([BLOCK // VEC], tl.float32)
    total_old = tl.zeros([BLOCK // VEC], tl.float32)
    total_plus = tl.zeros([BLOCK // VEC], tl.float32)
    total_minus = tl.zeros([BLOCK // VEC], tl.float32)
    for turn in range(TILES):
        first = (program + turn * programs) * BLOCK
        start = sample * numel + first
        # masked elements load as 0 and add 0 to each sum
        mask = _inside(inner, numel - first, ALIGNED, BLOCK)
        v = _velocity(v_ptr, v_uncond_ptr, guidance, start, inner, mask, HAS_GUIDANCE)
        residual = _load(x_next_ptr, start, inner, mask) - _mean(
            a, b, _load(x_ptr, start, inner, mask), v
        )
        total = tl.fma(residual, residual, total)
        if HAS_OLD:
            difference = v - _load(v_old_ptr, start, inner, mask)
            total_old += tl.sum(difference * difference, axis=1)
        if HAS_BETA:
            plus = residual
            minus = residual
            if HAS_OLD:
                plus = tl.fma((1.0 - beta) * b, difference, residual)
                minus = tl.fma((1.0 + beta) * b, difference, residual)
            total_plus += tl.sum(tl.abs(plus), axis=1)
            total_minus += tl.sum(tl.abs(minus), axis=1)
        if HAS_ANCHOR:  # last: above the errors, it spills on sm_100 with guidance
            difference = v - _load(v_anchor_ptr, start, inner, mask)
            total_anchor += tl.sum(difference * difference, axis=1)
    out_ptr = partial_ptr + sample * 5 * programs + program
    tl.store(out_ptr, tl.sum(total))
    tl.store(out_ptr + programs, tl.sum(total_anchor))
    tl.store(out_ptr + 2 * programs, tl.sum(total_old))
    tl.store(out_ptr + 3 * programs, tl.sum(total_plus))
    tl.store(out_ptr + 4 * programs, tl.sum(total_minus))


@triton.jit
def _transition_score_bwd_kernel(
    grad_logp_ptr,
    grad_kl_anchor_ptr,
    grad_kl_old_ptr,
    x_ptr,
    x_next_ptr,
    v_ptr,
    v_uncond_ptr,
    guidance,
    v_anchor_ptr,
    v_old_ptr,
    coefs_ptr,
    step_ptr,
    dv_ptr,
    dv_uncond_ptr,
    numel,
    steps,
    programs,
    two_over_numel,
    HAS_GUIDANCE: tl.constexpr,
    HAS_ANCHOR: tl.constexpr,
    HAS_OLD: tl.constexpr,
    STEP_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Compute the gradients for this program's tiles. Grid `(B, programs)`."""
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    a, b, _, w, _, m, _ = _row(coefs_ptr, step_ptr, sample, steps, STEP_STRIDE)
    logp_weight = -two_over_numel * tl.load(grad_logp_ptr + sample).to(tl.float32) * w * b
    anchor_weight = two_over_numel * tl.load(grad_kl_anchor_ptr + sample).to(tl.float32) * m
    old_weight = two_over_numel * tl.load(grad_kl_old_ptr + sample).to(tl.float32) * m
    inner = _tile(BLOCK, VEC)
    for turn in range(TILES):
        first = (program + turn * programs) * BLOCK
        start = sample * numel + first
        mask = _inside(inner, numel - first, ALIGNED, BLOCK)
        v = _velocity(v_ptr, v_uncond_ptr, guidance, start, inner, mask, HAS_GUIDANCE)
        dv = logp_weight * (
            _load(x_next_ptr, start, inner, mask) - _mean(a, b, _load(x_ptr, start, inner, mask), v)
        )
        if HAS_ANCHOR:
            dv = tl.fma(anchor_weight, v - _load(v_anchor_ptr, start, inner, mask), dv)
        if HAS_OLD:
            dv = tl.fma(old_weight, v - _load(v_old_ptr, start, inner, mask), dv)
        if HAS_GUIDANCE:
            dv_uncond = ((1.0 - guidance) * dv).to(dv_uncond_ptr.dtype.element_ty)
            tl.store(dv_uncond_ptr + start + inner, dv_uncond, mask=mask)
            dv = guidance * dv
        tl.store(dv_ptr + start + inner, dv.to(dv_ptr.dtype.element_ty), mask=mask)


def transition_score(
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
) -> tuple[Tensor, ...]:
    """Launch the forward; arguments as `sage_fast::transition_score`. Copies inputs that are not
    contiguous.

    A step outside the table cannot be reported without synchronising; its sample comes back as nan.
    """
    x, x_next, v, v_uncond, v_anchor, v_old = contiguous(x, x_next, v, v_uncond, v_anchor, v_old)
    coefs, step = contiguous(coefs, step)
    batch, numel = len(x), x[:1].numel()
    if batch == 0:
        return tuple(x.new_empty(0, dtype=torch.float32) for _ in range(5))
    count, tiles = split(numel)
    partial = torch.empty(batch, 5, count, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        if numel > 0:
            _transition_score_fwd_kernel[(batch, count)](
                x,
                x_next,
                v,
                v_uncond,
                guidance,
                v_anchor,
                v_old,
                coefs,
                step,
                partial,
                beta,
                numel,
                len(coefs),
                count,
                HAS_GUIDANCE=v_uncond is not None,
                HAS_ANCHOR=v_anchor is not None,
                HAS_OLD=v_old is not None,
                HAS_BETA=beta is not None,
                STEP_STRIDE=step.ndim,
                ALIGNED=numel % 16 == 0,
                TILES=tiles,
                BLOCK=BLOCK,
                VEC=vec(x, x_next, v, v_uncond, v_anchor, v_old),
                **LAUNCH_OPTIONS,
            )
        return tuple(reduce(partial, coefs, step, numel))


def transition_score_backward(
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
    """Launch the backward; arguments as `sage_fast::transition_score_backward`."""
    grads = contiguous(grad_logp, grad_kl_anchor, grad_kl_old)
    x, x_next, v, v_uncond, v_anchor, v_old = contiguous(x, x_next, v, v_uncond, v_anchor, v_old)
    coefs, step = contiguous(coefs, step)
    batch, numel = len(x), x[:1].numel()
    dv, dv_uncond = (
        torch.empty_like(v),
        v.new_empty(0) if v_uncond is None else torch.empty_like(v_uncond),
    )
    if batch == 0 or numel == 0:
        return dv, dv_uncond
    count, tiles = split(numel)
    with torch.cuda.device_of(x):
        _transition_score_bwd_kernel[(batch, count)](
            *grads,
            x,
            x_next,
            v,
            v_uncond,
            guidance,
            v_anchor,
            v_old,
            coefs,
            step,
            dv,
            None if v_uncond is None else dv_uncond,
            numel,
            len(coefs),
            count,
            2 / numel,
            HAS_GUIDANCE=v_uncond is not None,
            HAS_ANCHOR=v_anchor is not None,
            HAS_OLD=v_old is not None,
            STEP_STRIDE=step.ndim,
            ALIGNED=numel % 16 == 0,
            TILES=tiles,
            BLOCK=BLOCK,
            VEC=vec(x, x_next, v, v_uncond, v_anchor, v_old),
            **LAUNCH_OPTIONS,
        )
    return dv, dv_uncond
