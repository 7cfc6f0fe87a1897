"""One sample on several GPUs (Ulysses, arXiv:2309.14509): each rank of a group holds a part of its
tokens.

Everything in a block except attention works token by token, so a rank runs it on its part of the
video tokens and its part of the text tokens. For attention, the ranks exchange tokens for heads:
every rank attends over all tokens for its share of the heads, with the kernel chosen for the run,
and the exchange is undone. The parts are equal, so a stream whose length the ranks do not divide is
padded. Attention ignores token order, so the padding is cut out before the kernel and put back
after it. This needs no mask, which faster kernels do not accept, and no rank has to process all the
text on top of its part of the video.

Latents, text and velocities are whole on every rank. Each rank of a group computes the loss of the
same samples, and the backward sums the gradients of all ranks' losses with respect to its tokens.
Over a group of P ranks, a weight's gradients add up to P times those of one process, and so do the
losses. An engine that averages over all ranks therefore needs no knowledge of groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from sage_fast.models.attention.backends import Attention


class SequenceParallel:
    """Splits tokens over a group of ranks, joins them again, and wraps attention accordingly.

    Args:
        group: the ranks that share samples.
        device: device of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._mesh = DeviceMesh.from_group(group, device.type)
        self._group = group

    def part(self, tokens: Tensor) -> Tensor:
        """Return this rank's tokens: `[B, N, ...]` -> `[B, ceil(N / size), ...]`, zero-padded after
        the last token."""
        count = tokens.shape[1]
        share = -(-count // self.size)
        local = tokens[:, self.rank * share : (self.rank + 1) * share]
        # F.pad counts from the last dimension: none for those after the tokens
        unpadded = [0, 0] * (tokens.ndim - 2)
        return F.pad(local, [*unpadded, 0, share - local.shape[1]])

    def whole(self, part: Tensor, count: int) -> Tensor:
        """Join the parts of all ranks to `count` tokens; the backward sums the ranks' gradients."""
        gathered = DTensor.from_local(part, self._mesh, [Shard(1)]).full_tensor(
            grad_placements=[Partial()]
        )
        return gathered[:, :count]

    def attention(self, kernel: Attention, video: int, text: int) -> Attention:
        """Wrap `kernel` to attend over the tokens of all ranks, given this rank's queries, keys and
        values.

        Args:
            kernel: attention over whole sequences.
            video, text: video and text tokens of a sample.

        Returns:
            (queries, keys, values `[B, S, H, D]` of this rank's video and text tokens) -> `[B, S,
            H, D]`.
        """
        segments = self._segments(video, text)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query = _Exchange.apply(query, self._group, 2, 1)
            key = _Exchange.apply(key, self._group, 2, 1)
            value = _Exchange.apply(value, self._group, 2, 1)
            out = _without_padding(query, key, value, kernel, segments)
            return _Exchange.apply(out, self._group, 1, 2)

        return attend

    def _share(self, count: int, rank: int) -> int:
        """Return how many of `count` tokens a rank has, without padding."""
        share = -(-count // self.size)
        return min(max(count - rank * share, 0), share)

    def _segments(self, video: int, text: int) -> list[int]:
        """Return the lengths of the alternating segments of tokens and padding in the joined parts
        of all ranks."""
        lengths = []
        for rank in range(self.size):
            for count in (video, text):
                real = self._share(count, rank)
                lengths += [("token", real), ("padding", -(-count // self.size) - real)]
        present = [(kind, length) for kind, length in lengths if length]
        return [
            sum(length for _, length in segment)
            for _, segment in itertools.groupby(present, key=lambda pair: pair[0])
        ]


class _Exchange(torch.autograd.Function):
    """Cut a tensor along one dimension into a part for each rank, and join the parts from all ranks
    along another."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: dist.ProcessGroup, cut: int, joined: int
    ) -> Tensor:
        ctx.group = group
        ctx.cut = cut
        ctx.joined = joined
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, ctx.group, ctx.joined, ctx.cut), None, None, None


def _without_padding(
    query: Tensor, key: Tensor, value: Tensor, kernel: Attention, segments: Sequence[int]
) -> Tensor:
    """Run `kernel` on `[B, S, H, D]` without the padding; outputs are zero where it was.

    Args:
        kernel: attention over whole sequences.
        segments: lengths of the alternating segments of tokens and padding.
    """
    if len(segments) == 1:
        return kernel(query, key, value)
    query = _joined(query.split(segments, dim=1)[::2])
    key = _joined(key.split(segments, dim=1)[::2])
    value = _joined(value.split(segments, dim=1)[::2])
    out = kernel(query, key, value)

    parts = list(out.split(segments[::2], dim=1))
    for i, length in enumerate(segments[1::2]):
        parts.insert(2 * i + 1, out.new_zeros(len(out), length, *out.shape[2:]))
    return torch.cat(parts, dim=1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
