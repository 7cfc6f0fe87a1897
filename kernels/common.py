"""Code shared by the kernels: launch options; for the transitions, rows, noise in registers and the
second reduction.

Tiles. A sample is `numel` contiguous elements, cut into tiles of BLOCK elements held as `[BLOCK //
VEC, VEC]`. A thread owns VEC neighbours and a warp 32 VEC. So every access of an aligned sample is
one vector instruction over contiguous memory, and a Philox call (4 normals) stays within its
thread. VEC is 4 if any tensor is fp32 and 8 if all are 16-bit: 16 bytes per thread for the widest
tensor. A larger VEC would leave gaps between the threads of an fp32 access, or need shared memory
to close them.

Alignment. Triton specialises on pointers and `numel` that are multiples of 16; ALIGNED repeats the
latter for the masks. If `numel` is not a multiple, samples start anywhere and the same source
compiles to scalar accesses.

Reductions. Up to MAX_PROGRAMS programs share a sample. Each writes one partial sum, and
`_reduce_kernel` adds them in a fixed order, without atomics: two runs agree bit for bit. Nothing
depends on the batch size, so a sample's result is the same in every batch. Multiply-adds are
explicit `tl.fma`, and the compiler may not contract others (LAUNCH_OPTIONS), so step and score
round a residual alike.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements per tile: 8 per thread. 2048 spills registers around the Philox rounds of unaligned
samples."""

MAX_PROGRAMS = 512
"""Maximum number of programs per sample.

A program loops over its tiles, which spreads its fixed cost: for the step, 115 instructions against
50 per element. TILES is a constant, so a single tile costs no loop. The 480p latent (1,048,320
elements) has 2 tiles per program. At batch 1 that is 3.9 programs for each of 132 SMs, or 3 MB in
flight: what 4.3 TB/s needs at a latency of 700 ns."""

LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
WIDE_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Options of kernels that hold several rows at once: half as many values per thread. With four
warps, fp32 rows of 2048 values and their gradients spill on sm_100."""


def _mend_the_interpreter() -> None:
    """Make Triton's interpreter compute bf16 as compiled kernels do, and loop with NumPy 2.4.

    3.6 to 3.9 truncate fp32 to bf16 instead of rounding it to nearest even, and multiply the bits
    of bf16 matrices as integers. 3.6 converts a loop's bound by `int`, which NumPy 2.4 refuses for
    the array of one element that it is.
    """
    import numpy as np
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(data, source, target, mode):
        if (source, target, mode) != (tl.float32, tl.bfloat16, None):
            return convert(data, source, target, mode)
        bits = np.asarray(data, dtype=np.float32, order="C").view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    interpreter._convert_float = rounding
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_with_index
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(
        self, widened(a), widened(b), *rest
    )


if triton.knobs.runtime.interpret:
    _mend_the_interpreter()


@triton.jit
def _row(coefs_ptr, step_ptr, sample, steps, STEP_STRIDE: tl.constexpr):
    """Load (a, b, c, w, k, m) of this sample's step, and the step.

    A step outside the table gives nan, never a read.
    """
    step = tl.load(step_ptr + sample * STEP_STRIDE)
    inside = (step >= 0) & (step < steps)
    row_ptr = coefs_ptr + step * 6
    a = tl.load(row_ptr, mask=inside, other=float("nan")).to(tl.float32)
    b = tl.load(row_ptr + 1, mask=inside, other=float("nan")).to(tl.float32)
    c = tl.load(row_ptr + 2, mask=inside, other=float("nan")).to(tl.float32)
    w = tl.load(row_ptr + 3, mask=inside, other=float("nan")).to(tl.float32)
    k = tl.load(row_ptr + 4, mask=inside, other=float("nan")).to(tl.float32)
    m = tl.load(row_ptr + 5, mask=inside, other=float("nan")).to(tl.float32)
    return a, b, c, w, k, m, step


@triton.jit
def _tile(BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Return positions 0 .. BLOCK - 1 within a tile, `[BLOCK // VEC, VEC]`."""
    return tl.arange(0, BLOCK // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def _inside(inner, left, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mask of the first `left` (int64) positions.

    32-bit comparisons take half the registers. If numel is a multiple of 16, so is `left`; the
    minimum hides that from the compiler.
    """
    left = tl.minimum(left, BLOCK).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    return inner < left


@triton.jit
def _load(ptr, start, inner, mask):
    """Load elements start + inner as fp32, 0 where masked."""
    return tl.load(ptr + start + inner, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _velocity(v_ptr, v_uncond_ptr, guidance, start, inner, mask, HAS_GUIDANCE: tl.constexpr):
    """Load the velocity; the guided one is rounded as `sage_fast.ops.guidance.guided` rounds it."""
    v = _load(v_ptr, start, inner, mask)
    if HAS_GUIDANCE:
        v_uncond = _load(v_uncond_ptr, start, inner, mask)
        v = v_uncond + guidance * (v - v_uncond)
    return v


@triton.jit
def _mean(a, b, x, v):
    """Return a x + b v, rounded alike by step and score."""
    return tl.fma(b, v, a * x)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Run ten rounds of Philox4x32, like tl.philox but with one 64-bit product for two 32-bit ones:
    half as many."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _uniform(word):
    """Return (w >> 8) 2^-24 + 2^-25 in fp32."""
    return tl.fma((word >> 8).to(tl.float32), 2.0**-24, 2.0**-25)


@triton.jit
def _minus_2_log(u):
    """Return -2 ln u for u in [2^-25, 1], to 1.1 units in the last place and never negative.

    tl.log spends a third of its instructions on arguments that cannot occur here. With u = 2^e (1 +
    f) and 2/3 <= 1 + f < 4/3, -2 ln u = -2 e ln 2 - 2 f + f^2 p(f), with p minimax (relative error
    2.6e-8).
    """
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000  # e 2^23
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, -0.28052714, 0.3077708)
    p = tl.fma(f, p, -0.27991614)
    p = tl.fma(f, p, 0.32831922)
    p = tl.fma(f, p, -0.40022338)
    p = tl.fma(f, p, 0.50015638)
    p = tl.fma(f, p, -0.66666396)
    p = tl.fma(f, p, 0.99999872)
    p = tl.fma(f * f, p, -2.0 * f)
    return tl.fma(exponent.to(tl.float32), -1.6525917e-07, p)  # -2 ln 2 2^-23


@triton.jit
def _box_muller(u_radius, u_angle):
    """Return sqrt(-2 ln u_radius) times cos(2 pi u_angle) and sin(2 pi u_angle).

    tl.cos and tl.sin reduce angles of any size. t = u - 1/2 is exact. With the zeros factored out
    and minimax p and q, cos(2 pi u) = (t^2 - 1/16) q(t^2) and sin(2 pi u) = t (t^2 - 1/4) p(t^2).
    At radius 1 the error over all 2^24 angles is at most 2.6e-7, against 3.8e-7 for the exact
    cosine of 2 pi u rounded to fp32.
    """
    t = u_angle - 0.5
    z = t * t
    p = tl.fma(z, -3.19337179, 14.06550403)
    p = tl.fma(z, p, -38.49841879)
    p = tl.fma(z, p, 67.07675869)
    p = tl.fma(z, p, -64.83582258)
    p = tl.fma(z, p, 25.13274108)
    q = tl.fma(z, -6.54001056, 25.56709052)
    q = tl.fma(z, q, -58.57185419)
    q = tl.fma(z, q, 81.78963936)
    q = tl.fma(z, q, -59.82727399)
    q = tl.fma(z, q, 15.99999981)
    radius = tl.sqrt(_minus_2_log(u_radius))
    return radius * ((z - 0.0625) * q), radius * (t * (z - 0.25) * p)


@triton.jit
def _normal4(seed, step, block_lo, block_hi):
    """Return the normals `[N, 4]` of Philox blocks block_lo `[N]`, in stream 0."""
    zero = tl.zeros_like(block_lo)
    hi, step = zero + block_hi, zero + step.to(tl.uint32)
    w0, w1, w2, w3 = _philox(
        block_lo, hi, step, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    z0, z1 = _box_muller(_uniform(w0), _uniform(w1))
    z2, z3 = _box_muller(_uniform(w2), _uniform(w3))
    return tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), [block_lo.shape[0], 4])


@triton.jit
def _noise(seed, step, first, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Return the noise `[BLOCK // VEC, VEC]` of elements first .. first + BLOCK - 1 of a sample.

    sage_fast/ops/philox.py is the specification. `first` (int64) is a multiple of BLOCK, so the low
    word of the counter never carries within a tile.
    """
    lo = ((first >> 2) & 0xFFFFFFFF).to(tl.uint32)
    hi = (first >> 34).to(tl.uint32)
    row = tl.arange(0, BLOCK // VEC).to(tl.uint32)
    if VEC == 4:
        noise = _normal4(seed, step, lo + row, hi)
    else:
        tl.static_assert(VEC == 8)
        left = _normal4(seed, step, lo + row * 2, hi)
        right = _normal4(seed, step, lo + row * 2 + 1, hi)
        noise = tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [BLOCK // VEC, VEC])
    return noise


@triton.jit
def _reduce_kernel(
    partial_ptr,
    coefs_ptr,
    step_ptr,
    logp_ptr,
    kl_anchor_ptr,
    kl_old_ptr,
    error_plus_ptr,
    error_minus_ptr,
    inverse_numel,
    steps,
    programs,
    OUTPUTS: tl.constexpr,
    STEP_STRIDE: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Reduce partial sums `[B, OUTPUTS, programs]` to logp, and to both KLs and errors if OUTPUTS
    is 5."""
    sample = tl.program_id(0).to(tl.int64)
    _, _, _, w, k, m, _ = _row(coefs_ptr, step_ptr, sample, steps, STEP_STRIDE)
    column = tl.arange(0, PARTIALS)
    mask = column < programs
    row_ptr = partial_ptr + sample * OUTPUTS * programs
    square = tl.sum(tl.load(row_ptr + column, mask=mask, other=0.0)) * inverse_numel
    tl.store(logp_ptr + sample, tl.fma(w, square, k))
    if OUTPUTS == 5:
        anchor = tl.sum(tl.load(row_ptr + programs + column, mask=mask, other=0.0)) * inverse_numel
        tl.store(kl_anchor_ptr + sample, m * anchor)
        old = tl.sum(tl.load(row_ptr + 2 * programs + column, mask=mask, other=0.0)) * inverse_numel
        tl.store(kl_old_ptr + sample, m * old)
        plus = (
            tl.sum(tl.load(row_ptr + 3 * programs + column, mask=mask, other=0.0)) * inverse_numel
        )
        tl.store(error_plus_ptr + sample, plus)
        minus = (
            tl.sum(tl.load(row_ptr + 4 * programs + column, mask=mask, other=0.0)) * inverse_numel
        )
        tl.store(error_minus_ptr + sample, minus)


def split(numel: int) -> tuple[int, int]:
    """Return (programs, tiles per program) of a sample: the fewest tiles that MAX_PROGRAMS allows,
    then programs."""
    tiles = -(-numel // BLOCK)
    share = max(1, -(-tiles // MAX_PROGRAMS))
    return -(-tiles // share), share


def vec(*tensors: Tensor | None) -> int:
    """Return VEC (see the module's docstring) for these tensors."""
    return 8 if all(tensor.element_size() == 2 for tensor in tensors if tensor is not None) else 4


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Make the tensors contiguous, as the kernels need; a copy costs one more read and write."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def reduce(partial: Tensor, coefs: Tensor, step: Tensor, numel: int) -> list[Tensor]:
    """Launch the second reduction stage: partial sums `[B, outputs, programs]` to `outputs` results
    `[B]`."""
    batch, outputs, count = partial.shape
    results = [
        torch.empty(batch, dtype=torch.float32, device=partial.device) for _ in range(outputs)
    ]
    _reduce_kernel[(batch,)](
        partial,
        coefs,
        step,
        *results,
        *[None] * (5 - outputs),
        1 / max(numel, 1),
        len(coefs),
        count,
        OUTPUTS=outputs,
        STEP_STRIDE=step.ndim,
        PARTIALS=MAX_PROGRAMS,
        **LAUNCH_OPTIONS,
    )
    return results


def power_of_2(n: int) -> int:
    """Smallest power of two >= `n` >= 1."""
    return 1 << (n - 1).bit_length()


def contiguous_rows(x: Tensor) -> Tensor:
    """Return a tensor whose values of a row lie next to each other, x itself if they do."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows_of_programs(
    rows: int, batch: int, sums: bool = False, warps: int = WIDE_OPTIONS["num_warps"]
) -> tuple[int, int]:
    """Return (programs, rows per program) of a sample for the kernels that go over rows; the last
    program may be short.

    With partial `sums`, the batch has at most 3/4 MAX_PROGRAMS programs, or one per sample: a GPU
    of 132 multiprocessors, each with registers for three of up to 8 `warps`, two of 16 or one of
    32, runs them at once. Otherwise a program has one row, or a few if there are many times more
    rows than a GPU holds programs, which reads scale and shift less often. The kernels are compiled
    for the rows per program: a loop of unknown length takes them a quarter more registers.
    """
    limit = 8 * MAX_PROGRAMS
    if sums:
        at_once = min(3, 32 // warps) * MAX_PROGRAMS // 4
        limit = max(at_once // max(batch, 1), 1)
    per_program = max(-(-rows // limit), 1)
    return -(-rows // per_program), per_program
