"""LayerNorm without weights, then AdaLN's scale and shift, in one pass:

    out = (x - mean(x)) / sqrt(var(x) + eps) (1 + scale) + shift

Autograd saves only x and scale; the backward reads each row anyway and normalises it again. The
gradients of scale and shift are sums over all tokens, and are skipped where both are frozen. `pad`
leaves columns on the right of each row for models/lora/linear.py, and `pad_rows` leaves rows below
each sample for the text that ops/norm_rotate.py joins. In a residual branch, the same pass adds the
gradients of the branch and of x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_fast.ops._common import compute_dtype
from sage_fast.ops._derivatives import first_order
from sage_fast.ops._dispatch import register


def norm_modulate(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, pad: int = 0, pad_rows: int = 0
) -> Tensor:
    """Apply the AdaLN of a transformer block.

    Args:
        x: `[B, S, d]`, float32, bfloat16 or float16.
        scale, shift: `[B, d]`, float32 or the dtype of x; may be one row expanded over B.
        eps: added to the variance.
        pad: uninitialised columns to add on the right of each row.
        pad_rows: zero rows to add below those of each sample; their padding is zero too.

    Returns:
        `[B, S + pad_rows, d + pad]` in the dtype of x, computed in float32. Differentiable in x,
        scale and shift.

    Raises:
        ValueError: a shape or device does not fit, or `pad` or `pad_rows` is below 0.
    """
    return residual_norm(x, scale, shift, eps, pad, pad_rows)[1]


def residual_norm(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, pad: int = 0, pad_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Return x itself, for the residual stream, and `norm_modulate` of it.

    The backward adds both gradients in the norm's own pass, which saves a separate one. Arguments
    and errors are those of `norm_modulate`.
    """
    check_rows(x, {"scale": scale, "shift": shift}, pad=pad, pad_rows=pad_rows)
    return _Residual.apply(x, scale, shift, eps, pad, pad_rows)


def check_rows(x: Tensor, vectors: dict[str, Tensor], **further: int) -> None:
    """Check x, the vectors of its samples, and the counts of extra rows and columns.

    Raises:
        ValueError: x is not `[B, S, d]`, one of `vectors` is not `[B, d]` on its device, or a count
            is below 0.
    """
    if min(further.values(), default=0) < 0:  # the kernels would write outside the result
        raise ValueError(f"expected at least 0, got {further}")
    if x.ndim != 3:
        raise ValueError(f"x: expected [B, S, d], got {list(x.shape)}")
    for name, tensor in vectors.items():
        if tensor.shape != (x.shape[0], x.shape[2]):
            raise ValueError(
                f"{name}: expected {[x.shape[0], x.shape[2]]}, got {list(tensor.shape)}"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name}: is on {tensor.device}, x is on {x.device}")


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / std, and 1 / std `[..., 1]`."""
    centered = x - x.mean(-1, keepdim=True)
    rstd = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centered * rstd, rstd


def norm_modulate_reference(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, pad: int = 0, pad_rows: int = 0
) -> Tensor:
    """Specification in plain PyTorch; autograd can differentiate it. Fills the padding with 0."""
    dtype = compute_dtype(x)
    normed, _ = _normalize(x.to(dtype), eps)
    out = (
        (normed * (1 + scale.to(dtype)[:, None]) + shift.to(dtype)[:, None])
        .to(x.dtype)
        .contiguous()
    )
    return F.pad(out, (0, pad, 0, pad_rows)) if pad or pad_rows else out


def norm_modulate_backward_reference(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    eps: float,
    modulation: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient in x, and float32 `[B, d]` gradients in scale and shift, which are empty unless
    `modulation`.

    grad is `[B, S + pad_rows, d + pad]`; its padding is not read. `residual` `[B, S, d]` is added
    to the gradient in x.
    """
    dtype = compute_dtype(x)
    normed, rstd = _normalize(x.to(dtype), eps)
    grad = grad[:, : x.shape[1], : x.shape[2]].to(dtype)
    inner = grad * (1 + scale.to(dtype)[:, None])
    dx = rstd * (
        inner - inner.mean(-1, keepdim=True) - normed * (inner * normed).mean(-1, keepdim=True)
    )
    if residual is not None:
        dx = dx + residual.to(dtype)
    rows = len(x) if modulation else 0
    return dx.to(x.dtype).contiguous(), (grad * normed).sum(1)[:rows], grad.sum(1)[:rows]


register(norm_modulate_reference)
register(norm_modulate_backward_reference)


class _Residual(torch.autograd.Function):
    """`residual_norm` as an autograd function: an operator may not return its argument."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float, pad: int, pad_rows: int
    ) -> tuple[Tensor, Tensor]:
        ctx.eps, ctx.shift_dtype = eps, shift.dtype
        ctx.save_for_backward(x, scale)
        ctx.set_materialize_grads(False)
        return x.view_as(x), torch.ops.sage_fast.norm_modulate(x, scale, shift, eps, pad, pad_rows)

    @staticmethod
    @first_order
    def backward(
        ctx: Any, residual: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return residual, None, None, None, None, None
        x, scale = ctx.saved_tensors
        modulation = any(ctx.needs_input_grad[1:3])
        dx, dscale, dshift = torch.ops.sage_fast.norm_modulate_backward(
            grad, x, scale, ctx.eps, modulation, residual
        )
        trained = (
            (dscale.to(scale.dtype), dshift.to(ctx.shift_dtype)) if modulation else (None, None)
        )
        return dx, *trained, None, None, None
