"""Gated residual and the AdaLN that reads it, in one pass:

    sum = x + gate y          out = norm_modulate(sum, scale, shift)

The sum is rounded to its storage dtype before it is normalised. The backward is one pass too: dx is
the gradient of out through the norm plus the gradient of sum, and dy = gate dx. Autograd saves sum,
gate and scale, and y if scale, shift or gate is trained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_fast.ops._common import compute_dtype
from sage_fast.ops._dispatch import register
from sage_fast.ops.norm_modulate import (
    check_rows,
    norm_modulate_backward_reference,
    norm_modulate_reference,
)


def gated_norm(
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    pad: int = 0,
) -> tuple[Tensor, Tensor]:
    """Add a branch of a transformer block to the residual stream, and apply AdaLN for the next
    branch.

    Args:
        x: `[B, S, d]` residual stream, float32, bfloat16 or float16.
        y: output of the branch, like x.
        gate, scale, shift: `[B, d]`, float32 or the dtype of x; may be one row expanded over B.
        eps: added to the variance.
        pad: uninitialised columns to add on the right of each row of the second result.

    Returns:
        `[B, S, d]` and `[B, S, d + pad]` in the dtype of x, computed in float32. Differentiable in
        every tensor.

    Raises:
        ValueError: a shape, dtype or device does not fit, or `pad` is below 0.
    """
    check_branch(x, y, {"gate": gate, "scale": scale, "shift": shift}, pad=pad)
    return torch.ops.sage_fast.gated_norm(x, y, gate, scale, shift, eps, pad)


def check_branch(x: Tensor, y: Tensor, vectors: dict[str, Tensor], **further: int) -> None:
    """Check x, a branch's output y that is like x, and what `check_rows` checks.

    Raises:
        ValueError: one of them does not fit.
    """
    check_rows(x, vectors, **further)
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(f"y: expected {x.dtype} {list(x.shape)}, got {y.dtype} {list(y.shape)}")
    if y.device != x.device:
        raise ValueError(f"y: is on {y.device}, x is on {x.device}")


def gated_norm_reference(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float, pad: int = 0
) -> tuple[Tensor, Tensor]:
    """Specification in plain PyTorch; autograd can differentiate it. Fills the padding with 0."""
    dtype = compute_dtype(x)
    total = (x.to(dtype) + gate.to(dtype)[:, None] * y.to(dtype)).to(x.dtype).contiguous()
    return total, F.pad(norm_modulate_reference(total, scale, shift, eps), (0, pad))


def gated_norm_backward_reference(
    grad_sum: Tensor,
    grad: Tensor,
    total: Tensor,
    gate: Tensor,
    scale: Tensor,
    y: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in x and y, and float32 `[B, d]` gradients in gate, scale and shift, which are
    empty without `y`.

    grad is `[B, S, d + pad]`; its padding is not read.
    """
    dtype = compute_dtype(total)
    wide = total.to(dtype)
    dx, dscale, dshift = norm_modulate_backward_reference(
        grad.to(dtype), wide, scale, eps, y is not None, grad_sum.to(dtype)
    )
    dy = gate.to(dtype)[:, None] * dx
    dgate = (dx * y.to(dtype)).sum(1) if y is not None else dx.new_empty(0, dx.shape[2])
    return dx.to(total.dtype), dy.to(total.dtype).contiguous(), dgate, dscale, dshift


register(gated_norm_backward_reference)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, y, gate, scale, shift, ctx.eps, _ = inputs
    ctx.shift_dtype = shift.dtype
    ctx.save_for_backward(output[0], gate, scale, *([y] if any(ctx.needs_input_grad[2:5]) else []))


def _backward(ctx: Any, grad_sum: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    total, gate, scale, *kept = ctx.saved_tensors
    y = kept[0] if kept else None
    dx, dy, *modulation = torch.ops.sage_fast.gated_norm_backward(
        grad_sum, grad, total, gate, scale, y, ctx.eps
    )
    if y is None:
        return dx, dy, None, None, None, None, None
    dgate, dscale, dshift = modulation
    return (
        dx,
        dy,
        dgate.to(gate.dtype),
        dscale.to(scale.dtype),
        dshift.to(ctx.shift_dtype),
        None,
        None,
    )


register(gated_norm_reference, backward=_backward, setup_context=_setup_context)
