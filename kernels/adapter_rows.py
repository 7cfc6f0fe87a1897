"""Rows beside their product with an adapter's A, as they are, through GELU or a gate, on the GPU.

x `[B, S, d]` with contiguous rows; A `[r, d]`; result `[B, S, d + r]`. The forward reads x once and
writes the result once: a program holds ROWS rows and walks over their columns, while their product
with A grows in registers. The backward reads the gradient and x once and writes dx once, in place:
a program holds BLOCK columns and walks over rows, while both adapters' gradients for these columns
grow in registers. A second stage adds the programs' sums, without atomics.
`sage_fast.ops.adapter_rows` is the specification.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sage_fast.kernels.common import (
    LAUNCH_OPTIONS,
    MAX_PROGRAMS,
    WIDE_OPTIONS,
    contiguous_rows,
    power_of_2,
)
from torch import Tensor

from sage_fast.ops.adapter_rows import adapter_rows_backward_reference, adapter_rows_reference

ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether kernels may contain PTX."""
MAX_RANK = 256
"""Above it the sums would not fit in a multiprocessor, and PyTorch's kernels do the work."""


MEASURED = {
    "plain": {"ROWS": 64, "BLOCK": 128, **WIDE_OPTIONS},
    "gelu": {"ROWS": 64, "BLOCK": 128, **WIDE_OPTIONS},
    "gated": {"ROWS": 128, "BLOCK": 64, **WIDE_OPTIONS},
    "backward": {"ROWS": 64, "BLOCK": 64, **LAUNCH_OPTIONS},
}
"""Use -> Hopper's tile: the fastest of seven at rank 64 in 16 bits on an H200
(`2026-11-27-h200-adapter-rows.json` in benchmarks/results)."""


def options(itemsize: int, rank: int, use: str, arch: int = 90) -> dict[str, Any]:
    """Rows and columns of a tile, and warps.

    By Triton 3.9 no rank spills on an architecture of the compile report, or needs more shared
    memory than a program has there. By 3.6 three kernels keep a register or two in local memory
    on sm_120, outside their loops.

    In 16 bits a program reads all of A from the L2 cache: from 64 rows on no more than it reads
    of x.

    Args:
        itemsize: bytes of a value of x.
        rank: rows of A; of the backward, the padded rank of the larger adapter.
        use: `plain`, `gelu`, `gated`, or `backward`, which holds two sums.
        arch: compute capability times 10.
    """
    # The matrix instructions of sm_100 and sm_110 add in tensor memory and take 64 rows. Products
    # with GELU stay below that, since Triton 3.6 cannot pipeline the assembly of GELU in their
    # loop. sm_120 (RTX 50) has the instructions of sm_80, and gets its tiles.
    tensor_memory = 100 <= arch < 120
    if itemsize == 4:
        return _float32_options(rank, use, arch)
    if rank <= 64 and 90 <= arch < 100:
        return dict(MEASURED[use])
    if rank % 16:  # of a forward alone
        return {"ROWS": 32, "BLOCK": 32, **WIDE_OPTIONS}
    if use == "backward" and tensor_memory:
        return {"ROWS": 32, "BLOCK": 32, **LAUNCH_OPTIONS}
    if use == "backward" or rank > 128:
        return {"ROWS": 32, "BLOCK": 64, **WIDE_OPTIONS}
    if use == "gelu" and tensor_memory:
        return {"ROWS": 32, "BLOCK": 128, **LAUNCH_OPTIONS}
    return {"ROWS": 64, "BLOCK": 64, **(WIDE_OPTIONS if use == "gated" else LAUNCH_OPTIONS)}


def _float32_options(rank: int, use: str, arch: int) -> dict[str, Any]:
    """As `options`. float32 has no tensor cores here, and its products need more registers."""
    wide = use == "gelu" and rank > 64 and rank % 16 == 0
    tile = {"ROWS": 32 if wide else 16, "BLOCK": 16, **WIDE_OPTIONS}
    if arch >= 120 and rank > 128:
        # The tiles of the others spill.
        if use == "backward":
            tile["BLOCK"] = 8
        elif wide:
            tile["num_warps"] = 16
    return tile


def architecture(x: Tensor) -> int:
    """Return the compute capability of x's GPU, times 10; without a GPU, Hopper's."""
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)
    return 10 * major + minor


def rank_block(rank: int) -> int:
    """Columns of a product's tile: a power of two, and no fewer than a matrix instruction takes."""
    return max(power_of_2(max(rank, 1)), 16)


@triton.jit
def _gelu(x):
    """Return GELU (tanh) of x, and its derivative, in fp32: with s = sigmoid(2 u), x s and s + x s
    (1 - s) 2 u'.

    Triton may evaluate an operation once for each layout that its result is needed in: here those
    of the store and of the matrix products. It does not repeat assembly that is not pure, so in 16
    bits, where errors of 2^-22 vanish, GELU costs two special-function instructions an element.
    There e = exp(-2 u), s = 1 / (1 + e), and e s s is 0 where e is infinite. In float32, e =
    exp(-|2 u|) neither overflows nor leaves 1 - s to a cancellation.
    """
    wide = x.to(tl.float32)
    square = wide * wide
    if ASSEMBLY and x.dtype != tl.float32:
        s, product = tl.inline_asm_elementwise(
            """{
                .reg .f32 e, sum;
                ex2.approx.ftz.f32 e, $2;
                add.ftz.f32 sum, e, 0f3F800000;
                rcp.approx.ftz.f32 $0, sum;
                min.ftz.f32 e, e, 0f7F7FFFFF;
                mul.ftz.f32 e, e, $0;
                mul.ftz.f32 $1, e, $0;
            }""",
            "=f,=f,f",
            [wide * tl.fma(square, -0.10294324, -2.3022082)],  # -2 u / ln 2
            dtype=(tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
        slope = tl.fma(square, 0.21406444, 1.5957691)
    else:
        e = tl.exp(-1.5957691216057308 * tl.abs(wide) * tl.fma(square, 0.044715, 1.0))
        p = 1.0 / (1.0 + e)
        s, product = tl.where(wide >= 0, p, e * p), e * p * p
        slope = 1.5957691216057308 * tl.fma(square, 0.134145, 1.0)
    return wide * s, tl.fma(wide * product, slope, s)


@triton.jit
def _add_product(total, excess, a, b):
    """Return total + a b, and by how much it is too large.

    In float32 one chain of additions errs several times as much as PyTorch's matmul, so it is
    compensated (Kahan). In 16 bits the factors' rounding hides that, and the tensor cores add.
    """
    if a.dtype == tl.float32:
        term = tl.dot(a, b, input_precision="ieee") - excess
        before = total
        total = before + term
        excess = (total - before) - term
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total, excess


@triton.jit
def _adapter_rows_fwd_kernel(
    x_ptr,
    down_ptr,
    gate_ptr,
    out_ptr,
    rows,
    width,
    rank,
    gate_stride,
    x_batch_stride,
    x_stride,
    rank_stride,
    column_stride,
    GELU: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
):
    """Compute ROWS rows of a sample. Grid `(row tiles, B)`."""
    sample = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANK)
    inside = (row < rows)[:, None]
    x_rows = x_ptr + sample * x_batch_stride + row[:, None] * x_stride
    out_rows = out_ptr + (sample * rows + row[:, None]) * (width + rank)
    inner = tl.zeros([ROWS, RANK], tl.float32)
    excess = tl.zeros([ROWS, RANK], tl.float32)
    for start in tl.range(0, width, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        mask = inside & (column < width)[None, :]
        x = tl.load(x_rows + column[None, :], mask=mask, other=0.0)
        if GELU:
            x = _gelu(x)[0].to(x.dtype)
        if GATED:
            gate = tl.load(gate_ptr + sample * gate_stride + column, mask=column < width, other=0.0)
            x = (gate.to(tl.float32)[None, :] * x.to(tl.float32)).to(x.dtype)
        tl.store(out_rows + column[None, :], x, mask=mask)
        factor_mask = (r < rank)[:, None] & (column < width)[None, :]
        factor_ptrs = down_ptr + r[:, None] * rank_stride + column[None, :] * column_stride
        factor = tl.load(factor_ptrs, mask=factor_mask, other=0.0)
        inner, excess = _add_product(inner, excess, x, tl.trans(factor))
    tl.store(
        out_rows + width + r[None, :],
        inner.to(out_ptr.dtype.element_ty),
        mask=inside & (r < rank)[None, :],
    )


@triton.jit
def _adapter_rows_bwd_kernel(
    grad_ptr,
    inner_ptr,
    x_ptr,
    up_ptr,
    d_down_ptr,
    d_up_ptr,
    rows,
    width,
    rank,
    up_rank,
    inner_stride,
    up_stride,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
):
    """Write dx over the gradient of BLOCK columns and `tiles` row tiles, and partial sums for both
    adapters.

    The sums are `[splits, d, r]`. Grid `(column tiles, splits)`: programs that run at the same time
    share the rows of both products.
    """
    split = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)[None, :]
    d_down = tl.zeros([BLOCK, RANK], tl.float32)
    d_up = tl.zeros([BLOCK, RANK], tl.float32)
    down_excess, up_excess = tl.zeros_like(d_down), tl.zeros_like(d_up)
    for turn in tl.range(0, tiles, num_stages=3):
        row = ((split * tiles + turn) * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & (column < width)[None, :]
        at = row * width + column[None, :]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        inner = tl.load(
            inner_ptr + row * inner_stride + r, mask=(row < rows) & (r < rank), other=0.0
        )
        up = tl.load(up_ptr + row * up_stride + r, mask=(row < rows) & (r < up_rank), other=0.0)
        hidden, slope = _gelu(x)
        dx = (grad * slope).to(x.dtype)
        tl.store(grad_ptr + at, dx, mask=mask)
        d_down, down_excess = _add_product(d_down, down_excess, tl.trans(hidden.to(x.dtype)), inner)
        d_up, up_excess = _add_product(d_up, up_excess, tl.trans(dx), up)
    column = column[:, None]
    tl.store(
        d_down_ptr + split * width * rank + column * rank + r,
        d_down,
        mask=(column < width) & (r < rank),
    )
    tl.store(
        d_up_ptr + split * width * up_rank + column * up_rank + r,
        d_up,
        mask=(column < width) & (r < up_rank),
    )


def adapter_rows(x: Tensor, down: Tensor, gelu: bool, gate: Tensor | None = None) -> Tensor:
    """Launch the forward; arguments as `sage_fast::adapter_rows`.

    Copies an x whose rows are not contiguous.
    """
    if len(down) > MAX_RANK:
        return adapter_rows_reference(x, down, gelu, gate)
    x, gate = contiguous_rows(x), None if gate is None else contiguous_rows(gate)
    batch, rows, width = x.shape
    out = x.new_empty(batch, rows, width + len(down))
    if out.numel() == 0:
        return out
    use = "gelu" if gelu else "plain" if gate is None else "gated"
    sizes = options(x.itemsize, len(down), use, architecture(x))
    with torch.cuda.device_of(x):
        _adapter_rows_fwd_kernel[(-(-rows // sizes["ROWS"]), batch)](
            x,
            down,
            gate,
            out,
            rows,
            width,
            len(down),
            0 if gate is None else gate.stride(0),
            *x.stride()[:2],
            *down.stride(),
            GELU=gelu,
            GATED=gate is not None,
            **sizes,
            RANK=rank_block(len(down)),
        )
    return out


def _whole_vectors(rows: Tensor) -> Tensor:
    """Pad rows to a multiple of 16 values: 16-bit loads of other rows wait in registers, which
    spill."""
    rank = rows.shape[1]
    return F.pad(rows, (0, -rank % 16)) if rank % 16 else contiguous_rows(rows)


def adapter_rows_backward(
    grad: Tensor, inner: Tensor, x: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch the backward; arguments as `sage_fast::adapter_rows_backward`."""
    assert grad.is_contiguous()
    if max(inner.shape[1], up.shape[1]) > MAX_RANK:
        return adapter_rows_backward_reference(grad, inner, x, up)
    ranks, x, inner, up = (
        (inner.shape[1], up.shape[1]),
        x.contiguous(),
        _whole_vectors(inner),
        _whole_vectors(up),
    )
    (rows, width), rank, up_rank = x.shape, inner.shape[1], up.shape[1]
    sizes = options(x.itemsize, max(rank, up_rank), "backward", architecture(x))
    columns, row_tiles = -(-width // sizes["BLOCK"]), -(-rows // sizes["ROWS"])
    tiles = max(-(-row_tiles // max(MAX_PROGRAMS // max(columns, 1), 1)), 1)
    splits = -(-row_tiles // tiles)
    sums = [
        torch.empty(splits, width, count, dtype=torch.float32, device=x.device)
        for count in (rank, up_rank)
    ]
    if x.numel() > 0:
        with torch.cuda.device_of(x):
            _adapter_rows_bwd_kernel[(columns, splits)](
                grad,
                inner,
                x,
                up,
                *sums,
                rows,
                width,
                rank,
                up_rank,
                inner.stride(0),
                up.stride(0),
                tiles,
                **sizes,
                RANK=rank_block(max(rank, up_rank)),
            )
    d_down, d_up = (part.sum(0)[:, :count] for part, count in zip(sums, ranks))
    return d_down.t().contiguous(), d_up.contiguous()
