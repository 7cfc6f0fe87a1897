"""RMSNorm of every head of queries and keys, and rotary embedding of the video tokens, on the GPU.

joint `[B, N + L, 3, H, D]` and the results are contiguous. The incoming gradients `[B, N + L, H,
D]` may have any strides but the last. A program holds all heads of a token, `[H, D]`, in registers:
first queries, then keys. A thread owns both channels of a pair, so a rotation stays within it. Each
element is read and written once. The forward does not touch the values; the backward copies their
gradient into d_joint. `sage_fast.ops.norm_rotate` is the specification.
"""

from __future__ import annotations

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
def _weight(ptr, width, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    return tl.load(ptr + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _rstd(x, width, eps):
    return tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]


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
        normed = x * _rstd(x, width, eps)
        if token < video_tokens:
            weight = _weight(video_query_ptr if part == 0 else video_key_ptr, width, WIDTH)
            y = _rotated(normed * weight[None, :], rotary_ptr, token, width, 1.0, HEADS, WIDTH)
            _store_heads(out_ptr, index * heads * width, y, heads, width, HEADS, WIDTH)
        else:
            weight = _weight(text_query_ptr if part == 0 else text_key_ptr, width, WIDTH)
            _store_heads(
                out_ptr, index * heads * width, normed * weight[None, :], heads, width, HEADS, WIDTH
            )


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
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute the gradient of the queries (PART 0) or keys (PART 1) of TOKENS tokens. Grid `(B,
    programs)`.

    One part per launch needs fewer registers. With WEIGHTS, also store this program's sums for both
    weights: partial `[B, programs, 2, D]`.
    """
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
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
            rstd = _rstd(x, width, eps)
            normed = x * rstd
            if token < video_tokens:
                grad = _rotated(grad, rotary_ptr, token, width, -1.0, HEADS, WIDTH)
                if WEIGHTS:
                    video_sum += tl.sum(grad * normed, axis=0)
                inner = grad * _weight(video_weight_ptr, width, WIDTH)[None, :]
                slope = tl.sum(inner * normed, axis=1)[:, None] / width
                dx = rstd * (inner - normed * slope)
                _store_heads(d_joint_ptr, first + PART * row, dx, heads, width, HEADS, WIDTH)
            else:
                if WEIGHTS:
                    text_sum += tl.sum(grad * normed, axis=0)
                inner = grad * _weight(text_weight_ptr, width, WIDTH)[None, :]
                slope = tl.sum(inner * normed, axis=1)[:, None] / width
                dx = rstd * (inner - normed * slope)
                _store_heads(d_joint_ptr, first + PART * row, dx, heads, width, HEADS, WIDTH)
    if WEIGHTS:
        out = partial_ptr + (sample * tl.num_programs(1) + program) * 2 * width + column
        tl.store(out, video_sum, mask=column < width)
        tl.store(out + width, text_sum, mask=column < width)


def _neighbours(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


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
            HEADS=power_of_2(heads),
            WIDTH=power_of_2(width),
            **LAUNCH_OPTIONS,
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
    d_joint = torch.empty_like(joint)
    d_joint[:, :, 2] = grad_value
    programs, per_program = rows_of_programs(tokens, batch, sums=weights)
    size = (2, batch if weights else 0, programs, 2, width)
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
                TOKENS=per_program,
                HEADS=power_of_2(heads),
                WIDTH=power_of_2(width),
                **WIDE_OPTIONS,
            )
    return d_joint, partial.sum((1, 2)).flatten(0, 1) if weights else partial.new_zeros(0, width)
