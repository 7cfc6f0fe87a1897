"""RMSNorm of every head of queries and keys, and rotary embedding of the video tokens, in one pass:

    y = x / sqrt(mean(x^2) + eps) weight        text tokens: y; video tokens, which come first:
    (a, b) -> (a cos - b sin, a sin + b cos)    pairs of neighbouring channels of y

In place of four norms, two rotations and two concatenations. Queries, keys and values of both streams stand in one
tensor: the projection of the video tokens leaves rows for the text, so that attention reads the values where the
projection wrote them, and the gradient of all three is one tensor, which the projection's backward reads whole.
Nothing but the inputs is kept for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import LIBRARY, compute_dtype
from sage_fast.ops._dispatch import register

LIBRARY.define(
    "norm_rotate(Tensor joint, Tensor video_query, Tensor text_query, Tensor video_key, Tensor text_key,"
    " Tensor rotary, float eps) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "norm_rotate_backward(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor joint, Tensor video_query,"
    " Tensor text_query, Tensor video_key, Tensor text_key, Tensor rotary, float eps, bool weights) -> (Tensor, Tensor)"
)


def norm_rotate(
    joint: Tensor,
    text: Tensor,
    video_query: Tensor,
    text_query: Tensor,
    video_key: Tensor,
    text_key: Tensor,
    rotary: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of joint attention.

    Args:
        joint: `[B, N + L, 3, H, D]` queries, keys and values of N video tokens, float32, bfloat16 or float16; D even.
            Its last L rows of each sample are overwritten with `text`.
        text: `[B, L, 3, H, D]`, the type of joint.
        video_query, text_query, video_key, text_key: `[D]` weights of the norms, float32 or the type of joint.
        rotary: float32 `[N, D / 2, 2]`, (cos, sin) of each pair of channels.
        eps: added to the mean square.

    Returns:
        Queries, keys and values `[B, N + L, H, D]` in the type of joint, computed in float32; values are a view of
        joint. Differentiable in all but rotary.

    Raises:
        ValueError: a shape, type or device that does not fit.
    """
    if joint.ndim != 5 or joint.shape[2] != 3 or joint.shape[4] % 2:
        raise ValueError(f"joint: expected [B, N + L, 3, H, D] with an even D, got {list(joint.shape)}")
    batch, tokens, _, heads, width = joint.shape
    shape = (batch, tokens - len(rotary), 3, heads, width)
    if text.shape != shape or text.dtype != joint.dtype:
        raise ValueError(f"text: expected {joint.dtype} {list(shape)}, got {text.dtype} {list(text.shape)}")
    weights = {"video_query": video_query, "text_query": text_query, "video_key": video_key, "text_key": text_key}
    for name, weight in weights.items():
        if weight.shape != (width,):
            raise ValueError(f"{name}: expected [{width}], got {list(weight.shape)}")
    if rotary.shape[1:] != (width // 2, 2) or rotary.dtype != torch.float32:
        raise ValueError(f"rotary: expected float32 [N, {width // 2}, 2], got {rotary.dtype} {list(rotary.shape)}")
    for name, tensor in {"text": text, **weights, "rotary": rotary}.items():
        if tensor.device != joint.device:
            raise ValueError(f"{name}: is on {tensor.device}, joint is on {joint.device}")
    if torch.compiler.is_compiling():  # Dynamo takes no write into an argument, and Inductor makes one pass of this
        return joined_reference(joint, text, video_query, text_query, video_key, text_key, rotary, eps)
    return _Joined.apply(joint, text, video_query, text_query, video_key, text_key, rotary, eps)


class _Joined(torch.autograd.Function):
    """A function and not an operator, since an operator may not return a part of its argument."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, text: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, ctx.eps = rest
        joint = joint.detach()  # autograd has no say in what is written here
        joint[:, joint.shape[1] - text.shape[1] :] = text
        ctx.save_for_backward(joint, *tensors)
        query, key = torch.ops.sage_fast.norm_rotate(joint, *rest)
        return query, key, joint[:, :, 2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: with checkpointing they are recomputed for it
        weights = any(ctx.needs_input_grad[2:6])
        d_joint, d_weights = torch.ops.sage_fast.norm_rotate_backward(*grads, *saved, ctx.eps, weights)
        of_text = d_joint[:, len(saved[-1]) :]
        d_text = of_text.clone()
        of_text.zero_()  # what the projection of the video tokens wrote there was not used
        in_weights = [row.to(w.dtype) for row, w in zip(d_weights, saved[1:5])] if weights else [None] * 4
        return d_joint, d_text, *in_weights, None, None


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = (part[:, None] for part in rotary.to(x.dtype).unbind(-1))  # [N, 1, D / 2]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def _rstd(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def norm_rotate_reference(
    joint: Tensor,
    video_query: Tensor,
    text_query: Tensor,
    video_key: Tensor,
    text_key: Tensor,
    rotary: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The specification, in plain PyTorch; also differentiable by autograd itself. Text stands in joint already."""
    dtype = compute_dtype(joint)

    def normed(x: Tensor, of_video: Tensor, of_text: Tensor) -> Tensor:
        x = x.to(dtype)
        x = x * _rstd(x, eps)
        video = _rotated(x[:, : len(rotary)] * of_video.to(dtype), rotary)
        return torch.cat([video, x[:, len(rotary) :] * of_text.to(dtype)], dim=1).to(joint.dtype)

    query, key, _ = joint.unbind(2)
    return normed(query, video_query, text_query), normed(key, video_key, text_key)


def joined_reference(joint: Tensor, text: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_rotate` in plain PyTorch: queries, keys and values; joint is left as it is."""
    joint = torch.cat([joint[:, : joint.shape[1] - text.shape[1]], text], dim=1)
    return *norm_rotate_reference(joint, *rest), joint[:, :, 2]


def norm_rotate_backward_reference(
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
    """Gradients in joint, and float32 `[4, D]` in the weights in their order; `[0, D]` unless `weights`."""
    dtype, tokens = compute_dtype(joint), len(rotary)
    inverse = rotary * torch.tensor([1, -1], dtype=rotary.dtype, device=rotary.device)
    query, key, _ = joint.unbind(2)
    parts, in_weights = [], []
    for x, grad, pair in (
        (query, grad_query, (video_query, text_query)),
        (key, grad_key, (video_key, text_key)),
    ):
        x, grad = x.to(dtype), grad.to(dtype)
        grad = torch.cat([_rotated(grad[:, :tokens], inverse), grad[:, tokens:]], dim=1)
        rstd = _rstd(x, eps)
        normed = x * rstd
        inner = torch.cat([g * w.to(dtype) for g, w in zip((grad[:, :tokens], grad[:, tokens:]), pair)], dim=1)
        parts.append((rstd * (inner - normed * (inner * normed).mean(-1, keepdim=True))).to(joint.dtype))
        in_weights += [(grad * normed)[:, rows].sum((0, 1, 2)) for rows in (slice(tokens), slice(tokens, None))]
    d_joint = torch.stack([*parts, grad_value.to(joint.dtype)], dim=2)
    return d_joint, torch.stack(in_weights)[: 4 if weights else 0]


register("norm_rotate", norm_rotate_reference)
register("norm_rotate_backward", norm_rotate_backward_reference)


@torch.library.register_fake("sage_fast::norm_rotate", lib=LIBRARY)
def _fake(joint, video_query, text_query, video_key, text_key, rotary, eps):  # type: ignore[no-untyped-def]
    batch, tokens, _, heads, width = joint.shape
    return joint.new_empty(batch, tokens, heads, width), joint.new_empty(batch, tokens, heads, width)


@torch.library.register_fake("sage_fast::norm_rotate_backward", lib=LIBRARY)
def _fake_backward(  # type: ignore[no-untyped-def]
    grad_query, grad_key, grad_value, joint, video_query, text_query, video_key, text_key, rotary, eps, weights
):
    d_joint = torch.empty_like(joint, memory_format=torch.contiguous_format)
    return d_joint, joint.new_empty(4 if weights else 0, joint.shape[4], dtype=compute_dtype(joint))
