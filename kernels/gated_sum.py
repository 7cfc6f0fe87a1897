"""Gated residual on the GPU, one row of d values at a time.

x, y, grad and results `[B, S, d]`; gate `[B, d]` with any stride between rows, 0 included. The
forward reads x and y once and writes the sum once. The backward reads the gradient, and y if the
gate is trained, and writes dy; the sums for the gate stay in registers over a program's rows, and a
second stage adds them, without atomics. `sage_fast.ops.gated_sum` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sage_fast.kernels.common import LAUNCH_OPTIONS, contiguous_rows, power_of_2, rows_of_programs
from torch import Tensor


@triton.jit
def _gated_sum_fwd_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    sum_ptr,
    rows,
    width,
    gate_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute rows of the sum.

    Grid `(B, programs)`: program p has rows p ROWS .. (p + 1) ROWS - 1.
    """
    sample = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = column < width
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    for turn in range(ROWS):
        row = tl.program_id(1) * ROWS + turn
        inside = column < tl.where(row < rows, width, 0)
        index = (sample * rows + row) * width + column
        x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + index, tl.fma(gate, y, x).to(sum_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_sum_bwd_kernel(
    grad_ptr,
    gate_ptr,
    y_ptr,
    dy_ptr,
    partial_ptr,
    rows,
    width,
    gate_stride,
    MODULATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute dy and, with MODULATION, this program's sum for the gate: partial `[B, programs,
    width]`."""
    sample = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = column < width
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    dgate = tl.zeros([WIDTH], tl.float32)
    for turn in range(ROWS):
        row = tl.program_id(1) * ROWS + turn
        inside = column < tl.where(row < rows, width, 0)
        index = (sample * rows + row) * width + column
        grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(dy_ptr + index, (gate * grad).to(dy_ptr.dtype.element_ty), mask=inside)
        if MODULATION:
            dgate = tl.fma(
                grad, tl.load(y_ptr + index, mask=inside, other=0.0).to(tl.float32), dgate
            )
    if MODULATION:
        out = partial_ptr + (sample * tl.num_programs(1) + tl.program_id(1)) * width + column
        tl.store(out, dgate, mask=mask)


def gated_sum(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Launch the forward; arguments as `sage_fast::gated_sum`.

    Copies inputs that are not contiguous.
    """
    x, y, gate = x.contiguous(), y.contiguous(), contiguous_rows(gate)
    batch, rows, width = x.shape
    total = torch.empty_like(x)
    if x.numel() > 0:
        programs, per_program = rows_of_programs(rows, batch)
        with torch.cuda.device_of(x):
            _gated_sum_fwd_kernel[(batch, programs)](
                x,
                y,
                gate,
                total,
                rows,
                width,
                gate.stride(0),
                ROWS=per_program,
                WIDTH=power_of_2(width),
                **LAUNCH_OPTIONS,
            )
    return total


def gated_sum_backward(grad: Tensor, gate: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launch the backward; arguments as `sage_fast::gated_sum_backward`."""
    grad, gate, y = grad.contiguous(), contiguous_rows(gate), None if y is None else y.contiguous()
    batch, rows, width = grad.shape
    dy = torch.empty_like(grad)
    programs, per_program = rows_of_programs(rows, batch, sums=y is not None)
    partial = torch.empty(
        0 if y is None else batch, programs, width, dtype=torch.float32, device=grad.device
    )
    if grad.numel() > 0:
        with torch.cuda.device_of(grad):
            _gated_sum_bwd_kernel[(batch, programs)](
                grad,
                gate,
                y,
                dy,
                partial,
                rows,
                width,
                gate.stride(0),
                MODULATION=y is not None,
                ROWS=per_program,
                WIDTH=power_of_2(width),
                **LAUNCH_OPTIONS,
            )
    return dy, partial.sum(1) if rows > 0 else partial.new_zeros(len(partial), width)
