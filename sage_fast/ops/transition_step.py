"""One denoising step: guidance, mean, noise, storage rounding and log-prob in one pass.

    v       = v_uncond + g (v_cond - v_uncond)      if v_uncond is given, else v
    x_next  = a x + b v + c noise                    rounded to the dtype of x
    logp    = w mean((x_next - a x - b v)^2) + k     of the stored, rounded x_next, so that a
                                                     recomputation agrees

Rows (a, b, c, w, k, m) come from `TransitionTable.coefficients`, the noise from
`sage_fast.ops.philox`. Bytes per element with fp32 x and bf16 v: 10 (12 with guidance).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.ops._common import check, compute_dtype, per_sample, row, sample_mean
from sage_fast.ops._dispatch import register
from sage_fast.ops.guidance import guided
from sage_fast.ops.philox import philox_normal


def transition_step(
    x: Tensor,
    v: Tensor,
    coefs: Tensor,
    step: Tensor,
    seed: Tensor,
    v_uncond: Tensor | None = None,
    guidance: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance latents by one transition.

    Args:
        x: `[B, ...]` latents at sigma_t, float32 or bfloat16.
        v: `[B, ...]` velocity (conditional if `v_uncond` is given), float32, bfloat16 or float16.
        coefs: float32 `[T, 6]` from `TransitionTable.coefficients`.
        step: int64 `[]` or `[B]`, the row of `coefs`; read on the device, so a CUDA graph can be
            replayed.
        seed: int64 `[B]`, the noise key of each sample.
        v_uncond: `[B, ...]` unconditional velocity for classifier-free guidance.
        guidance: the guidance scale; required with `v_uncond`.

    Returns:
        x_next `[B, ...]` in the dtype of x, and its log-prob, float32 `[B]`. Not differentiable.

    Raises:
        ValueError: the shape, dtype or device of a tensor does not fit, or only one of `v_uncond`
            and `guidance` is given.
    """
    check(x, coefs, step, guidance, {"v": v, "v_uncond": v_uncond}, seed=seed)
    if seed.dtype != torch.int64 or seed.shape != x.shape[:1]:
        raise ValueError(f"seed: expected int64 [{len(x)}], got {seed.dtype} {list(seed.shape)}")
    return torch.ops.sage_fast.transition_step(x, v, v_uncond, guidance, coefs, step, seed)


def transition_step_reference(
    x: Tensor,
    v: Tensor,
    v_uncond: Tensor | None,
    guidance: float | None,
    coefs: Tensor,
    step: Tensor,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Specification in plain PyTorch."""
    dtype = compute_dtype(x)
    coef = row(coefs, step, x)
    mean = per_sample(coef.a, x) * x.to(dtype) + per_sample(coef.b, x) * guided(
        v, v_uncond, guidance, dtype
    )
    noise = philox_normal(seed, step, x.shape[1:], dtype=dtype)
    x_next = (mean + per_sample(coef.c, x) * noise).to(x.dtype).contiguous()
    return x_next, coef.w * sample_mean((x_next.to(dtype) - mean).square()) + coef.k


register(transition_step_reference)
