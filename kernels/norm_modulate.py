"""LayerNorm and AdaLN's scale and shift on the GPU, one row of d values in registers at a time.

x `[B, S, d]`; scale, shift `[B, d]` with any stride between rows, 0 included; results and gradients
`[B, S, d]`. The result and its gradient have padding columns on the right of each row and padding
rows below each sample. The forward reads x once and writes the result once. The backward reads the
gradient, x and the residual's gradient, and writes dx. The sums for scale and shift, if wanted,
stay in registers over a program's rows; a second stage adds them, without atomics. `gated_norm`
uses the same backward kernel. `sage_fast.ops.norm_modulate` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sage_fast.kernels.common import (
    LAUNCH_OPTIONS,
    WIDE_OPTIONS,
    contiguous_rows,
    power_of_2,
    rows_of_programs,
)
from torch import Tensor


@triton.jit
def _normed(x, mask, width, eps):
    """Return (x - mean) / std, 0 where masked, and 1 / std."""
    mean = tl.sum(x) / width
    centered = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered) / width + eps)
    return centered * rstd, rstd


@triton.jit
def _norm_modulate_fwd_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    rows,
    width,
    out_rows,
    out_width,
    scale_stride,
    shift_stride,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute normalised rows.

    Grid `(B, programs)`: program p has rows p ROWS .. (p + 1) ROWS - 1.
    """
    sample = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    column = tl.arange(0, WIDTH)
    mask = column < width
    gain = 1.0 + tl.load(scale_ptr + sample * scale_stride + column, mask=mask, other=0.0).to(
        tl.float32
    )
    offset = tl.load(shift_ptr + sample * shift_stride + column, mask=mask, other=0.0).to(
        tl.float32
    )
    for turn in range(ROWS):
        row = first + turn
        inside = column < tl.where(row < rows, width, 0)
        x = tl.load(x_ptr + (sample * rows + row) * width + column, mask=inside, other=0.0).to(
            tl.float32
        )
        normed, _ = _normed(x, mask, width, eps)
        out_ptrs = out_ptr + (sample * out_rows + row) * out_width + column
        tl.store(out_ptrs, tl.fma(normed, gain, offset).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_modulate_bwd_kernel(
    grad_ptr,
    x_ptr,
    scale_ptr,
    residual_ptr,
    gate_ptr,
    y_ptr,
    dx_ptr,
    dy_ptr,
    partial_ptr,
    rows,
    width,
    grad_rows,
    grad_width,
    scale_stride,
    gate_stride,
    eps,
    MODULATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute dx, plus the residual's gradient with RESIDUAL, and dy = gate dx with GATED. Grid
    `(B, programs)`.

    With MODULATION, also store this program's sums for scale, shift and, with GATED, gate: partial
    `[B, programs, 2 or 3, width]`.
    """
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    mask = column < width
    gain = 1.0 + tl.load(scale_ptr + sample * scale_stride + column, mask=mask, other=0.0).to(
        tl.float32
    )
    dscale = tl.zeros([WIDTH], tl.float32)
    dshift = tl.zeros([WIDTH], tl.float32)
    dgate = tl.zeros([WIDTH], tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + sample * gate_stride + column, mask=mask, other=0.0).to(
            tl.float32
        )
    for turn in range(ROWS):
        row = program * ROWS + turn
        inside = column < tl.where(row < rows, width, 0)
        index = (sample * rows + row) * width + column
        grad_index = (sample * grad_rows + row) * grad_width + column
        x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + grad_index, mask=inside, other=0.0).to(tl.float32)
        normed, rstd = _normed(x, mask, width, eps)
        if MODULATION:
            dscale = tl.fma(grad, normed, dscale)
            dshift += grad
        inner = grad * gain
        mean = tl.sum(inner) / width
        slope = tl.sum(inner * normed) / width
        dx = rstd * (inner - mean - normed * slope)
        if RESIDUAL:
            dx += tl.load(residual_ptr + index, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            tl.store(dy_ptr + index, (gate * dx).to(dy_ptr.dtype.element_ty), mask=inside)
            if MODULATION:
                y = tl.load(y_ptr + index, mask=inside, other=0.0).to(tl.float32)
                dgate = tl.fma(tl.where(inside, dx, 0.0), y, dgate)
        tl.store(dx_ptr + index, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if MODULATION:
        sums: tl.constexpr = 3 if GATED else 2
        out = partial_ptr + (sample * tl.num_programs(1) + program) * sums * width + column
        tl.store(out, dscale, mask=mask)
        tl.store(out + width, dshift, mask=mask)
        if GATED:
            tl.store(out + 2 * width, dgate, mask=mask)


def norm_modulate(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, pad: int = 0, pad_rows: int = 0
) -> Tensor:
    """Launch the forward; arguments as `sage_fast::norm_modulate`.

    Copies an x that is not contiguous.
    """
    x, scale, shift = x.contiguous(), contiguous_rows(scale), contiguous_rows(shift)
    batch, rows, width = x.shape
    out = x.new_empty(batch, rows + pad_rows, width + pad)
    if pad_rows:
        out[:, rows:].zero_()
    if x.numel() == 0:
        return out
    programs, per_program = rows_of_programs(rows, batch)
    with torch.cuda.device_of(x):
        _norm_modulate_fwd_kernel[(batch, programs)](
            x,
            scale,
            shift,
            out,
            rows,
            width,
            rows + pad_rows,
            width + pad,
            scale.stride(0),
            shift.stride(0),
            eps,
            ROWS=per_program,
            WIDTH=power_of_2(width),
            **LAUNCH_OPTIONS,
        )
    return out


def norm_modulate_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    eps: float,
    modulation: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward; arguments as `sage_fast::norm_modulate_backward`."""
    dx, _, (dscale, dshift) = launch_backward(grad, x, scale, eps, modulation, residual)
    return dx, dscale, dshift


def launch_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    eps: float,
    modulation: bool,
    residual: Tensor | None,
    gate: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Launch the backward of `norm_modulate` or, with a gate, of `gated_norm`.

    Returns dx; dy, or None without a gate; and the sums for scale, shift and, with a gate, gate.
    """
    grad, x, scale = grad.contiguous(), x.contiguous(), contiguous_rows(scale)
    residual, y = (None if tensor is None else tensor.contiguous() for tensor in (residual, y))
    gate = None if gate is None else contiguous_rows(gate)
    batch, rows, width = x.shape
    dx = torch.empty_like(x)
    dy = torch.empty_like(x) if gate is not None else None
    programs, per_program = rows_of_programs(rows, batch, sums=modulation)
    count = 2 if gate is None else 3
    partial = torch.empty(
        batch if modulation else 0, programs, count, width, dtype=torch.float32, device=x.device
    )
    if x.numel() > 0:
        with torch.cuda.device_of(x):
            _norm_modulate_bwd_kernel[(batch, programs)](
                grad,
                x,
                scale,
                residual,
                gate,
                y,
                dx,
                dy,
                partial,
                rows,
                width,
                grad.shape[1],
                grad.shape[2],
                scale.stride(0),
                0 if gate is None else gate.stride(0),
                eps,
                MODULATION=modulation,
                RESIDUAL=residual is not None,
                GATED=gate is not None,
                ROWS=per_program,
                WIDTH=power_of_2(width),
                **WIDE_OPTIONS,
            )
    sums = partial.sum(1) if rows > 0 else partial.new_zeros(len(partial), count, width)
    return dx, dy, [part.clone(memory_format=torch.contiguous_format) for part in sums.unbind(1)]
