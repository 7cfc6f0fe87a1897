"""One sample on several GPUs (Ulysses, arXiv:2309.14509): each rank of a group holds a part of its
tokens.

Everything in a block except attention works token by token, so a rank runs it on its part of the
tokens of each stream, such as the video and the text. For attention, the ranks exchange tokens for
heads: every rank attends over all tokens for its share of the heads, with the kernel chosen for the
run, and the exchange is undone. Queries, keys and values cross as one tensor, so a block makes two
exchanges forward and two backward. The norms of queries and keys and their rotation may stand after
the exchange, since they treat every head alike.

The parts are equal, so a stream whose length the ranks do not divide is padded after its last
token. The padding crosses too, and is left out where the tokens of all ranks are joined. So
attention needs no mask, which faster kernels do not accept, and no rank has to process all the text
on top of its part of the video.

Latents, text and velocities are whole on every rank. Each rank of a group computes the loss of the
same samples, and the backward sums the gradients of all ranks' losses with respect to its tokens.
Over a group of P ranks, a weight's gradients add up to P times those of one process, and so do the
losses. An engine that averages over all ranks therefore needs no knowledge of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from sage_fast.ops._derivatives import first_order


class SequenceParallel:
    """Splits tokens over a group of ranks, joins them again, and exchanges them for heads.

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

    def token_exchange(self, *counts: int) -> TokenExchange:
        """Return the exchange of tokens for heads, for streams of `counts` tokens that attend to
        one another."""
        return TokenExchange(self._group, counts)


class TokenExchange:
    """Exchanges a rank's part of the tokens, with all heads, for all tokens with a share of the
    heads, and back.

    Args:
        group: the ranks that share samples; their number divides that of the heads.
        counts: the tokens of each stream in a sample.
    """

    def __init__(self, group: dist.ProcessGroup, counts: Sequence[int]) -> None:
        self._group = group
        self._counts = tuple(counts)

    def to_heads(self, *parts: Tensor) -> Tensor:
        """Return all tokens of all streams for this rank's share of the heads.

        Args:
            parts: this rank's part of each stream, as `SequenceParallel.part` cuts it: `[B,
                ceil(N / size), ..., H, D]`.

        Returns:
            `[B, S, ..., H / size, D]`, the streams one after the other, without padding.
        """
        heads: Tensor = _ToHeads.apply(self._group, self._counts, *parts)
        return heads

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Undo `to_heads`.

        Args:
            heads: `[B, S, ..., H / size, D]`, of all tokens.

        Returns:
            This rank's parts, one after the other, with all heads. The padding is zero.
        """
        tokens: Tensor = _ToTokens.apply(self._group, self._counts, heads)
        return tokens


class _ToHeads(torch.autograd.Function):
    """`TokenExchange.to_heads`."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, counts: Sequence[int], *parts: Tensor
    ) -> Tensor:
        ctx.group = group
        ctx.counts = counts
        return _receive_tokens(parts, counts, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        received = _receive_heads(grad, ctx.counts, ctx.group)
        shares = _shares(ctx.counts, len(received))
        return None, None, *(_with_all_heads(part) for part in received.split(shares, dim=2))


class _ToTokens(torch.autograd.Function):
    """`TokenExchange.to_tokens`."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, counts: Sequence[int], heads: Tensor) -> Tensor:
        ctx.group = group
        ctx.counts = counts
        return _with_all_heads(_receive_heads(heads, counts, group))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        shares = _shares(ctx.counts, dist.get_world_size(ctx.group))
        return None, None, _receive_tokens(grad.split(shares, dim=1), ctx.counts, ctx.group)


def _shares(counts: Sequence[int], size: int) -> list[int]:
    """Return how many tokens of each stream a rank has, with padding."""
    return [-(-count // size) for count in counts]


def _receive_tokens(
    parts: Sequence[Tensor], counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send every rank its heads; return all tokens of this rank's heads, without padding."""
    size = dist.get_world_size(group)
    batch, _, *middle, heads, width = parts[0].shape
    shares = _shares(counts, size)
    shape = (*middle, heads // size, width)
    sent = parts[0].new_empty(size, batch, sum(shares), *shape)
    for rows, part in zip(sent.split(shares, dim=2), parts, strict=True):
        rows.copy_(part.unflatten(-2, (size, -1)).movedim(-3, 0))
    received = _all_to_all(sent, group)

    tokens = sent.new_empty(batch, sum(counts), *shape)
    streams = tokens.split(list(counts), dim=1)
    for stream, rows in zip(streams, received.split(shares, dim=2), strict=True):
        whole, part, rest = _by_rank(stream, rows.shape[2])
        whole.copy_(rows[: len(whole)])
        if rest:
            part.copy_(rows[len(whole), :, :rest])
    return tokens


def _receive_heads(heads: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send every rank its tokens, and zeros for padding; return this rank's tokens, `[size, B, S,
    ..., H / size, D]` by the rank that had the heads."""
    size = dist.get_world_size(group)
    shares = _shares(counts, size)
    sent = heads.new_empty(size, len(heads), sum(shares), *heads.shape[2:])
    streams = heads.split(list(counts), dim=1)
    for stream, rows in zip(streams, sent.split(shares, dim=2), strict=True):
        whole, part, rest = _by_rank(stream, rows.shape[2])
        full = len(whole)
        rows[:full] = whole
        if rest:
            rows[full, :, :rest] = part
            rows[full, :, rest:] = 0
            full += 1
        if full < size:
            rows[full:] = 0
    return _all_to_all(sent, group)


def _by_rank(stream: Tensor, share: int) -> tuple[Tensor, Tensor, int]:
    """View `[B, N, ...]` as the parts of ranks: `[ranks, B, share, ...]` of those without padding,
    the shorter part of the next one, `[B, rest, ...]`, and its length."""
    ranks, rest = divmod(stream.shape[1], share)
    tokens = ranks * share
    whole = stream[:, :tokens].unflatten(1, (ranks, share)).transpose(0, 1)
    return whole, stream[:, tokens:], rest


def _with_all_heads(received: Tensor) -> Tensor:
    """Join the heads of all ranks: `[size, B, S, ..., H / size, D]` -> `[B, S, ..., H, D]`."""
    return received.movedim(0, -3).flatten(-3, -2)


def _all_to_all(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `sent[r]` to rank r; return what each rank sent here, in the same shape."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
