"""Gated residual, x + gate y, in one pass; the backward writes dy = gate grad and sums grad y for
the gate in another.

There is no C++: the CPU runs the reference, whose parts are PyTorch's own kernels. On a GPU these
move one element a thread where the gate is broadcast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import compute_dtype
from sage_fast.ops._dispatch import register
from sage_fast.ops.gated_norm import check_branch


def gated_sum(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Add the last branch of a transformer block to the residual stream.

    Args:
        x: `[B, S, d]` residual stream, float32, bfloat16 or float16.
        y: output of the branch, like x.
        gate: `[B, d]`, float32 or the dtype of x; may be one row expanded over B.

    Returns:
        `[B, S, d]` in the dtype of x, computed in float32. Differentiable in every tensor.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    check_branch(x, y, {"gate": gate})
    return torch.ops.sage_fast.gated_sum(x, y, gate)


def gated_sum_reference(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Specification in plain PyTorch; autograd can differentiate it."""
    return torch.addcmul(x, gate[:, None], y).to(x.dtype).contiguous()


def gated_sum_backward_reference(
    grad: Tensor, gate: Tensor, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient in y, and float32 `[B, d]` gradient in the gate, which is empty without `y`.

    That in x is grad.
    """
    dtype = compute_dtype(grad)
    dgate = (
        grad.new_empty(0, grad.shape[2], dtype=dtype) if y is None else (grad.to(dtype) * y).sum(1)
    )
    return (gate[:, None] * grad).to(grad.dtype).contiguous(), dgate


register(gated_sum_backward_reference, cpp=False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, y, gate = inputs
    ctx.save_for_backward(gate, *([y] if ctx.needs_input_grad[2] else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, *kept = ctx.saved_tensors
    y = kept[0] if kept else None
    dy, dgate = torch.ops.sage_fast.gated_sum_backward(grad, gate, y)
    return grad, dy, None if y is None else dgate.to(gate.dtype)


register(gated_sum_reference, cpp=False, backward=_backward, setup_context=_setup_context)
