"""Muon for weights that are spread over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage_fast.util.ranks import exchange, rank, world_size

MOMENTUM = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """How a weight lies over the ranks.

    Attributes:
        shape: shape of the whole weight.
        sizes: elements per rank, in order.
    """

    shape: torch.Size
    sizes: tuple[int, ...]


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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        moving = [(p, partition) for p, partition in zip(group["params"], self.partitions) if p.grad is not None]
        moving.sort(key=lambda pair: pair[1].shape)  # matrices of a round take equally long
        for start in range(0, len(moving), world_size()):
            self._round(moving[start : start + world_size()], group)

    def _round(self, matrices: Sequence[tuple[Tensor, Partition]], group: dict[str, Any]) -> None:
        decay, settings = group["weight_decay"], {key: group[key] for key in ("lr", "eps", "adjust_lr_fn")}
        given = [p.numel() for p, _ in matrices] + [0] * (world_size() - len(matrices))
        mine = matrices[rank()][1] if rank() < len(matrices) else None
        taken = list(mine.sizes) if mine else [0] * world_size()
        whole = exchange(torch.cat([self._direction(p) for p, _ in matrices]), given, taken)
        if mine:
            whole = whole_update(whole.view(mine.shape), **settings).flatten()
        updates = exchange(whole, taken, given).split(given)
        for (p, _), update in zip(matrices, updates):
            p.mul_(1 - settings["lr"] * decay).add_(update.to(p.device))

    def _direction(self, p: Tensor) -> Tensor:
        """Return Nesterov's direction of a part, after its momentum has taken the gradient in."""
        assert p.grad is not None
        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        momentum.lerp_(p.grad, 1 - MOMENTUM)
        return p.grad.lerp(momentum, MOMENTUM)
