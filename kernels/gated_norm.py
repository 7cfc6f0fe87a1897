"""Gated residual with LayerNorm and AdaLN on the GPU, one row of d values in registers at a time.

x, y `[B, S, d]`; gate, scale, shift `[B, d]` with any stride between rows, 0 included. The second
result has padding columns on the right of each row. The forward reads x and y once, and writes the
sum and the result once. The backward (kernels/norm_modulate.py) reads both gradients and the sum,
and y if the modulation is trained; it writes dx and dy. `sage_fast.ops.gated_norm` is the
specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sage_fast.kernels.common import WIDE_OPTIONS, contiguous_rows, power_of_2, rows_of_programs
from sage_fast.kernels.norm_modulate import _normed, launch_backward
from torch import Tensor


@triton.jit
def _gated_norm_fwd_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    sum_ptr,
    out_ptr,
    rows,
    width,
    out_width,
    gate_stride,
    scale_stride,
    shift_stride,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute the sum and its normalised rows.

    Grid `(B, programs)`: program p has rows p ROWS .. (p + 1) ROWS - 1.
    """
    sample = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    column = tl.arange(0, WIDTH)
    mask = column < width
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    gain = 1.0 + tl.load(scale_ptr + sample * scale_stride + column, mask=mask, other=0.0).to(
        tl.float32
    )
    offset = tl.load(shift_ptr + sample * shift_stride + column, mask=mask, other=0.0).to(
        tl.float32
    )
    for turn in range(ROWS):
        row = first + turn
        inside = column < tl.where(row < rows, width, 0)
        index = (sample * rows + row) * width + column
        x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + index, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(gate, y, x).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + index, total, mask=inside)
        normed, _ = _normed(total.to(tl.float32), mask, width, eps)
        out_ptrs = out_ptr + (sample * rows + row) * out_width + column
        tl.store(out_ptrs, tl.fma(normed, gain, offset).to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float, pad: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the forward; arguments as `sage_fast::gated_norm`.

    Copies inputs that are not contiguous.
    """
    x, y = x.contiguous(), y.contiguous()
    gate, scale, shift = map(contiguous_rows, (gate, scale, shift))
    batch, rows, width = x.shape
    total, out = torch.empty_like(x), x.new_empty(batch, rows, width + pad)
    if x.numel() == 0:
        return total, out
    programs, per_program = rows_of_programs(rows, batch)
    with torch.cuda.device_of(x):
        _gated_norm_fwd_kernel[(batch, programs)](
            x,
            y,
            gate,
            scale,
            shift,
            total,
            out,
            rows,
            width,
            width + pad,
            gate.stride(0),
            scale.stride(0),
            shift.stride(0),
            eps,
            ROWS=per_program,
            WIDTH=power_of_2(width),
            **WIDE_OPTIONS,
        )
    return total, out


def gated_norm_backward(
    grad_sum: Tensor,
    grad: Tensor,
    total: Tensor,
    gate: Tensor,
    scale: Tensor,
    y: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward; arguments as `sage_fast::gated_norm_backward`."""
    dx, dy, (dscale, dshift, dgate) = launch_backward(
        grad, total, scale, eps, y is not None, grad_sum, gate, y
    )
    assert dy is not None
    return dx, dy, dgate, dscale, dshift
