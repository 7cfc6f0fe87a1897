"""Fused base + LoRA linear: one matmul with float32 accumulation.

    y = [x | x A^T] [W | s B]^T + bias          dx = dy W + (dy s B) A,  from dy [W | s B] in one matmul

peft, like any implementation that adds s (x A^T) B^T onto W x, adds to a value that is already rounded. In bfloat16 a
change below half a unit in the last place is lost, and a young adapter's changes are that small. Here the adapter joins
the sum before rounding (`local_device` keeps cuBLAS from rounding parts of it) and costs no extra pass over x or y: the
operator that produces x allocates `pad` columns for x A^T. Layers that read the same x (queries, keys, values) share
one matmul.

The frozen weight is the left part of [W | s B]. The layer's own `weight` is a view of it, so there is no second copy.
`refresh` rewrites the right part, and A in the activation dtype, when the adapter has changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from sage_fast.util.deepspeed_private import is_gathered


def padding_for(rank: int, bytes_per_value: int) -> int:
    """Return the padding columns for adapters with a total rank of `rank`.

    In 16 bits, as on GPUs, round up to a multiple of 64 with zero columns, so that rows are whole cache lines: at a
    width that is not a multiple of 16, as with rank 8, Triton's kernels lose their 16-byte accesses. In float32, use
    the rank itself: at the sizes a laptop trains, zero columns would cost 13 % of an iteration.
    """
    return -(-rank // 64) * 64 if bytes_per_value == 2 else rank


@dataclasses.dataclass(frozen=True)
class _Adapter:
    down: Tensor  # A [r, d_in]
    up: Tensor  # B [d_out, r]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


class Projection(nn.Module):
    """Linear layers that read the same rows, run as one matmul.

    The layers' own forwards run instead if there is no adapter, if an adapter is of another kind (DoRA, dropout,
    several at once), or if the layers themselves are trained.

    Args:
        parent: module that holds the layers, also after an adapter has wrapped them.
        names: names of the layers in `parent`; each is an `nn.Linear` or peft's LoRA around one.

    Attributes:
        pad: columns that x must have on its right (`padding_for` the adapters); 0 without adapters.
    """

    def __init__(self, parent: nn.Module, *names: str) -> None:
        super().__init__()
        self.parent, self.names = parent, names
        self.pad = 0
        self._adapters: list[_Adapter | None] = []
        self._columns: list[tuple[int, int, float]] = []  # per adapter: first and last + 1 column of y, scale
        self._weight = self._bias = self._down = torch.empty(0)
        self._seen: list[object] = []

    @property
    def layers(self) -> list[Any]:
        """The layers as they are now, wrapped or not."""
        return [getattr(self.parent, name) for name in self.names]

    @torch.no_grad()
    def refresh(self, dtype: torch.dtype) -> None:
        """Rebuild the fused weight if an adapter changed. Call before a forward, never during one.

        Changes are detected by autograd's version counters. Code that writes through `p.data` or a raw pointer must
        increment them (`torch.autograd.graph.increment_version`), as the engine does after every update.

        Args:
            dtype: dtype of the activations. Layers stored in another dtype run their own forward, under autocast.
        """
        layers = self.layers
        seen = [dtype, *(signature for layer in layers for signature in _signature(layer))]
        if seen == self._seen:
            return
        self._seen = []  # stays empty if anything below fails
        adapters, bases = [_adapter(layer) for layer in layers], [_base(layer) for layer in layers]
        alone = any(
            (adapter is None and base is not layer)
            or base.weight.dtype != dtype
            or is_gathered(base.weight)  # for its layer's own forward
            or any(p.requires_grad for p in base.parameters())
            for layer, base, adapter in zip(layers, bases, adapters)
        )
        if alone or not any(adapters):
            self.pad, self._adapters, self._seen = 0, [], seen
            return
        if not self._is_joined(bases, adapters):
            self._join(bases, adapters)
        width = self._weight.shape[1] - self.pad
        row, column = 0, width
        self._columns = []
        for base, adapter in zip(bases, adapters):
            rows = slice(row, row + base.out_features)
            if base.bias is not None:
                self._bias[rows].copy_(base.bias)
            if adapter is not None:
                self._weight[rows, column : column + adapter.rank].copy_(adapter.up * adapter.scale)
                self._down[column - width : column - width + adapter.rank].copy_(adapter.down)
                self._columns.append((rows.start, rows.stop, adapter.scale))
                column += adapter.rank
            row = rows.stop
        self._adapters = adapters
        self._seen = [dtype, *(signature for layer in layers for signature in _signature(layer))]

    def _is_joined(self, bases: list[Any], adapters: list[_Adapter | None]) -> bool:
        """Whether `_weight` is laid out for these adapters and its left part is still the layers' weight."""
        if [a and a.rank for a in adapters] != [a and a.rank for a in self._adapters]:
            return False
        parts = self._weight.split([base.out_features for base in bases])
        return all(
            (part.data_ptr(), part.dtype) == (base.weight.data_ptr(), base.weight.dtype)
            for part, base in zip(parts, bases)
        )

    def _join(self, bases: list[Any], adapters: list[_Adapter | None]) -> None:
        like, width = bases[0].weight, bases[0].in_features
        self.pad = padding_for(sum(a.rank for a in adapters if a is not None), like.itemsize)
        rows = [base.out_features for base in bases]
        self._weight, self._bias = like.new_zeros(sum(rows), width + self.pad), like.new_zeros(sum(rows))
        self._down = like.new_zeros(self.pad, width)
        for base, part in zip(bases, self._weight.split(rows)):
            part[:, :width].copy_(base.weight)
            base.weight.data = part[:, :width]

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., d_in + pad]` to the layers' outputs side by side, `[..., d_out]`; overwrites the padding in x."""
        if not self.pad:
            ys = [layer(x) for layer in self.layers]
            return torch.cat(ys, dim=-1) if len(ys) > 1 else ys[0]
        factors = [factor for a in self._adapters if a is not None for factor in (a.down, a.up)]
        return _OneSum.apply(x, self._down, self._weight, self._bias, self._columns, *factors)


def _signature(layer: Any) -> tuple[object, ...]:
    """Return a value that changes with the layer or its adapter. Keep it fast: it runs per layer and forward."""
    modules = layer._modules
    base = modules.get("base_layer", layer)
    weight, bias = base._parameters["weight"], base._parameters["bias"]
    own = (layer, weight.data_ptr(), weight.dtype, weight.requires_grad, None if bias is None else bias._version)
    if base is layer:
        return own
    factors = (m._parameters["weight"] for name in ("lora_A", "lora_B") for m in modules[name].children())
    switches = (layer._disable_adapters, list(layer._active_adapter), list(layer.merged_adapters))
    return (*own, *switches, list(layer.scaling.values()), [(f, f.data_ptr(), f._version) for f in factors])


def _base(layer: nn.Module) -> Any:
    return layer.base_layer if isinstance(layer, LoraLinear) else layer


def _adapter(layer: nn.Module) -> _Adapter | None:
    """Return the layer's one active adapter; None if merged, disabled, or with dropout, bias or a variant (DoRA)."""
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


def _mm_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32. CUDA's matmul writes its float32 sums; the CPU's rounds them to the dtype of a first."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else (a @ b).float()


class _OneSum(torch.autograd.Function):
    """Computes y = [x | x A^T] [W | s B]^T + bias, for x with padding columns on its right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, *rest: Any) -> Tensor:
        """`down` and `weight` hold the factors, A and B of each adapter, in the dtype of x."""
        # Dynamo drops ctx if a call passes as many arguments as there are parameters, hence *rest.
        weight, bias, columns, *factors = rest
        width = down.shape[1]
        if torch.compiler.is_compiling():  # Dynamo does not support a strided `out=`
            x[..., width:] = F.linear(x[..., :width], down)
        else:
            rows = x.view(-1, x.shape[-1])
            torch.mm(rows[:, :width], down.t(), out=rows[:, width:])
        ctx.save_for_backward(x, down, weight)
        ctx.columns, ctx.ranks = columns, [len(a) for a in factors[::2]]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, weight = ctx.saved_tensors  # read once: under checkpointing this triggers the recomputation
        width, shape = down.shape[1], x.shape
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            dx = grad @ weight
            inner = dx[:, width:]
        else:  # in the first block
            dx, inner = None, grad @ weight[:, width:]
        ddown = _mm_in_float32(inner.t(), x[:, :width])
        if dx is not None:
            dx[:, :width].addmm_(inner, down)
            dx = dx.view(shape)
        factors: list[Tensor | None] = []
        column = width
        for (first, last, scale), rank, needed in zip(ctx.columns, ctx.ranks, ctx.needs_input_grad[6::2]):
            rows = slice(column, column + rank)
            dup = scale * _mm_in_float32(grad[:, first:last].t(), x[:, rows]) if needed else None
            factors += [ddown[rows.start - width : rows.stop - width], dup]
            column += rank
        return dx, None, None, None, None, *factors


class _Gelu(torch.autograd.Function):
    """GELU (tanh) written into padded rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad: int) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] + pad)
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out[..., : x.shape[-1]])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad[..., : x.shape[-1]], x, approximate="tanh"), None


def gelu(x: Tensor, pad: int) -> Tensor:
    """Return GELU (tanh) of `[..., d]` as `[..., d + pad]`."""
    if not pad or torch.compiler.is_compiling():  # Inductor fuses this into one pass
        return padded(F.gelu(x, approximate="tanh"), pad)
    return _Gelu.apply(x, pad)


class _Padded(torch.autograd.Function):
    """Copies into padded rows; the backward copies nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad: int) -> Tensor:
        ctx.width = x.shape[-1]
        out = x.new_empty(*x.shape[:-1], x.shape[-1] + pad)
        out[..., : x.shape[-1]] = x
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., : ctx.width], None


def padded(x: Tensor, pad: int) -> Tensor:
    """Copy `[..., d]` into `[..., d + pad]`."""
    if not pad:
        return x
    return F.pad(x, (0, pad)) if torch.compiler.is_compiling() else _Padded.apply(x, pad)
