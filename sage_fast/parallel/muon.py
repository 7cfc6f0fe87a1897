"""Muon, with the Newton-Schulz iteration of equal matrices batched, also for weights spread over
the ranks."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sage_fast.util.ranks import exchange

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of the iteration X <- a X + (b G + c G^2) X, G = X X^T, which drives all singular values
to about 1."""
ITERATIONS = 5
BATCH_ELEMENTS = 2**24
"""Elements that are orthogonalised together: many small matrices, or one large one."""
UPDATE_RMS = 0.2
"""Root mean square of an update over the learning rate, as AdamW's usually is."""


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


def orthogonalized(directions: Tensor, eps: float) -> Tensor:
    """Return the nearly orthogonal matrices of N equal ones, `[N, m, n]`, in bfloat16, in which the
    iteration runs.

    `eps` bounds the norm of a direction from below.
    """
    tall = directions.shape[1] > directions.shape[2]
    x = (directions.mT if tall else directions).bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum on whole matrices, those of one shape together.

    Args:
        parts: the matrices.
        settings: `lr`, `weight_decay` and `eps`.
    """

    def __init__(self, parts: Sequence[Tensor], **settings: Any) -> None:
        super().__init__(parts, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        equal: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                equal[p.shape].append(p)
        for shape, matrices in equal.items():
            size = max(1, BATCH_ELEMENTS // max(shape.numel(), 1))
            for start in range(0, len(matrices), size):
                batch = matrices[start : start + size]
                directions = torch.stack(self._directions(batch))
                self._move(batch, orthogonalized(directions, group["eps"]).unbind(), shape)

    def _directions(self, parts: list[Tensor]) -> tuple[Tensor, ...]:
        """Return Nesterov's directions, after the momentum has taken the gradients in."""
        grads = [p.grad for p in parts if p.grad is not None]
        momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in parts]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        return torch._foreach_lerp(grads, momenta, MOMENTUM)

    def _move(self, parts: list[Tensor], along: tuple[Tensor, ...], shape: torch.Size) -> None:
        """Decay parts of matrices of this shape, and move them along orthogonal ones by an rms of
        `UPDATE_RMS` x lr."""
        (group,) = self.param_groups
        torch._foreach_mul_(parts, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parts, along, alpha=-UPDATE_RMS * group["lr"] * math.sqrt(max(shape)))


class PartitionedMuon(Muon):
    """Muon on the parts of matrices that each rank holds, with the momentum of these parts.

    A round has as many matrices as there are ranks. Each rank gets one of them whole,
    orthogonalises it, and sends the others the update of their parts. All ranks step together.

    Args:
        parts: this rank's part of each matrix; it may be empty.
        partitions: how each matrix lies over the ranks.
        settings: those of `Muon`.
    """

    def __init__(
        self, parts: Sequence[Tensor], partitions: Sequence[Partition], **settings: Any
    ) -> None:
        super().__init__(parts, **settings)
        self.partitions = partitions
        self.group = partitions[0].group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        moving = [
            (p, partition)
            for p, partition in zip(group["params"], self.partitions)
            if p.grad is not None
        ]
        moving.sort(key=lambda pair: pair[1].shape)  # matrices of a round take equally long
        ranks = dist.get_world_size(self.group)
        for start in range(0, len(moving), ranks):
            self._round(moving[start : start + ranks], group["eps"])

    def _round(self, matrices: Sequence[tuple[Tensor, Partition]], eps: float) -> None:
        ranks = dist.get_world_size(self.group)
        rank = dist.get_rank(self.group)
        parts = [p for p, _ in matrices]
        mine = matrices[rank][1] if rank < len(matrices) else None

        # Rank i gets this rank's part of matrix i, if the round has one for it.
        sent = [0 for _ in range(ranks)]
        sent[: len(parts)] = [p.numel() for p in parts]
        received = [0 for _ in range(ranks)] if mine is None else list(mine.sizes)
        whole = exchange(torch.cat(self._directions(parts)), sent, received, self.group)
        if mine is None:
            whole = whole.bfloat16()  # empty, in the dtype of the others' updates
        else:
            whole = orthogonalized(whole.view(1, *mine.shape), eps).flatten()

        updates = exchange(whole, received, sent, self.group).split(sent)
        for (p, partition), update in zip(matrices, updates):
            self._move([p], (update,), partition.shape)
