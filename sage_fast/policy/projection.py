"""Linear layers with a LoRA adapter as one matmul, accumulated in float32:

    y = [x | x A^T] [W | s B]^T + bias          dx = dy W + (dy s B) A,  from dy [W | s B] in one matmul

peft, and any implementation that adds s (x A^T) B^T onto W x, adds it to a value that is already rounded: in bfloat16
a change below half a unit in the last place is lost, which is what a young adapter makes. Here the adapter is part of
the sum before it is rounded, and costs no pass over x or y of its own: who makes x leaves `room` on the right of each
row for x A^T. Layers that read the same x (queries, keys, values) share one matmul.

The frozen weight is the left part of [W | s B], and the layer's own `weight` a view of it, so that there is no second
copy; `refresh` writes the right part again where B has changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class _Adapter:
    down: Tensor  # A [r, d_in]
    up: Tensor  # B [d_out, r]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


class Projection(nn.Module):
    """Linear layers that read the same rows.

    Args:
        parent: module that holds them, also after an adapter has taken their place.
        names: of the layers in it: `nn.Linear`, or peft's LoRA around one. Adapters of another kind (DoRA, dropout,
            several at once), of layers that are trained, and none at all, are left to the layers' own forward.

    Attributes:
        room: columns that x must have on its right; 0 without adapters.
    """

    def __init__(self, parent: nn.Module, *names: str) -> None:
        super().__init__()
        self.parent, self.names = parent, names
        self.room = 0
        self._adapters: list[_Adapter | None] = []
        self._rows: list[int] = []
        self._columns: list[tuple[int, int, float]] = []  # of y for each adapter: first, last + 1, scale
        self._weight = self._bias = torch.empty(0)
        self._seen: list[object] = []

    @property
    def layers(self) -> list[Any]:
        """The layers as they are now."""
        return [getattr(self.parent, name) for name in self.names]

    @torch.no_grad()
    def refresh(self, dtype: torch.dtype) -> None:
        """Follow the layers: adapters that came, went or changed. Call it before a forward, never during one.

        A change is seen by autograd's version counters; who writes through `p.data` or a raw pointer increments them
        (`torch.autograd.graph.increment_version`), as the engine does after every update.

        Args:
            dtype: of the activations; layers that are stored in another type run under autocast, on their own.
        """
        layers = self.layers
        seen = [dtype, *(signature for layer in layers for signature in _signature(layer))]
        if seen == self._seen:
            return
        self._seen = []  # until all is done
        adapters, bases = [_adapter(layer) for layer in layers], [_base(layer) for layer in layers]
        alone = any(
            (adapter is None and base is not layer)
            or base.weight.dtype != dtype
            or any(p.requires_grad for p in base.parameters())
            for layer, base, adapter in zip(layers, bases, adapters)
        )
        if alone or not any(adapters):
            self.room, self._adapters, self._seen = 0, [], seen
            return
        if not self._is_joined(bases, adapters):
            self._join(bases, adapters)
        row, column = 0, self._weight.shape[1] - self.room
        self._rows, self._columns = [base.out_features for base in bases], []
        for base, adapter in zip(bases, adapters):
            rows = slice(row, row + base.out_features)
            if base.bias is not None:
                self._bias[rows].copy_(base.bias)
            if adapter is not None:
                self._weight[rows, column : column + adapter.rank].copy_(adapter.up * adapter.scale)
                self._columns.append((rows.start, rows.stop, adapter.scale))
                column += adapter.rank
            row = rows.stop
        self._adapters = adapters
        self._seen = [dtype, *(signature for layer in layers for signature in _signature(layer))]

    def _is_joined(self, bases: list[Any], adapters: list[_Adapter | None]) -> bool:
        """Whether `_weight` is laid out for these adapters and its left part is still the layers' own weight."""
        if [a and a.rank for a in adapters] != [a and a.rank for a in self._adapters]:
            return False
        parts = self._weight.split([base.out_features for base in bases])
        return all(
            (part.data_ptr(), part.dtype) == (base.weight.data_ptr(), base.weight.dtype)
            for part, base in zip(parts, bases)
        )

    def _join(self, bases: list[Any], adapters: list[_Adapter | None]) -> None:
        like, width = bases[0].weight, bases[0].in_features
        self.room = sum(a.rank for a in adapters if a is not None)
        rows = [base.out_features for base in bases]
        self._weight, self._bias = like.new_zeros(sum(rows), width + self.room), like.new_zeros(sum(rows))
        for base, part in zip(bases, self._weight.split(rows)):
            part[:, :width].copy_(base.weight)
            base.weight.data = part[:, :width]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[..., d_in + room]` -> `[..., d_out]` of each layer; the columns of the room are written."""
        if not self.room:
            return tuple(layer(x) for layer in self.layers)
        adapters = [a for a in self._adapters if a is not None]
        down = torch.cat([a.down for a in adapters]).to(x.dtype)
        y = _OneSum.apply(x, down, self._weight, self._bias, self._columns, *(a.up for a in adapters))
        # The backward of a split is a copy, of a single part too.
        return y.split(self._rows, dim=-1) if len(self._rows) > 1 else (y,)


def _signature(layer: Any) -> tuple[object, ...]:
    """What changes when the layer or its adapter does; read for every layer before every forward, so in few steps."""
    modules = layer._modules
    base = modules.get("base_layer", layer)
    weight, bias = base._parameters["weight"], base._parameters["bias"]
    own = (layer, weight.data_ptr(), weight.dtype, weight.requires_grad, None if bias is None else bias._version)
    if base is layer:
        return own
    ups = [(up, up.data_ptr(), up._version) for up in (m._parameters["weight"] for m in modules["lora_B"].children())]
    switches = (layer._disable_adapters, list(layer._active_adapter), list(layer.merged_adapters))
    return (*own, *switches, list(layer.scaling.values()), ups)


def _base(layer: nn.Module) -> Any:
    return layer.base_layer if isinstance(layer, LoraLinear) else layer


def _adapter(layer: nn.Module) -> _Adapter | None:
    """The one active adapter without dropout, bias or variant (DoRA), neither merged nor switched off."""
    if not isinstance(layer, LoraLinear) or layer.merged or layer.disable_adapters or len(layer.active_adapters) != 1:
        return None
    name = layer.active_adapters[0]
    if (
        name not in layer.lora_A
        or name in layer.lora_variant
        or not isinstance(layer.lora_dropout[name], nn.Identity)
        or layer.lora_B[name].bias is not None
    ):
        return None
    return _Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


class _OneSum(torch.autograd.Function):
    """y = [x | x A^T] [W | s B]^T + bias, for x with room on its right."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        weight: Tensor,
        bias: Tensor,
        columns: list[tuple[int, int, float]],
        *ups: Tensor,
    ) -> Tensor:
        width = down.shape[1]
        x[..., width:] = F.linear(x[..., :width], down)
        ctx.save_for_backward(x, down, weight)
        ctx.columns, ctx.ranks = columns, [up.shape[1] for up in ups]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, weight = ctx.saved_tensors  # asked for once: with checkpointing they are recomputed for it
        width, shape = down.shape[1], x.shape
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        wanted = ctx.needs_input_grad[5:]
        dups: list[Tensor | None] = []
        column = width
        for (first, last, scale), rank, needed in zip(ctx.columns, ctx.ranks, wanted):
            rows = x[:, column : column + rank]
            dups.append(scale * (grad[:, first:last].t() @ rows).float() if needed else None)
            column += rank
        if not ctx.needs_input_grad[0]:  # in the first block
            return None, (grad @ weight[:, width:]).t() @ x[:, :width], None, None, None, *dups
        dx = grad @ weight
        ddown = dx[:, width:].t() @ x[:, :width]
        dx[:, :width].addmm_(dx[:, width:], down)
        return dx.view(shape), ddown, None, None, None, *dups


class _Gelu(torch.autograd.Function):
    """GELU (tanh) into rows with room."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, room: int) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] + room)
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out[..., : x.shape[-1]])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad[..., : x.shape[-1]], x, approximate="tanh"), None


def gelu(x: Tensor, room: int) -> Tensor:
    """GELU (tanh) of `[..., d]` as `[..., d + room]`."""
    if not room or torch.compiler.is_compiling():  # Inductor makes one pass of it
        return with_room(F.gelu(x, approximate="tanh"), room)
    return _Gelu.apply(x, room)


def with_room(x: Tensor, room: int) -> Tensor:
    """`[..., d]` copied into `[..., d + room]`."""
    return F.pad(x, (0, room)) if room else x
