"""The decoder of HunyuanVideo 1.5's autoencoder, with fewer copies than the stock forward.

The weights are those of the stock modules, and the values agree up to rounding. The differences:

- Norm and SiLU are one operator, `norm_silu`, which writes straight into the padded input of the
  next convolution. There is no copy for padding, no float32 copy for the norm, and at most three
  activations of a stage are alive at a time.
- Attention runs frame by frame over the frames so far: no [S, S] mask, half the products, any batch
size.
- Everything after the attention is causal in time, so it can run on a few latent frames at a time
  if each convolution keeps its last two input frames. The values do not change; memory falls by the
  same factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_fast.ops.norm_silu import normalize

History = dict[nn.Module, Tensor]
"""Convolution -> its last two padded input frames `[B, C, 2, H + 2, W + 2]`."""


def decode_frames(decoder: Any, latents: Tensor, frames: int) -> Iterator[Tensor]:
    """Decode `latents` and yield the video piece by piece along time. Not differentiable: call it
    under `no_grad`.

    Args:
        decoder: a `HunyuanVideo15Decoder3D`.
        latents: `[B, C, T, H, W]` in the decoder's dtype, divided by the scaling factor; their
            memory layout is kept throughout.
        frames: latent frames per piece.

    Yields:
        `[B, 3, F, H', W']` in the same dtype, in [-1, 1] or slightly outside. F is four times the
        piece's latent frames, three less in the first piece.
    """
    x = _conv(decoder.conv_in, _padded(latents))
    x += latents.repeat_interleave(decoder.repeat, dim=1)
    middle = decoder.mid_block
    x = _resnet(middle.resnets[0], x)
    for attention, resnet in zip(middle.attentions, middle.resnets[1:]):
        x = _resnet(resnet, _attend(attention, x))
    history: History | None = {} if frames < x.shape[2] else None
    for start in range(0, x.shape[2], frames):
        y = x[:, :, start : start + frames]
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                y = _resnet(resnet, y, history)
            for upsampler in block.upsamplers or ():
                y = _upsample(upsampler, y, history, first=start == 0)
        y = _padded(y, decoder.norm_out)
        yield _conv(decoder.conv_out, y, history)


def peak_bytes(decoder: Any, latents: tuple[int, ...], frames: int, itemsize: int) -> int:
    """Return the peak bytes of `decode_frames`, without weights and the convolutions' own
    workspace.

    Let A be the bytes of an activation and P those of a padded one. The peak is the largest of 7 A
    in the attention, 2 A + P in a residual block (3 A + P if its shortcut is a convolution) and,
    from A to A', A + A' + max(P, A') in upsampling. After the attention, its output is held as
    well, and with several pieces two padded frames per convolution.

    Args:
        latents: (B, C, T, H, W).
        frames: latent frames per piece.
        itemsize: bytes per value.
    """
    batch, _, total, h, w = latents
    t, pieces = min(frames, total), frames < total

    def size(c: int, frames: int, border: int = 0) -> int:
        return itemsize * batch * c * frames * (h + border) * (w + border)

    def residual(c: int, frames: int) -> int:
        norms = 4 * batch * frames * h * w  # one float32 per pixel
        return 2 * size(c, frames) + size(c, frames + 2, 2) + norms

    c = decoder.conv_in.conv.out_channels
    held = size(c, total)
    middle = max(7 * held, residual(c, total))
    history, peak = 0, 0
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            convs = (resnet.conv1.conv, resnet.conv2.conv)
            history += sum(size(conv.in_channels, 2, 2) for conv in convs)
            c = max(convs[0].in_channels, convs[0].out_channels)
            peak = max(
                peak, residual(c, t) + (size(c, t) if resnet.conv_shortcut is not None else 0)
            )
        for upsampler in block.upsamplers or ():
            conv = upsampler.conv.conv
            history += size(conv.in_channels, 2, 2)
            packed = size(conv.out_channels, t)
            peak = max(
                peak,
                size(conv.in_channels, t) + packed + max(size(conv.in_channels, t + 2, 2), packed),
            )
            if upsampler.add_temporal_upsample:
                t = 2 * t - (not pieces)
            h, w = 2 * h, 2 * w
    history += size(c, 2, 2)
    return max(middle, held + peak + (history if pieces else 0))


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Allocate an uninitialised tensor in the memory layout of `like`."""
    channels_last = like.stride(1) == 1 and like.shape[1] > 1
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _padded(x: Tensor, norm: Any = None) -> Tensor:
    """Return `x`, or SiLU(norm(x)), inside a border `[B, C, T + 2, H + 2, W + 2]` that `_conv`
    fills."""
    batch, channels, t, h, w = x.shape
    padded = _empty(x, (batch, channels, t + 2, h + 2, w + 2))
    inside = padded[:, :, 2:, 1:-1, 1:-1]
    if norm is None:
        inside.copy_(x)
    else:
        torch.ops.sage_fast.norm_silu(x, norm.gamma, norm.scale, inside)
    return padded


def _conv(conv: Any, padded: Tensor, history: History | None = None) -> Tensor:
    """Fill the border by replication (its first two frames from `history`, if there) and
    convolve."""
    rows = padded[:, :, 2:, :, 1:-1]
    rows[:, :, :, 0] = rows[:, :, :, 1]
    rows[:, :, :, -1] = rows[:, :, :, -2]
    padded[:, :, 2:, :, 0] = padded[:, :, 2:, :, 1]
    padded[:, :, 2:, :, -1] = padded[:, :, 2:, :, -2]
    padded[:, :, :2] = (
        padded[:, :, 2:3] if history is None or conv not in history else history[conv]
    )
    if history is not None:
        history[conv] = padded[:, :, -2:].clone()
    return conv.conv(padded)


def _resnet(block: Any, x: Tensor, history: History | None = None) -> Tensor:
    y = _conv(block.conv1, _padded(x, block.norm1), history)
    padded = _padded(y, block.norm2)
    del y  # free it before the next convolution allocates its output
    y = _conv(block.conv2, padded, history)
    return y.add_(x if block.conv_shortcut is None else block.conv_shortcut(x))


def _attend(block: Any, x: Tensor) -> Tensor:
    """Attend from each frame to itself and all earlier ones."""
    batch, channels, frames, height, width = x.shape
    y = normalize(x, block.norm.gamma, block.norm.scale, torch.empty_like(x))
    # [B, 1, S, C]: a copy unless the channels are innermost already.
    q, k, v = (
        project(y).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        for project in (block.to_q, block.to_k, block.to_v)
    )
    y = _empty(x, (batch, channels, frames, height, width))
    for frame in range(frames):
        start, stop = frame * height * width, (frame + 1) * height * width
        seen = F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])
        y[:, :, frame] = seen.squeeze(1).transpose(1, 2).unflatten(2, (height, width))
    return block.proj_out(y).add_(x)


def _upsample(block: Any, x: Tensor, history: History | None, *, first: bool) -> Tensor:
    """Double the height and width and, if the block says so, all frames but the first of the
    video."""
    packed = _conv(block.conv, _padded(x), history)
    batch, _, frames, height, width = x.shape
    times = 2 if block.add_temporal_upsample else 1
    alone = int(first and times == 2)  # the first frame of a video is not doubled
    channels = packed.shape[1] // (4 * times)
    out = _empty(x, (batch, channels, times * frames - alone, 2 * height, 2 * width))
    if alone:
        _unpack(packed[:, :, :1], x[:, :, :1], out[:, :, :1], 1)
    if frames > alone:
        _unpack(packed[:, :, alone:], x[:, :, alone:], out[:, :, alone:], times)
    return out


def _unpack(packed: Tensor, x: Tensor, out: Tensor, times: int) -> None:
    """Set out[c, f times + i, 2 h + j, 2 w + k] = packed[(i, j, k, c), f, h, w] + x[(i, j, k, c /
    repeats), f, h, w].

    If `times` is 1 but `packed` was made for 2, use the first half of its channels for each (j, k).
    """
    channels, shortcut = out.shape[1], x.shape[1] // (4 * times)
    repeats = channels // shortcut
    packed = packed.unflatten(1, (times, 2, 2, -1))[:, :, :, :, :channels].unflatten(
        4, (shortcut, repeats)
    )
    x = x.unflatten(1, (times, 2, 2, shortcut, 1))
    out = (
        out.unflatten(4, (-1, 2))
        .unflatten(3, (-1, 2))
        .unflatten(2, (-1, times))
        .unflatten(1, (shortcut, repeats))
    )
    torch.add(packed, x, out=out.permute(0, 4, 6, 8, 1, 2, 3, 5, 7))


def video_shape(decoder: Any, latents: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """Return the shape (B, F, 3, H', W') of the video that latents (B, C, T, H, W) decode to."""
    batch, _, frames, height, width = latents
    upsamplers = [upsampler for block in decoder.up_blocks for upsampler in block.upsamplers or ()]
    temporal = math.prod(2 for upsampler in upsamplers if upsampler.add_temporal_upsample)
    return (
        batch,
        (frames - 1) * temporal + 1,
        3,
        height << len(upsamplers),
        width << len(upsamplers),
    )
