"""RMSNorm of queries and keys, and rotary embedding of the video tokens, on the GPU.

joint `[B, N + L, 3, H, D]` and the results are contiguous. The incoming gradients `[B, N + L, H,
D]` may have any strides but the last. A program holds all heads of a token, `[H, D]`, in registers:
first queries, then keys. A thread owns both channels of a pair, so a rotation stays within it. Each
element is read and written once. The forward does not touch the values; the backward copies their
gradient into d_joint. `sage_fast.ops.norm_rotate` is the specification.

ALL_HEADS: all heads of a token are normalised together, with weights `[H, D]`. A sum over a token
then crosses the warps of its program, so wide tokens get more warps, not more values a thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from sage_fast.kernels.common import LAUNCH_OPTIONS, WIDE_OPTIONS, power_of_2, rows_of_programs
from torch import Tensor


@triton.jit
def _heads(ptr, start, head_stride, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Load all heads of a token, `[HEADS, WIDTH]` in fp32, 0 where masked."""
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (column < width)
    return tl.load(ptr + start + head * head_stride + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_heads(ptr, start, values, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (column < width)
    tl.store(ptr + start + head * width + column, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight(ptr, heads, width, ALL_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Load the weight of a norm, `[HEADS, WIDTH]`, or `[WIDTH]` if every head has the same."""
    if ALL_HEADS:
        weight = _heads(ptr, 0, width, heads, width, HEADS, WIDTH)
    else:
        column = tl.arange(0, WIDTH)
        weight = tl.load(ptr + column, mask=column < width, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _weighted(x, weight, ALL_HEADS: tl.constexpr):
    if not ALL_HEADS:
        weight = weight[None, :]
    return x * weight


@triton.jit
def _mean(x, heads, width, ALL_HEADS: tl.constexpr):
    """Average over what is normalised together: a scalar, or `[HEADS, 1]`."""
    return tl.sum(x) / (heads * width) if ALL_HEADS else tl.sum(x, axis=1)[:, None] / width


@triton.jit
def _rstd(x, heads, width, eps, ALL_HEADS: tl.constexpr):
    if ALL_HEADS:
        rstd = tl.rsqrt(_mean(x * x, heads, width, ALL_HEADS) + eps)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    return rstd


@triton.jit
def _over_heads(x, ALL_HEADS: tl.constexpr):
    """What one token adds to the gradient of a weight: `[HEADS, WIDTH]`, or its sum `[WIDTH]`."""
    if not ALL_HEADS:
        x = tl.sum(x, axis=0)
    return x


@triton.jit
def _rotated(y, rotary_ptr, token, width, sign, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate pairs: (a, b) -> (a cos - b sin, a sin + b cos); `sign` -1 rotates back."""
    column = tl.arange(0, WIDTH)
    # pairs: 16 bytes a thread
    table = tl.load(rotary_ptr + token * width + column, mask=column < width, other=0.0)
    cos, sin = tl.split(tl.reshape(table, [WIDTH // 2, 2]))
    cos, sin = cos[None, :], sign * sin[None, :]
    a, b = tl.split(tl.reshape(y, [HEADS, WIDTH // 2, 2]))
    return tl.reshape(tl.join(a * cos - b * sin, tl.fma(b, cos, a * sin)), [HEADS, WIDTH])


@triton.jit
def _norm_rotate_fwd_kernel(
    joint_ptr,
    video_query_ptr,
    text_query_ptr,
    video_key_ptr,
    text_key_ptr,
    rotary_ptr,
    query_ptr,
    key_ptr,
    video_tokens,
    tokens,
    heads,
    width,
    eps,
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Normalise and rotate the queries and keys of one token.

    Grid `(tokens, B)`: only the first dimension may exceed 65,535, and 720p has 75,600 tokens.
    """
    token = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    index = sample * tokens + token
    for part in tl.static_range(2):
        out_ptr = query_ptr if part == 0 else key_ptr
        start = (3 * index + part) * heads * width
        x = _heads(joint_ptr, start, width, heads, width, HEADS, WIDTH)
        normed = x * _rstd(x, heads, width, eps, ALL_HEADS)
        if token < video_tokens:
            weight_ptr = video_query_ptr if part == 0 else video_key_ptr
            weight = _weight(weight_ptr, heads, width, ALL_HEADS, HEADS, WIDTH)
            y = _weighted(normed, weight, ALL_HEADS)
            y = _rotated(y, rotary_ptr, token, width, 1.0, HEADS, WIDTH)
            _store_heads(out_ptr, index * heads * width, y, heads, width, HEADS, WIDTH)
        else:
            weight_ptr = text_query_ptr if part == 0 else text_key_ptr
            weight = _weight(weight_ptr, heads, width, ALL_HEADS, HEADS, WIDTH)
            out_start = index * heads * width
            scaled = _weighted(normed, weight, ALL_HEADS)
            _store_heads(out_ptr, out_start, scaled, heads, width, HEADS, WIDTH)


@triton.jit
def _norm_rotate_bwd_kernel(
    grad_ptr,
    joint_ptr,
    video_weight_ptr,
    text_weight_ptr,
    rotary_ptr,
    d_joint_ptr,
    partial_ptr,
    video_tokens,
    tokens,
    heads,
    width,
    grad_batch_stride,
    grad_token_stride,
    grad_head_stride,
    eps,
    PART: tl.constexpr,
    WEIGHTS: tl.constexpr,
    TEXT: tl.constexpr,
    TOKENS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute the gradient of the queries (PART 0) or keys (PART 1) of TOKENS tokens. Grid `(B,
    programs)`.

    One part per launch needs fewer registers. With WEIGHTS, also store this program's sums for both
    weights: partial `[B, programs, 2, D]`, or `[B, programs, 2, H, D]` with ALL_HEADS. Without
    TEXT all tokens are video, and no registers hold a sum for the text's weight: with it, 40 heads
    of 128 together spill on sm_100.
    """
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    if ALL_HEADS:
        video_sum = tl.zeros([HEADS, WIDTH], tl.float32)
        text_sum = tl.zeros([HEADS, WIDTH], tl.float32)
    else:
        video_sum = tl.zeros([WIDTH], tl.float32)
        text_sum = tl.zeros([WIDTH], tl.float32)
    row = heads * width
    for turn in range(TOKENS):
        token = program * TOKENS + turn
        if token < tokens:
            first = 3 * (sample * tokens + token) * row
            start = sample * grad_batch_stride + token * grad_token_stride
            grad = _heads(grad_ptr, start, grad_head_stride, heads, width, HEADS, WIDTH)
            x = _heads(joint_ptr, first + PART * row, width, heads, width, HEADS, WIDTH)
            rstd = _rstd(x, heads, width, eps, ALL_HEADS)
            normed = x * rstd
            if token < video_tokens:
                grad = _rotated(grad, rotary_ptr, token, width, -1.0, HEADS, WIDTH)
                if WEIGHTS:
                    video_sum += _over_heads(grad * normed, ALL_HEADS)
                weight = _weight(video_weight_ptr, heads, width, ALL_HEADS, HEADS, WIDTH)
                inner = _weighted(grad, weight, ALL_HEADS)
                slope = _mean(inner * normed, heads, width, ALL_HEADS)
                dx = rstd * (inner - normed * slope)
                _store_heads(d_joint_ptr, first + PART * row, dx, heads, width, HEADS, WIDTH)
            else:
                if WEIGHTS and TEXT:
                    text_sum += _over_heads(grad * normed, ALL_HEADS)
                weight = _weight(text_weight_ptr, heads, width, ALL_HEADS, HEADS, WIDTH)
                inner = _weighted(grad, weight, ALL_HEADS)
                slope = _mean(inner * normed, heads, width, ALL_HEADS)
                dx = rstd * (inner - normed * slope)
                _store_heads(d_joint_ptr, first + PART * row, dx, heads, width, HEADS, WIDTH)
    if WEIGHTS:
        index = sample * tl.num_programs(1) + program
        if ALL_HEADS:
            _store_heads(partial_ptr, 2 * index * row, video_sum, heads, width, HEADS, WIDTH)
            _store_heads(partial_ptr, (2 * index + 1) * row, text_sum, heads, width, HEADS, WIDTH)
        else:
            out = partial_ptr + index * 2 * width + column
            tl.store(out, video_sum, mask=column < width)
            tl.store(out + width, text_sum, mask=column < width)


def _neighbours(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def flags_and_options(
    heads: int, width: int, *, all_heads: bool, backward: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the kernels' flags for heads of this size, and Triton's launch options.

    With all heads together a thread holds 16 values of a token in the forward and 8 in the
    backward, which has the gradient, the weight and its sums beside: as many as with the options
    of 16 heads of 128. A program has 32 warps at most.
    """
    flags = {"ALL_HEADS": all_heads, "HEADS": power_of_2(heads), "WIDTH": power_of_2(width)}
    options = dict(WIDE_OPTIONS if backward else LAUNCH_OPTIONS)
    if all_heads:
        threads = flags["HEADS"] * flags["WIDTH"] // (8 if backward else 16)
        options["num_warps"] = min(max(threads // 32, options["num_warps"]), 32)
    return flags, options


def norm_rotate(
    joint: Tensor,
    video_query: Tensor,
    text_query: Tensor,
    video_key: Tensor,
    text_key: Tensor,
    rotary: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Launch the forward; arguments as `sage_fast::norm_rotate`."""
    joint = joint.contiguous()
    batch, tokens, _, heads, width = joint.shape
    all_heads = video_query.ndim == 2
    flags, options = flags_and_options(heads, width, all_heads=all_heads, backward=False)
    query, key = (joint.new_empty(batch, tokens, heads, width) for _ in range(2))
    if joint.numel() == 0:
        return query, key
    with torch.cuda.device_of(joint):
        _norm_rotate_fwd_kernel[(tokens, batch)](
            joint,
            *(
                weight.contiguous()
                for weight in (video_query, text_query, video_key, text_key, rotary)
            ),
            query,
            key,
            len(rotary),
            tokens,
            heads,
            width,
            eps,
            **flags,
            **options,
        )
    return query, key


def norm_rotate_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    joint: Tensor,
    video_query: Tensor,
    text_query: Tensor,
    video_key: Tensor,
    text_key: Tensor,
    rotary: Tensor,
    eps: float,
    weights: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the backward; arguments as `sage_fast::norm_rotate_backward`."""
    joint, rotary = joint.contiguous(), rotary.contiguous()
    parts = (grad_query, video_query, text_query), (grad_key, video_key, text_key)
    batch, tokens, _, heads, width = joint.shape
    all_heads = video_query.ndim == 2
    flags, options = flags_and_options(heads, width, all_heads=all_heads, backward=True)
    d_joint = torch.empty_like(joint)
    d_joint[:, :, 2] = grad_value
    programs, per_program = rows_of_programs(
        tokens, batch, sums=weights, warps=options["num_warps"]
    )
    size = (2, batch if weights else 0, programs, 2, *video_query.shape)
    partial = torch.empty(size, dtype=torch.float32, device=joint.device)
    if joint.numel() == 0:
        partial.zero_()
    for part, (grad, *part_weights) in enumerate(parts if joint.numel() else ()):
        grad = _neighbours(grad)
        with torch.cuda.device_of(joint):
            _norm_rotate_bwd_kernel[(batch, programs)](
                grad,
                joint,
                *(weight.contiguous() for weight in part_weights),
                rotary,
                d_joint,
                partial[part],
                len(rotary),
                tokens,
                heads,
                width,
                *grad.stride()[:3],
                eps,
                PART=part,
                WEIGHTS=weights,
                TEXT=tokens > len(rotary),
                TOKENS=per_program,
                **flags,
                **options,
            )
    if not weights:
        return d_joint, partial.new_zeros(0, *video_query.shape)
    return d_joint, partial.sum((1, 2)).flatten(0, 1)
