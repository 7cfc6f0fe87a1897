"""Rows beside their product with an adapter's A, in one pass, as they are, through GELU (tanh) or a
gate:

    out = [h, h A^T]        h = x, gelu(x) or gate x

models/lora/linear.py reads them with one matmul, [h, h A^T] [W, s B]^T. The backward is that of
GELU between two layers with adapters, x = rows W'^T + (rows A'^T) s' B'^T and y = out [W, s B]^T.
Both adapters need sums over rows that it holds anyway. From dh, dy s B and rows A'^T:

    dx = dh gelu'(x)         dA = (dy s B)^T gelu(x)         dB' = s' dx^T (rows A'^T)

There is no C++: the CPU runs the reference, whose parts are PyTorch's own kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_fast.ops._common import compute_dtype
from sage_fast.ops._dispatch import register


def adapter_rows_reference(
    x: Tensor, down: Tensor, gelu: bool, gate: Tensor | None = None
) -> Tensor:
    """Specification: x `[B, S, d]`, A `[r, d]`, gate `[B, d]` -> `[B, S, d + r]` in the dtype of x.

    The product is of h as stored.
    """
    width = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width + len(down))
    rows = out.flatten(0, -2)
    if gelu:
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out[..., :width])
    else:
        out[..., :width] = x if gate is None else gate[:, None] * x
    torch.mm(rows[:, :width], down.t(), out=rows[:, width:])
    return out


def adapter_rows_backward_reference(
    grad: Tensor, inner: Tensor, x: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Specification of the backward with GELU, which is computed again from x.

    Args:
        grad: `[R, d]`, dh; contiguous, and overwritten with dx.
        inner: `[R, r]`, dy s B.
        x: `[R, d]`.
        up: `[R, q]`, rows A'^T.

    Returns:
        dA `[r, d]` and dx^T up `[d, q]` in float32.
    """
    torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad)
    # as the forward stored it; without an adapter nothing reads it
    hidden = F.gelu(x, approximate="tanh") if inner.shape[1] else x
    pairs = (inner.t(), hidden), (grad.t(), up)
    if grad.is_cuda:
        down, of_up = (mm_in_float32(a, b) for a, b in pairs)
    else:  # a specification does not round its sums
        down, of_up = (a.to(compute_dtype(a)) @ b.to(compute_dtype(b)) for a, b in pairs)
    return down, of_up


def mm_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 (float64 for float64).

    CUDA's matmul writes its float32 sums; the CPU's rounds them to the dtype of a first.
    """
    dtype = compute_dtype(a)
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else (a @ b).to(dtype)


register(adapter_rows_reference, cpp=False)
register(adapter_rows_backward_reference, mutates=("grad",), cpp=False)
