"""Gradients before an update: averaged over the ranks, left out where they are zero, clipped to a
norm."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch._utils import _take_tensors
from torch.nn.utils import clip_grads_with_norm_

from sage_fast.util.ranks import all_reduce, world_size

FLAT_BYTES = 2**30
"""Gradients that are copied side by side to cross in one call; all weights together would be a
second copy of them."""


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Average gradients over the ranks, in few calls: an adapter has more than a thousand small
    ones. Collective.

    A weight that has a gradient on no rank keeps none (and is not decayed).
    """
    if world_size() == 1 or not parameters:
        return
    present = torch.tensor(
        [p.grad is not None for p in parameters], device=parameters[0].device
    ).int()
    all_reduce(present, "max")
    gradients = []
    for p, used in zip(parameters, present.tolist()):
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append(p.grad)
    for batch in _take_tensors(gradients, FLAT_BYTES):
        flat = all_reduce(torch.cat([grad.flatten() for grad in batch])).div_(world_size())
        for grad, mean in zip(batch, flat.split([grad.numel() for grad in batch])):
            grad.copy_(mean.view_as(grad))


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
