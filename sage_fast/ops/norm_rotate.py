"""RMSNorm of every attention head, rotary embedding of the video tokens, and both streams joined, in one pass:

    y = x / sqrt(mean(x^2) + eps) weight        text tokens: y; after the video tokens:
    (a, b) -> (a cos - b sin, a sin + b cos)    pairs of neighbouring channels of y

In place of two norms, a rotation and a concatenation. Nothing but the inputs is kept for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import LIBRARY, compute_dtype

LIBRARY.define(
    "norm_rotate(Tensor video, Tensor text, Tensor video_weight, Tensor text_weight, Tensor rotary, float eps)"
    " -> Tensor"
)
LIBRARY.define(
    "norm_rotate_backward(Tensor grad, Tensor video, Tensor text, Tensor video_weight, Tensor text_weight,"
    " Tensor rotary, float eps, bool weights) -> (Tensor, Tensor, Tensor, Tensor)"
)


def norm_rotate(
    video: Tensor, text: Tensor, video_weight: Tensor, text_weight: Tensor, rotary: Tensor, eps: float = 1e-6
) -> Tensor:
    """Queries or keys of joint attention.

    Args:
        video: `[B, N, H, D]`, float32, bfloat16 or float16; D even.
        text: `[B, L, H, D]`, the type of video.
        video_weight, text_weight: `[D]`, float32 or the type of video.
        rotary: float32 `[N, D / 2, 2]`, (cos, sin) of each pair of channels.
        eps: added to the mean square.

    Returns:
        `[B, N + L, H, D]` in the type of video, computed in float32. Differentiable in all but rotary.

    Raises:
        ValueError: a shape, type or device that does not fit.
    """
    if video.ndim != 4 or video.shape[3] % 2:
        raise ValueError(f"video: expected [B, N, H, D] with an even D, got {list(video.shape)}")
    batch, tokens, heads, width = video.shape
    if text.ndim != 4 or (text.shape[0], *text.shape[2:]) != (batch, heads, width) or text.dtype != video.dtype:
        expected = f"{video.dtype} [{batch}, L, {heads}, {width}]"
        raise ValueError(f"text: expected {expected}, got {text.dtype} {list(text.shape)}")
    for name, weight in (("video_weight", video_weight), ("text_weight", text_weight)):
        if weight.shape != (width,):
            raise ValueError(f"{name}: expected [{width}], got {list(weight.shape)}")
    if rotary.shape != (tokens, width // 2, 2) or rotary.dtype != torch.float32:
        expected = f"float32 [{tokens}, {width // 2}, 2]"
        raise ValueError(f"rotary: expected {expected}, got {rotary.dtype} {list(rotary.shape)}")
    others = {"text": text, "video_weight": video_weight, "text_weight": text_weight, "rotary": rotary}
    for name, tensor in others.items():
        if tensor.device != video.device:
            raise ValueError(f"{name}: is on {tensor.device}, video is on {video.device}")
    return torch.ops.sage_fast.norm_rotate(video, text, video_weight, text_weight, rotary, eps)


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = (part[:, None] for part in rotary.to(x.dtype).unbind(-1))  # [N, 1, D / 2]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def _rstd(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def norm_rotate_reference(
    video: Tensor, text: Tensor, video_weight: Tensor, text_weight: Tensor, rotary: Tensor, eps: float
) -> Tensor:
    """The specification, in plain PyTorch; also differentiable by autograd itself."""
    stored, dtype = video.dtype, compute_dtype(video)
    video, text = video.to(dtype), text.to(dtype)
    video = _rotated(video * _rstd(video, eps) * video_weight.to(dtype), rotary)
    return torch.cat([video, text * _rstd(text, eps) * text_weight.to(dtype)], dim=1).to(stored)


def norm_rotate_backward_reference(
    grad: Tensor,
    video: Tensor,
    text: Tensor,
    video_weight: Tensor,
    text_weight: Tensor,
    rotary: Tensor,
    eps: float,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in video and text, and float32 `[D]` in their weights; those are empty unless `weights`."""
    dtype = compute_dtype(video)
    grad = grad.to(dtype)
    inverse = rotary * torch.tensor([1, -1], dtype=rotary.dtype, device=rotary.device)
    of_video, of_text = _rotated(grad[:, : video.shape[1]], inverse), grad[:, video.shape[1] :]
    inputs, in_weights = [], []
    for x, g, weight in ((video.to(dtype), of_video, video_weight), (text.to(dtype), of_text, text_weight)):
        rstd = _rstd(x, eps)
        normed, inner = x * rstd, g * weight.to(dtype)
        inputs.append((rstd * (inner - normed * (inner * normed).mean(-1, keepdim=True))).to(video.dtype).contiguous())
        in_weights.append((g * normed).sum((0, 1, 2))[: len(weight) if weights else 0])
    return inputs[0], inputs[1], in_weights[0], in_weights[1]


LIBRARY.impl("norm_rotate", norm_rotate_reference, "CompositeExplicitAutograd")
LIBRARY.impl("norm_rotate_backward", norm_rotate_backward_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("sage_fast::norm_rotate", lib=LIBRARY)
def _fake(video, text, video_weight, text_weight, rotary, eps):  # type: ignore[no-untyped-def]
    return video.new_empty(video.shape[0], video.shape[1] + text.shape[1], *video.shape[2:])


@torch.library.register_fake("sage_fast::norm_rotate_backward", lib=LIBRARY)
def _fake_backward(  # type: ignore[no-untyped-def]
    grad, video, text, video_weight, text_weight, rotary, eps, weights
):
    d_video, d_text = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (video, text))
    width = video.shape[3] if weights else 0
    return d_video, d_text, *(video.new_empty(width, dtype=compute_dtype(video)) for _ in range(2))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # asked for once: with checkpointing they are recomputed for it
    weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    d_video, d_text, *in_weights = torch.ops.sage_fast.norm_rotate_backward(grad, *saved, ctx.eps, weights)
    if not weights:
        return d_video, d_text, None, None, None, None
    return d_video, d_text, in_weights[0].to(saved[2].dtype), in_weights[1].to(saved[3].dtype), None, None


torch.library.register_autograd("sage_fast::norm_rotate", _backward, setup_context=_setup_context, lib=LIBRARY)
