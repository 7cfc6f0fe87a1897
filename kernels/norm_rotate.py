"""RMSNorm of every head, rotary embedding of the video tokens and the join of both streams on the GPU.

video `[B, N, H, D]`, text `[B, L, H, D]` and the incoming gradient `[B, N + L, H, D]` with any strides but the last;
the result is contiguous. A program holds all heads of a token, `[H, D]`, in registers; a thread owns both channels of a
pair, so that a rotation stays within it. Each element is read and written once. `sage_fast.ops.norm_rotate` is the
specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sage_fast.kernels.common import LAUNCH_OPTIONS, NORM_BACKWARD_OPTIONS, rows_of_programs
from torch import Tensor


@triton.jit
def _heads(ptr, at, head_stride, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """`[HEADS, WIDTH]` in fp32, 0 where masked."""
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (column < width)
    return tl.load(ptr + at + head * head_stride + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_heads(ptr, at, values, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (column < width)
    tl.store(ptr + at + head * width + column, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight(ptr, width, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    return tl.load(ptr + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _rstd(x, width, eps):
    return tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]


@triton.jit
def _rotated(y, rotary_ptr, token, width, sign, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """(a, b) -> (a cos - b sin, a sin + b cos); turned back where `sign` is -1."""
    pair = tl.arange(0, WIDTH // 2)
    at = rotary_ptr + token * width + 2 * pair
    mask = 2 * pair < width
    cos = tl.load(at, mask=mask, other=1.0)[None, :]
    sin = sign * tl.load(at + 1, mask=mask, other=0.0)[None, :]
    a, b = tl.split(tl.reshape(y, [HEADS, WIDTH // 2, 2]))
    return tl.reshape(tl.join(a * cos - b * sin, tl.fma(b, cos, a * sin)), [HEADS, WIDTH])


@triton.jit
def _norm_rotate_fwd_kernel(
    video_ptr,
    text_ptr,
    video_weight_ptr,
    text_weight_ptr,
    rotary_ptr,
    out_ptr,
    video_tokens,
    tokens,
    heads,
    width,
    video_batch_stride,
    video_token_stride,
    video_head_stride,
    text_batch_stride,
    text_token_stride,
    text_head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid `(tokens, B)`: only the first dimension may pass 65,535, and 720p has 75,600 tokens."""
    token = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    out_at = (sample * tokens + token) * heads * width
    if token < video_tokens:
        at = sample * video_batch_stride + token * video_token_stride
        x = _heads(video_ptr, at, video_head_stride, heads, width, HEADS, WIDTH)
        y = x * _rstd(x, width, eps) * _weight(video_weight_ptr, width, WIDTH)[None, :]
        y = _rotated(y, rotary_ptr, token, width, 1.0, HEADS, WIDTH)
        _store_heads(out_ptr, out_at, y, heads, width, HEADS, WIDTH)
    else:
        at = sample * text_batch_stride + (token - video_tokens) * text_token_stride
        x = _heads(text_ptr, at, text_head_stride, heads, width, HEADS, WIDTH)
        y = x * _rstd(x, width, eps) * _weight(text_weight_ptr, width, WIDTH)[None, :]
        _store_heads(out_ptr, out_at, y, heads, width, HEADS, WIDTH)


@triton.jit
def _norm_rotate_bwd_kernel(
    grad_ptr,
    video_ptr,
    text_ptr,
    video_weight_ptr,
    text_weight_ptr,
    rotary_ptr,
    d_video_ptr,
    d_text_ptr,
    partial_ptr,
    video_tokens,
    tokens,
    heads,
    width,
    grad_batch_stride,
    grad_token_stride,
    grad_head_stride,
    video_batch_stride,
    video_token_stride,
    video_head_stride,
    text_batch_stride,
    text_token_stride,
    text_head_stride,
    eps,
    WEIGHTS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gradients of this program's TOKENS tokens; with WEIGHTS also its sums for both, partial `[B, programs, 2, D]`."""
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    of_video = tl.zeros([WIDTH], tl.float32)
    of_text = tl.zeros([WIDTH], tl.float32)
    for turn in range(TOKENS):
        token = program * TOKENS + turn
        if token < tokens:
            at = sample * grad_batch_stride + token * grad_token_stride
            grad = _heads(grad_ptr, at, grad_head_stride, heads, width, HEADS, WIDTH)
            if token < video_tokens:
                grad = _rotated(grad, rotary_ptr, token, width, -1.0, HEADS, WIDTH)
                at = sample * video_batch_stride + token * video_token_stride
                x = _heads(video_ptr, at, video_head_stride, heads, width, HEADS, WIDTH)
                rstd = _rstd(x, width, eps)
                normed = x * rstd
                if WEIGHTS:
                    of_video += tl.sum(grad * normed, axis=0)
                inner = grad * _weight(video_weight_ptr, width, WIDTH)[None, :]
                slope = tl.sum(inner * normed, axis=1)[:, None] / width
                out_at = (sample * video_tokens + token) * heads * width
                _store_heads(d_video_ptr, out_at, rstd * (inner - normed * slope), heads, width, HEADS, WIDTH)
            else:
                own = token - video_tokens
                at = sample * text_batch_stride + own * text_token_stride
                x = _heads(text_ptr, at, text_head_stride, heads, width, HEADS, WIDTH)
                rstd = _rstd(x, width, eps)
                normed = x * rstd
                if WEIGHTS:
                    of_text += tl.sum(grad * normed, axis=0)
                inner = grad * _weight(text_weight_ptr, width, WIDTH)[None, :]
                slope = tl.sum(inner * normed, axis=1)[:, None] / width
                out_at = (sample * (tokens - video_tokens) + own) * heads * width
                _store_heads(d_text_ptr, out_at, rstd * (inner - normed * slope), heads, width, HEADS, WIDTH)
    if WEIGHTS:
        out = partial_ptr + (sample * tl.num_programs(1) + program) * 2 * width + column
        tl.store(out, of_video, mask=column < width)
        tl.store(out + width, of_text, mask=column < width)


def _neighbours(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def norm_rotate(
    video: Tensor, text: Tensor, video_weight: Tensor, text_weight: Tensor, rotary: Tensor, eps: float
) -> Tensor:
    """Launch the forward; arguments as `sage_fast::norm_rotate`."""
    video, text = _neighbours(video), _neighbours(text)
    batch, video_tokens, heads, width = video.shape
    tokens = video_tokens + text.shape[1]
    out = video.new_empty(batch, tokens, heads, width)
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(video):
        _norm_rotate_fwd_kernel[(tokens, batch)](
            video,
            text,
            video_weight.contiguous(),
            text_weight.contiguous(),
            rotary.contiguous(),
            out,
            video_tokens,
            tokens,
            heads,
            width,
            *video.stride()[:3],
            *text.stride()[:3],
            eps,
            HEADS=triton.next_power_of_2(heads),
            WIDTH=triton.next_power_of_2(width),
            **LAUNCH_OPTIONS,
        )
    return out


def norm_rotate_backward(
    grad: Tensor,
    video: Tensor,
    text: Tensor,
    video_weight: Tensor,
    text_weight: Tensor,
    rotary: Tensor,
    eps: float,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward; arguments as `sage_fast::norm_rotate_backward`."""
    grad, video, text = _neighbours(grad), _neighbours(video), _neighbours(text)
    batch, video_tokens, heads, width = video.shape
    tokens = video_tokens + text.shape[1]
    d_video, d_text = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (video, text))
    programs, each = rows_of_programs(tokens, batch, sums=weights)
    partial = torch.empty(batch if weights else 0, programs, 2, width, dtype=torch.float32, device=video.device)
    if grad.numel() > 0:
        with torch.cuda.device_of(video):
            _norm_rotate_bwd_kernel[(batch, programs)](
                grad,
                video,
                text,
                video_weight.contiguous(),
                text_weight.contiguous(),
                rotary.contiguous(),
                d_video,
                d_text,
                partial,
                video_tokens,
                tokens,
                heads,
                width,
                *grad.stride()[:3],
                *video.stride()[:3],
                *text.stride()[:3],
                eps,
                WEIGHTS=weights,
                TOKENS=each,
                HEADS=triton.next_power_of_2(heads),
                WIDTH=triton.next_power_of_2(width),
                **NORM_BACKWARD_OPTIONS,
            )
    else:
        partial.zero_()
    in_weights = partial.sum((0, 1)) if weights else partial.new_zeros(2, 0)
    return d_video, d_text, in_weights[0].clone(), in_weights[1].clone()
