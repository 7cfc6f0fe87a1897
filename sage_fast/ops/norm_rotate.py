"""RMSNorm of queries and keys, and rotary embedding of the video tokens, in one pass:

    y = x / sqrt(mean(x^2) + eps) weight        the result for text tokens; video tokens,
                                                which come first, rotate it:
    (a, b) -> (a cos - b sin, a sin + b cos)    for each pair of neighbouring channels of y

The shape of the weights says what is normalised together: with `[D]` each head by itself, with
`[H, D]` all heads of a token.

This replaces four norms, two rotations and two concatenations. One tensor holds the queries, keys
and values of both streams: the projection of the video tokens leaves rows for the text. So
attention reads the values where the projection wrote them, and all three gradients form one tensor,
which the projection's backward reads whole. Autograd saves only the inputs. Attention saves the
queries and keys too, unless it is called within `recomputed_in_backward`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import compute_dtype
from sage_fast.ops._derivatives import first_order
from sage_fast.ops._dispatch import register


def norm_rotate(
    joint: Tensor,
    text: Tensor | None,
    video_query: Tensor,
    text_query: Tensor | None,
    video_key: Tensor,
    text_key: Tensor | None,
    rotary: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of joint attention, or of a video's attention to itself.

    Args:
        joint: `[B, N + L, 3, H, D]` queries, keys and values of N video tokens, float32, bfloat16
            or float16; D even. `text` overwrites the last L rows of each sample.
        text: `[B, L, 3, H, D]`, in the dtype of joint; None if joint already holds it, or if there
            is none.
        video_query, text_query, video_key, text_key: weights of the norms, float32 or the dtype of
            joint: `[D]` to normalise each head by itself, or `[H, D]` to normalise all heads of a
            token together. All have one shape. Without text tokens (L = 0), those of the text may
            be None.
        rotary: float32 `[N, D / 2, 2]`, (cos, sin) of each pair of channels.
        eps: added to the mean square.

    Returns:
        Queries, keys and values `[B, N + L, H, D]` in the dtype of joint, computed in float32. The
        values are a view of joint. Differentiable in all but rotary.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    if joint.ndim != 5 or joint.shape[2] != 3 or joint.shape[4] % 2:
        raise ValueError(
            f"joint: expected [B, N + L, 3, H, D] with an even D, got {list(joint.shape)}"
        )
    batch, tokens, _, heads, width = joint.shape
    if (text_query is None) != (text_key is None):
        raise ValueError("text_query, text_key: expected both or neither")
    if text_query is None and (text is not None or len(rotary) != tokens):
        raise ValueError(
            f"text_query, text_key: expected weights for {tokens - len(rotary)} text tokens"
        )
    if len(rotary) > tokens:
        raise ValueError(f"rotary: expected at most {tokens} rows, got {len(rotary)}")
    shape = (batch, tokens - len(rotary), 3, heads, width)
    if text is not None and (text.shape != shape or text.dtype != joint.dtype):
        raise ValueError(
            f"text: expected {joint.dtype} {list(shape)}, got {text.dtype} {list(text.shape)}"
        )
    if video_query.shape not in ((width,), (heads, width)):
        raise ValueError(
            f"video_query: expected [{width}] or, for all heads together, [{heads}, {width}], got "
            f"{list(video_query.shape)}"
        )
    weights = {
        "video_query": video_query,
        "text_query": text_query,
        "video_key": video_key,
        "text_key": text_key,
    }
    for name, weight in weights.items():
        if weight is not None and weight.shape != video_query.shape:
            raise ValueError(
                f"{name}: expected {list(video_query.shape)}, got {list(weight.shape)}"
            )
    if rotary.shape[1:] != (width // 2, 2) or rotary.dtype != torch.float32:
        raise ValueError(
            f"rotary: expected float32 [N, {width // 2}, 2], got {rotary.dtype} "
            f"{list(rotary.shape)}"
        )
    for name, tensor in {"text": text, **weights, "rotary": rotary}.items():
        if tensor is not None and tensor.device != joint.device:
            raise ValueError(f"{name}: is on {tensor.device}, joint is on {joint.device}")
    return _JointNormRotate.apply(
        joint, text, video_query, text_query, video_key, text_key, rotary, eps
    )


class _JointNormRotate(torch.autograd.Function):
    """`norm_rotate` as an autograd function: an operator may not return a view of its argument."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, text: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, ctx.eps = rest
        ctx.unpacked = None
        ctx.writes_text = text is not None
        joint = joint.detach()  # hide the write below from autograd
        if text is not None:
            joint[:, joint.shape[1] - text.shape[1] :] = text
        ctx.save_for_backward(joint, *tensors)
        query, key = torch.ops.sage_fast.norm_rotate(*_operands(joint, *tensors), ctx.eps)
        return query, key, joint[:, :, 2]

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = _inputs_of(ctx)
        ctx.unpacked = None
        weights = any(ctx.needs_input_grad[2:6])
        d_joint, d_weights = torch.ops.sage_fast.norm_rotate_backward(
            *grads, *saved, ctx.eps, weights
        )
        d_text = None
        if ctx.writes_text:
            text_rows = d_joint[:, len(saved[-1]) :]
            d_text = text_rows.clone()
            text_rows.zero_()  # the text replaced what the video projection wrote there
        weight_grads: list[Tensor | None] = [None] * 4
        for i, row in enumerate(d_weights):
            if ctx.needs_input_grad[2 + i]:
                weight_grads[i] = row.to(saved[1 + i].dtype)
        return d_joint, d_text, *weight_grads, None, None


def _operands(
    joint: Tensor,
    video_query: Tensor,
    text_query: Tensor | None,
    video_key: Tensor,
    text_key: Tensor | None,
    rotary: Tensor,
) -> tuple[Tensor, ...]:
    """Return what the operator takes: without text tokens it reads no weight of theirs, so that the
    video's stand there."""
    if text_query is None:
        text_query = video_query
    if text_key is None:
        text_key = video_key
    return joint, video_query, text_query, video_key, text_key, rotary


def _inputs_of(node: Any) -> tuple[Tensor, ...]:
    """Return the operands that a node of `_JointNormRotate` saved, for each of its readers in a
    backward.

    It is read once: within a checkpoint that starts a recomputation, and a second read is an error.
    """
    if node.unpacked is None:
        node.unpacked = _operands(*node.saved_tensors)
    unpacked: tuple[Tensor, ...] = node.unpacked
    return unpacked


def recomputed_in_backward(query: Tensor, key: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autograd saves neither queries nor keys: the backward computes both
    again, to the bit.

    It is for a call of attention alone, since it hides what it saves from hooks around it: those of
    a checkpoint would no longer free it (`is_checkpointed` of models/checkpointing.py).

    Args:
        query, key: as one call of `norm_rotate` returned them.
    """
    if query.grad_fn is None:
        return contextlib.nullcontext()
    assert query.grad_fn is key.grad_fn
    recomputed = _Recomputed(query, key)
    return torch.autograd.graph.saved_tensors_hooks(recomputed.pack, recomputed.unpack)


@dataclasses.dataclass(frozen=True)
class _View:
    """What autograd saves for a view of the queries (index 0) or keys (1)."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Recomputed:
    """The queries and keys of one call of `norm_rotate`.

    It reads the inputs from the call's node of the graph, as the node's own backward does: they are
    kept once, and weights that ZeRO-3 frees after the forward are gathered for both.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self._node: Any = query.grad_fn
        # An address, not the tensor: a hook lives as long as what it packed.
        self._storages = [_address(query), _address(key)]
        self._unread: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        address = _address(tensor)
        if address not in self._storages:
            return tensor
        index = self._storages.index(address)
        return _View(index, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        whole = self._unread.pop(saved.index, None)
        if whole is None:
            whole = self._recompute(saved.index)
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    @torch.no_grad()
    def _recompute(self, index: int) -> Tensor:
        """Return the queries or keys; the others wait for whoever reads them next."""
        pair = torch.ops.sage_fast.norm_rotate(*_inputs_of(self._node), self._node.eps)
        self._unread = {1 - index: pair[1 - index]}
        wanted: Tensor = pair[index]
        return wanted


def _address(tensor: Tensor) -> int:
    """Return the address of the storage itself: that of its data is 0 for fake and meta tensors."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = (part[:, None] for part in rotary.to(x.dtype).unbind(-1))  # [N, 1, D / 2]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def _rstd(x: Tensor, eps: float, dims: tuple[int, ...]) -> Tensor:
    return (x.square().mean(dims, keepdim=True) + eps).rsqrt()


def _normed_dims(weight: Tensor) -> tuple[int, ...]:
    """Return the dimensions of `[..., H, D]` that are normalised together: those of the weight."""
    return tuple(range(-weight.ndim, 0))


def norm_rotate_reference(
    joint: Tensor,
    video_query: Tensor,
    text_query: Tensor,
    video_key: Tensor,
    text_key: Tensor,
    rotary: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Specification in plain PyTorch; autograd can differentiate it. joint already holds the
    text."""
    dtype, dims = compute_dtype(joint), _normed_dims(video_query)

    def normed(x: Tensor, video_weight: Tensor, text_weight: Tensor) -> Tensor:
        x = x.to(dtype)
        x = x * _rstd(x, eps, dims)
        video = _rotated(x[:, : len(rotary)] * video_weight.to(dtype), rotary)
        return torch.cat([video, x[:, len(rotary) :] * text_weight.to(dtype)], dim=1).to(
            joint.dtype
        )

    query, key, _ = joint.unbind(2)
    return normed(query, video_query, text_query), normed(key, video_key, text_key)


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
    """Gradients in joint, and float32 `[4, D]` or `[4, H, D]` in the weights in their order; no row
    of the latter unless `weights`."""
    dtype, tokens = compute_dtype(joint), len(rotary)
    dims = _normed_dims(video_query)
    # of [B, S, H, D] to the shape of a weight
    summed = tuple(range(4 - len(dims)))
    inverse = torch.stack([rotary[..., 0], -rotary[..., 1]], dim=-1)
    query, key, _ = joint.unbind(2)
    parts, weight_grads = [], []
    for x, grad, pair in (
        (query, grad_query, (video_query, text_query)),
        (key, grad_key, (video_key, text_key)),
    ):
        x, grad = x.to(dtype), grad.to(dtype)
        grad = torch.cat([_rotated(grad[:, :tokens], inverse), grad[:, tokens:]], dim=1)
        rstd = _rstd(x, eps, dims)
        normed = x * rstd
        inner = torch.cat(
            [g * w.to(dtype) for g, w in zip((grad[:, :tokens], grad[:, tokens:]), pair)], dim=1
        )
        slope = (inner * normed).mean(dims, keepdim=True)
        parts.append((rstd * (inner - normed * slope)).to(joint.dtype))
        weight_grads += [
            (grad * normed)[:, rows].sum(summed) for rows in (slice(tokens), slice(tokens, None))
        ]
    d_joint = torch.stack([*parts, grad_value.to(joint.dtype)], dim=2)
    return d_joint, torch.stack(weight_grads)[: 4 if weights else 0]


register(norm_rotate_reference)
register(norm_rotate_backward_reference)
