"""Gradients before an update: averaged over the ranks, left out where they are zero, clipped to a
norm."""

import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _take_tensors
from torch.nn.utils import clip_grads_with_norm_

from sage_fast.util.ranks import all_reduce, world_size

FLAT_BYTES = 2**30
"""Gradients that are copied side by side to cross in one call; all weights together would be a
second copy of them."""


def average_gradients(
    parameters: Sequence[Tensor], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Average gradients over ranks, in few calls: an adapter has more than a thousand small ones.
    Collective.

    A weight that has a gradient on no rank keeps none (and is not decayed).

    Args:
        parameters: whole weights, or shards of which each rank of the group has the same.
        device: where collectives run; shards may be in host memory.
        group: ranks to average over; None: all.
    """
    ranks = world_size(group)
    if ranks == 1 or not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], device=device).int()
    all_reduce(present, "max", group)
    gradients = []
    for p, used in zip(parameters, present.tolist()):
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append(p.grad)
    for batch in _take_tensors(gradients, FLAT_BYTES):
        sizes = [grad.numel() for grad in batch]
        flat = batch[0].new_empty(sum(sizes), device=device)
        pieces = [piece.view_as(grad) for grad, piece in zip(batch, flat.split(sizes))]
        torch._foreach_copy_(pieces, batch)
        all_reduce(flat, group=group).div_(ranks)
        torch._foreach_copy_(batch, pieces)


def forget_zero_gradients(parts: Collection[Tensor], device: torch.device) -> None:
    """Leave weights alone whose gradient is exactly zero, such as a LoRA's A while B is zero.

    Collective.

    Args:
        device: where collectives run; shards may be in host memory.
    """
    with_grad = [part for part in parts if part.grad is not None]
    if not with_grad:
        return
    moving = [part.grad.any().to(device) for part in with_grad if part.grad is not None]
    together = all_reduce(torch.stack(moving).int(), "max").tolist()
    for part, moves in zip(with_grad, together):
        if not moves:
            part.grad = None


def clip_gradients(parts: Collection[Tensor], total: Tensor, max_norm: float) -> float:
    """Scale gradients whose norm over all ranks is `total` to at most `max_norm`, if it is finite;
    return it."""
    if math.isfinite(norm := float(total)):
        clip_grads_with_norm_(parts, max_norm, total)
    return norm
