"""Relative size of an update, from a sample of the trained weights; nothing synchronises with the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sage_fast.models.policy import UnshardedStates
from sage_fast.parallel.engine import UpdateSize
from sage_fast.util.ranks import all_reduce

LAYERS = 16
"""Adapted layers in the sample."""
MATRICES = 64
ELEMENTS = 4096
"""Matrices in the sample when all weights are trained, and elements of each."""
BFLOAT16_RESOLUTION = 2.0**-9
"""Relative change below which a weight keeps its bfloat16 value, unless it is near a rounding boundary."""

Item = TypeVar("Item")
UNSHARDED = UnshardedStates()


class AdapterUpdates:
    """Exact size of updates to a LoRA adapter, from the factors of some layers."""

    def __init__(self, layers: Sequence[LoraLayer], states: UnshardedStates) -> None:
        self.layers, self.states = layers, states
        weights = (states.whole(layer.get_base_layer().weight) for layer in layers)
        self.base = torch.stack([torch.linalg.vector_norm(w, dtype=torch.float64) for w in weights]).norm()

    def remember(self) -> None:
        """Copy what the next update will change."""
        self.before = [_factors(layer, self.states) for layer in self.layers]

    def size(self) -> UpdateSize:
        """Return the size of the update since `remember`."""
        rows = []
        for layer, (a, b) in zip(self.layers, self.before):
            new_a, new_b = _factors(layer, self.states)
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
    """Size of updates to full weights, from a fixed random sample of the elements of some matrices.

    Each rank looks at the elements that it updates.
    """

    def __init__(self, matrices: Sequence[Tensor], states: UnshardedStates) -> None:
        self.matrices, self.states = matrices, states

    def remember(self) -> None:
        """Copy what the next update will change."""
        self.before = self._sample()

    def size(self) -> UpdateSize:
        """Return the size of the update since `remember`."""
        norms = torch.stack([(self._sample() - self.before).norm(), self.before.norm()])
        change, size = all_reduce(norms.to(self.matrices[0].device).double().square()).sqrt().float()
        return UpdateSize(relative=change / size, of_rounded=change / size)

    @functools.cached_property
    def _mine(self) -> list[tuple[Tensor, float]]:
        """Indices of the elements in this rank's part of each matrix, and 1 / root of how many ranks hold them."""
        states, draw = self.states, torch.Generator().manual_seed(0)
        counts = [states.shape(p).numel() for p in self.matrices]
        held = torch.tensor([states.part(p).numel() for p in self.matrices], device=self.matrices[0].device)
        mine = []
        for p, count, copies in zip(self.matrices, counts, all_reduce(held).tolist()):
            every = torch.randint(count, (ELEMENTS,), generator=draw) if count > ELEMENTS else torch.arange(count)
            part, index = states.part(p), every - states.start(p)
            here = index[(index >= 0) & (index < part.numel())].to(part.device)
            mine.append((here, (count / copies) ** 0.5))
        return mine

    def _sample(self) -> Tensor:
        part = self.states.part
        return torch.cat([share * part(p).take(index).float() for p, (index, share) in zip(self.matrices, self._mine)])


def watch_updates(transformer: nn.Module, states: UnshardedStates = UNSHARDED) -> AdapterUpdates | WeightUpdates:
    """Return a meter for updates of the trained weights."""
    adapted = [m for m in transformer.modules() if isinstance(m, LoraLayer) and _is_trained(m)]
    if adapted:
        return AdapterUpdates(_evenly(adapted, LAYERS), states)
    matrices = [p for p in transformer.parameters() if p.requires_grad and p.ndim > 1]
    return WeightUpdates(_evenly(matrices, MATRICES), states)


def _is_trained(layer: LoraLayer) -> bool:
    return layer.lora_B[layer.active_adapters[0]].weight.requires_grad


def _factors(layer: LoraLayer, states: UnshardedStates) -> tuple[Tensor, Tensor]:
    """Return copies of A `[r, in]` and B `[out, r]` in float64, which keeps changes far smaller than the weight."""
    name = layer.active_adapters[0]
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    a, b = (states.whole(factor).flatten(1).to(torch.float64, copy=True) for factor in (a, b))
    return a, b


def _evenly(items: Sequence[Item], count: int) -> list[Item]:
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else list(items)
