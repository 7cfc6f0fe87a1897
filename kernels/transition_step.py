"""One denoising step on the GPU: guidance, mean, noise, storage rounding and log-prob in one pass.

    v       = v_uncond + g (v_cond - v_uncond)       with guidance, else v
    x_next  = a x + b v + c noise                    rounded to the dtype of x
    logp    = w mean((x_next - a x - b v)^2) + k     of the stored, rounded x_next

x, v, v_uncond, x_next `[B, ...]` flattened to `[B, numel]`; coefs `[T, 6]`; step `[]` or `[B]`;
seed `[B]`; logp `[B]`. Bytes per element with fp32 x and bf16 v: 10 (12 with guidance), and 4 per 2
tiles of partial sums. The noise never leaves the registers. The kernel reads table, step and seed
from device memory and the launch does not synchronise, so one captured CUDA graph serves every
step. `sage_fast.ops.transition_step` is the specification.
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
    _noise,
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
def _transition_step_fwd_kernel(
    x_ptr,
    v_ptr,
    v_uncond_ptr,
    guidance,
    coefs_ptr,
    step_ptr,
    seed_ptr,
    x_next_ptr,
    partial_ptr,
    numel,
    steps,
    programs,
    HAS_GUIDANCE: tl.constexpr,
    STEP_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Compute x_next and the sum of squared residuals of this program's tiles.

    Grid `(B, programs)`.
    """
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    a, b, c, _, _, _, step = _row(coefs_ptr, step_ptr, sample, steps, STEP_STRIDE)
    seed = tl.load(seed_ptr + sample)
    inner = _tile(BLOCK, VEC)
    total = tl.zeros([BLOCK // VEC, VEC], tl.float32)
    for turn in range(TILES):
        first = (program + turn * programs) * BLOCK
        start = sample * numel + first
        mask = _inside(inner, numel - first, ALIGNED, BLOCK)
        x = _load(x_ptr, start, inner, mask)
        v = _velocity(v_ptr, v_uncond_ptr, guidance, start, inner, mask, HAS_GUIDANCE)
        mean = _mean(a, b, x, v)
        x_next = tl.fma(c, _noise(seed, step, first, BLOCK, VEC), mean).to(
            x_next_ptr.dtype.element_ty
        )
        tl.store(x_next_ptr + start + inner, x_next, mask=mask)
        residual = tl.where(mask, x_next.to(tl.float32) - mean, 0.0)
        total = tl.fma(residual, residual, total)
    tl.store(partial_ptr + sample * programs + program, tl.sum(total))


def transition_step(
    x: Tensor,
    v: Tensor,
    v_uncond: Tensor | None,
    guidance: float | None,
    coefs: Tensor,
    step: Tensor,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch the step; arguments as `sage_fast::transition_step`. Copies inputs that are not
    contiguous.

    A step outside the table cannot be reported without synchronising; its sample comes back as nan.
    """
    x, v, v_uncond, coefs, step, seed = contiguous(x, v, v_uncond, coefs, step, seed)
    batch, numel = len(x), x[:1].numel()
    x_next = torch.empty_like(x)
    if batch == 0:
        return x_next, x.new_empty(0, dtype=torch.float32)
    count, tiles = split(numel)
    partial = torch.empty(batch, 1, count, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        if numel > 0:
            _transition_step_fwd_kernel[(batch, count)](
                x,
                v,
                v_uncond,
                guidance,
                coefs,
                step,
                seed,
                x_next,
                partial,
                numel,
                len(coefs),
                count,
                HAS_GUIDANCE=v_uncond is not None,
                STEP_STRIDE=step.ndim,
                ALIGNED=numel % 16 == 0,
                TILES=tiles,
                BLOCK=BLOCK,
                VEC=vec(x, v, v_uncond),
                **LAUNCH_OPTIONS,
            )
        (logp,) = reduce(partial, coefs, step, numel)
    return x_next, logp
