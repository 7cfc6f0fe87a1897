"""Relative size of an update, from a sample of the trained weights; nothing synchronises with the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sage_fast.parallel.engine import UpdateSize

LAYERS = 16
"""Adapted layers in the sample."""
MATRICES = 64
ELEMENTS = 4096
"""Matrices in the sample when all weights are trained, and elements of each."""
BFLOAT16_RESOLUTION = 2.0**-9
"""Relative change below which a weight keeps its bfloat16 value, unless it is near a rounding boundary."""

Item = TypeVar("Item")
Whole = Callable[[Tensor], Tensor]
"""Weight, perhaps sharded over ranks -> its full value."""


class AdapterUpdates:
    """Exact size of updates to a LoRA adapter, from the factors of some layers."""

    def __init__(self, layers: Sequence[LoraLayer], whole: Whole) -> None:
        self.layers, self.whole = layers, whole
        weights = (whole(layer.get_base_layer().weight) for layer in layers)
        self.base = torch.stack([torch.linalg.vector_norm(w, dtype=torch.float64) for w in weights]).norm()

    def remember(self) -> None:
        """Copy what the next update will change."""
        self.before = [_factors(layer, self.whole) for layer in self.layers]

    def size(self) -> UpdateSize:
        """Return the size of the update since `remember`."""
        rows = []
        for layer, (a, b) in zip(self.layers, self.before):
            new_a, new_b = _factors(layer, self.whole)
            da, db = new_a - a, new_b - b
            # B'A' - BA = dB A + B' dA = [dB, B'] [A; dA]; its squared norm sums the product of two Gram matrices.
            left, right = torch.cat([db, new_b], 1), torch.cat([a, da])
            squares = layer.scaling[layer.active_adapters[0]] ** 2 * (left.T @ left) * (right @ right.T)
            r = len(a)
            parts = squares.sum(), squares[:r, :r].sum(), squares[r:, r:].sum()
            rows.append(torch.stack([*parts, *(t.square().sum() for t in (db, new_b, da, new_a))]))
        change, through_b, through_a, db2, b2, da2, a2 = torch.stack(rows).sum(0).clamp(min=0)
        of_rounded = torch.where(through_b >= through_a, db2 / b2, da2 / a2).nan_to_num(nan=0.0)
        return UpdateSize(relative=change.sqrt() / self.base, of_rounded=of_rounded.sqrt())


class WeightUpdates:
    """Size of updates to full weights, from a fixed random sample of the elements of some matrices."""

    def __init__(self, matrices: Sequence[Tensor], whole: Whole) -> None:
        self.matrices, self.whole = matrices, whole
        draw = torch.Generator().manual_seed(0)
        self.elements = [
            torch.randint(p.numel(), (ELEMENTS,), generator=draw).to(p.device)
            if p.numel() > ELEMENTS
            else torch.arange(p.numel(), device=p.device)
            for p in matrices
        ]

    def remember(self) -> None:
        """Copy what the next update will change."""
        self.before = self._sample()

    def size(self) -> UpdateSize:
        """Return the size of the update since `remember`."""
        relative = (self._sample() - self.before).norm() / self.before.norm()
        return UpdateSize(relative=relative, of_rounded=relative)

    def _sample(self) -> Tensor:
        return torch.cat([self.whole(p).take(index).float() for p, index in zip(self.matrices, self.elements)])


def watch_updates(transformer: nn.Module, whole: Whole = Tensor.detach) -> AdapterUpdates | WeightUpdates:
    """Return a meter for updates of the trained weights."""
    adapted = [m for m in transformer.modules() if isinstance(m, LoraLayer) and _is_trained(m)]
    if adapted:
        return AdapterUpdates(_evenly(adapted, LAYERS), whole)
    matrices = [p for p in transformer.parameters() if p.requires_grad and p.ndim > 1]
    return WeightUpdates(_evenly(matrices, MATRICES), whole)


def _is_trained(layer: LoraLayer) -> bool:
    return layer.lora_B[layer.active_adapters[0]].weight.requires_grad


def _factors(layer: LoraLayer, whole: Whole) -> tuple[Tensor, Tensor]:
    """Return copies of A `[r, in]` and B `[out, r]` in float64, which keeps changes far smaller than the weight."""
    name = layer.active_adapters[0]
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    a, b = (whole(factor).flatten(1).to(torch.float64, copy=True) for factor in (a, b))
    return a, b


def _evenly(items: Sequence[Item], count: int) -> list[Item]:
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else list(items)
