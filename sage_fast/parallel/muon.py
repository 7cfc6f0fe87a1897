"""Muon for weights that are spread over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sage_fast.util.ranks import exchange

MOMENTUM = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """How a weight lies over the ranks.

    Attributes:
        shape: shape of the whole weight.
        sizes: elements per rank, in order.
        group: the ranks of `sizes`; None: all.
    """

    shape: torch.Size
    sizes: tuple[int, ...]
    group: dist.ProcessGroup | None = None


def whole_update(direction: Tensor, **settings: Any) -> Tensor:
    """Return what torch's Muon adds to a matrix of zeros for a gradient of `direction`, without its momentum."""
    p = nn.Parameter(torch.zeros_like(direction))
    p.grad = direction
    torch.optim.Muon([p], momentum=0, nesterov=False, weight_decay=0, **settings).step()
    return p.detach()


class PartitionedMuon(torch.optim.Optimizer):
    """Muon on the parts of matrices that each rank holds, with the momentum of these parts.

    A round has as many matrices as there are ranks. Each rank gets one of them whole, orthogonalises it, and sends the
    others the update of their parts. All ranks step together.

    Args:
        parts: this rank's part of each matrix; it may be empty.
        partitions: how each matrix lies over the ranks.
        settings: settings of torch's Muon.
    """

    def __init__(self, parts: Sequence[Tensor], partitions: Sequence[Partition], **settings: Any) -> None:
        super().__init__(parts, settings)
        self.partitions = partitions
        self.group = partitions[0].group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        moving = [(p, partition) for p, partition in zip(group["params"], self.partitions) if p.grad is not None]
        moving.sort(key=lambda pair: pair[1].shape)  # matrices of a round take equally long
        ranks = dist.get_world_size(self.group)
        for start in range(0, len(moving), ranks):
            self._round(moving[start : start + ranks], group)

    def _round(self, matrices: Sequence[tuple[Tensor, Partition]], group: dict[str, Any]) -> None:
        decay, settings = group["weight_decay"], {key: group[key] for key in ("lr", "eps", "adjust_lr_fn")}
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        given = [p.numel() for p, _ in matrices] + [0] * (ranks - len(matrices))
        mine = matrices[rank][1] if rank < len(matrices) else None
        taken = list(mine.sizes) if mine else [0] * ranks
        whole = exchange(torch.cat([self._direction(p) for p, _ in matrices]), given, taken, self.group)
        if mine:
            whole = whole_update(whole.view(mine.shape), **settings).flatten()
        updates = exchange(whole, taken, given, self.group).split(given)
        for (p, _), update in zip(matrices, updates):
            p.mul_(1 - settings["lr"] * decay).add_(update.to(p.device))

    def _direction(self, p: Tensor) -> Tensor:
        """Return Nesterov's direction of a part, after its momentum has taken the gradient in."""
        assert p.grad is not None
        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        momentum.lerp_(p.grad, 1 - MOMENTUM)
        return p.grad.lerp(momentum, MOMENTUM)
