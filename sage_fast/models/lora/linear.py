"""Fused base + LoRA linear: one matmul with float32 accumulation.

    y = [x | x A^T] [W | s B]^T + bias          dx = [dy | dy s B] [W ; A]

peft, like any implementation that adds s (x A^T) B^T onto W x, adds to a value that is already
rounded. In bfloat16 a change below half a unit in the last place is lost, and a young adapter's
changes are that small. Here the adapter joins the sum before rounding (`local_device` keeps cuBLAS
from rounding parts of it) and costs no extra pass over x or y: the operator that produces x
allocates `pad` columns for x A^T. Layers that read the same x (queries, keys, values) share one
matmul.

One buffer holds W, s B on its right and A below it. The layer's own `weight` is a view of it, so
there is no second copy. `refresh` rewrites s B, and A in the activation dtype, when the adapter has
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sage_fast.models.checkpointing import is_recomputing
from sage_fast.ops._derivatives import first_order
from sage_fast.ops.adapter_rows import mm_in_float32
from sage_fast.ops.gated_sum import gated_sum
from sage_fast.util.errors import UserError

CHANGED = (
    "adapters of streamed blocks are neither disabled, merged nor replaced, and their policy is "
    "not copied; Policy.using swaps their weights, and model.stream_blocks = 0 allows all of it"
)


def padding_for(rank: int, bytes_per_value: int) -> int:
    """Return the padding columns for adapters with a total rank of `rank`.

    In 16 bits, as on GPUs, round up to a multiple of 64 with zero columns, so that rows are whole
    cache lines: at a width that is not a multiple of 16, as with rank 8, Triton's kernels lose
    their 16-byte accesses. In float32, use the rank itself: zero columns would be a large part of
    the rows at the sizes that a laptop trains.
    """
    return -(-rank // 64) * 64 if bytes_per_value == 2 else rank


def _nothing() -> None:
    pass


class _Adapter(NamedTuple):
    down: Tensor  # A [r, d_in]
    up: Tensor  # B [d_out, r]
    scale: float


class FusedLinear(nn.Module):
    """Linear layers that read the same rows, run as one matmul.

    The layers' own forwards run instead if an adapter is of another kind (DoRA, dropout, several at
    once), if a layer with an adapter is trained itself, or if a layer with an adapter is sharded
    (ZeRO-3).

    Args:
        parent: module that holds the layers, also after an adapter has wrapped them.
        names: names of the layers in `parent`; each is an `nn.Linear` or peft's LoRA around one.

    Attributes:
        pad: columns that x must have on its right (`padding_for` the adapters); 0 without adapters.
        before_write: called before `refresh` writes into the buffer, which may be in host memory
            while copies of it are under way (models/streaming.py).
        is_streamed: whether a slot on the device has the layout of the buffer, which then stays.
    """

    def __init__(self, parent: nn.Module, *names: str) -> None:
        super().__init__()
        self.parent = parent
        self.names = names
        self.pad = 0
        self._adapters: list[_Adapter | None] = []
        # per adapter: first and last + 1 column of y, scale
        self._columns: list[tuple[int, int, float]] = []
        self._buffer = self._bias = torch.empty(0)
        self._seen: list[object] = []
        self.before_write: Callable[[], None] = _nothing
        self.is_streamed = False

    @property
    def layers(self) -> list[Any]:
        """The layers as they are now, wrapped or not."""
        return [getattr(self.parent, name) for name in self.names]

    @torch.no_grad()
    def refresh(self, dtype: torch.dtype) -> None:
        """Rebuild the fused weight if an adapter changed. Call before a forward, never during one.

        Changes are detected by autograd's version counters. Code that writes through `p.data` or a
        raw pointer must increment them (`torch.autograd.graph.increment_version`), as the engine
        does after every update.

        Args:
            dtype: dtype of the activations. Layers stored in another dtype run their own forward,
                under autocast.

        Raises:
            UserError: the layer is streamed, and its adapters would take another layout.
        """
        layers = self.layers
        seen = [dtype, *(signature for layer in layers for signature in _signature(layer))]
        if seen == self._seen:
            return
        self._seen = []  # stays empty if anything below fails
        adapters = [_adapter(layer) for layer in layers]
        bases = [_base(layer) for layer in layers]
        alone = any(
            (adapter is None and base is not layer)
            or base.weight.dtype != dtype
            # a shard: there is no weight to join until its block runs
            or isinstance(base.weight, DTensor)
            or any(p.requires_grad for p in base.parameters())
            for layer, base, adapter in zip(layers, bases, adapters)
        )
        if alone or not any(adapters):
            adapters = []
        is_joined = self._is_joined(bases, adapters) if adapters else not self._adapters
        if self.is_streamed and not is_joined:
            raise UserError(CHANGED)
        if not adapters:
            self.pad = 0
            self._adapters = []
            self._seen = seen
            return
        if not is_joined:
            self._join(bases)
        self.before_write()
        height, width = (size - self.pad for size in self._buffer.shape)
        row, column = 0, 0
        self._columns = []
        for base, adapter in zip(bases, adapters):
            rows = slice(row, row + base.out_features)
            if base.bias is not None:
                self._bias[rows].copy_(base.bias)
            if adapter is not None:
                columns = slice(column, column + len(adapter.down))
                self._buffer[rows, width:][:, columns].copy_(adapter.up * adapter.scale)
                self._buffer[height:, :width][columns].copy_(adapter.down)
                self._columns.append((rows.start, rows.stop, adapter.scale))
                column += len(adapter.down)
            row = rows.stop
        self._adapters = adapters
        self._seen = [dtype, *(signature for layer in layers for signature in _signature(layer))]

    def buffer_shape(self, itemsize: int) -> tuple[int, int] | None:
        """Return the shape of the buffer for the present adapters, with values of `itemsize` bytes;
        None without adapters."""
        ranks = [len(adapter.down) for adapter in map(_adapter, self.layers) if adapter is not None]
        if not ranks:
            return None
        pad = padding_for(sum(ranks), itemsize)
        height = sum(len(weight) for weight in self.weights)
        return height + pad, self.weights[0].shape[1] + pad

    @property
    def weights(self) -> list[Tensor]:
        """The layers' own weights; with adapters, views of the buffer."""
        return [_base(layer).weight for layer in self.layers]

    def release(self, device: torch.device) -> None:
        """Forget a buffer on the device, so that the layers' weights alone hold its memory;
        `refresh` makes another one."""
        self._seen = []
        if self._buffer.device == device:
            self.pad = 0
            self._adapters = []
            self._buffer = self._bias = torch.empty(0)

    def use_buffer(self, buffer: Tensor) -> None:
        """Use another buffer, which holds the same values; the layers' weights become views of
        it."""
        rows = [len(weight) for weight in self.weights]
        width = buffer.shape[1] - self.pad
        for weight, part in zip(self.weights, buffer[: sum(rows)].split(rows)):
            weight.data = part[:, :width]
        self._buffer = buffer

    def _is_joined(self, bases: list[Any], adapters: list[_Adapter | None]) -> bool:
        """Whether `_buffer` is laid out for these adapters and its left part is still the layers'
        weight."""
        if _ranks(adapters) != _ranks(self._adapters):
            return False
        parts = self._buffer[: len(self._buffer) - self.pad].split(
            [base.out_features for base in bases]
        )
        return all(
            (part.data_ptr(), part.dtype) == (base.weight.data_ptr(), base.weight.dtype)
            for part, base in zip(parts, bases)
        )

    def _join(self, bases: list[Any]) -> None:
        like, width = bases[0].weight, bases[0].in_features
        shape = self.buffer_shape(like.itemsize)
        assert shape is not None, "there is an adapter"
        self.pad = shape[1] - width
        rows = [base.out_features for base in bases]
        self._buffer = like.new_zeros(shape)
        # a matrix may be in host memory, and never a bias
        devices = [base.bias.device for base in bases if base.bias is not None]
        device = devices[0] if devices else like.device
        self._bias = torch.zeros(sum(rows), dtype=like.dtype, device=device)
        for base, part in zip(bases, self._buffer[: sum(rows)].split(rows)):
            part[:, :width].copy_(base.weight)
            base.weight.data = part[:, :width]

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., d_in + pad]` to the layers' outputs side by side, `[..., d_out]`; overwrites
        the padding in x."""
        return self._fused(x, is_padded=True) if self.pad else self._plain(x)

    def _plain(self, x: Tensor) -> Tensor:
        """Run layers that have no adapter, as one matmul if all of their weights can be read
        here."""
        layers = self.layers
        if len(layers) == 1:
            return layers[0](x)
        if not all(_is_at_hand(layer) for layer in layers):
            return torch.cat([layer(x) for layer in layers], dim=-1)
        weight, bias = (
            torch.cat([getattr(layer, key).to(x.dtype) for layer in layers])
            for key in ("weight", "bias")
        )
        return F.linear(x, weight, bias)

    def unpadded(self, x: Tensor) -> Tensor:
        """Map `[B, S, d_in]` like `forward`, without padding in x.

        The backward keeps x itself, which costs nothing where others keep it too, as attention
        keeps its output.
        """
        return self._fused(x, is_padded=False) if self.pad else self(x)

    @property
    def factors(self) -> list[Tensor]:
        """A and B of each adapter."""
        return [factor for a in self._adapters if a is not None for factor in (a.down, a.up)]

    @property
    def ranks(self) -> list[int]:
        """Rank of each adapter."""
        return [len(a.down) for a in self._adapters if a is not None]

    def _fused(self, x: Tensor, is_padded: bool) -> Tensor:
        return _FusedLoraLinear.apply(
            x, self._buffer, self._bias, self._columns, is_padded, torch.is_grad_enabled(),
            *self.factors,
        )  # fmt: skip


def linears_of(module: nn.Module) -> list[FusedLinear]:
    """Return the fused linears of a module."""
    return [part for part in module.modules() if isinstance(part, FusedLinear)]


def _ranks(adapters: Sequence[_Adapter | None]) -> list[int | None]:
    """Return the rank of each adapter; None for a layer without one."""
    return [None if adapter is None else len(adapter.down) for adapter in adapters]


def _signature(layer: Any) -> tuple[object, ...]:
    """Return a value that changes with the layer or its adapter.

    Keep it fast: it runs per layer and forward.
    """
    modules = layer._modules
    base = modules.get("base_layer", layer)
    weight, bias = base._parameters["weight"], base._parameters["bias"]
    own = (
        layer,
        weight.data_ptr(),
        weight.dtype,
        weight.requires_grad,
        None if bias is None else bias._version,
    )
    if base is layer:
        return own
    factors = (
        m._parameters["weight"] for name in ("lora_A", "lora_B") for m in modules[name].children()
    )
    switches = (layer._disable_adapters, list(layer._active_adapter), list(layer.merged_adapters))
    return (
        *own,
        *switches,
        list(layer.scaling.values()),
        [(f, f.data_ptr(), f._version) for f in factors],
    )


def _base(layer: nn.Module) -> Any:
    return layer.base_layer if isinstance(layer, LoraLinear) else layer


def _adapter(layer: nn.Module) -> _Adapter | None:
    """Return the layer's one active adapter; None if merged, disabled, or with dropout, bias or a
    variant (DoRA)."""
    if (
        not isinstance(layer, LoraLinear)
        or layer.merged
        or layer.disable_adapters
        or len(layer.active_adapters) != 1
    ):
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


def _views(buffer: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Return [W | s B] and A, views of a fused linear's buffer."""
    height, width = (size - pad for size in buffer.shape)
    return buffer[:height], buffer[height:, :width]


def _write_product(x: Tensor, down: Tensor) -> None:
    """Write x A^T into the padding columns of x."""
    width = down.shape[1]
    rows = x.view(-1, x.shape[-1])
    torch.mm(rows[:, :width], down.t(), out=rows[:, width:])


def _input_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, down: Tensor, needed: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients in [x | x A^T], `[R, d + pad]` (None unless `needed`), and in A, float32
    `[pad, d]`, for x `[R, d]`.

    dy [W | s B] holds dy s B, so that dy is read once; (dy s B) A is then added. Where dy is wider
    than x, this reads less than one matmul after a pass for dy s B.
    """
    width = down.shape[1]
    if needed:
        dx = grad @ weight
        inner = dx[:, width:]
    else:  # in the first block
        dx, inner = None, grad @ weight[:, width:]
    ddown = mm_in_float32(inner.t(), x)
    if dx is not None:
        dx[:, :width].addmm_(inner, down)
    return dx, ddown


def _factor_gradients(
    grad: Tensor,
    product: Tensor,
    ddown: Tensor,
    columns: Sequence[tuple[int, int, float]],
    ranks: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients in A and B of each adapter.

    Args:
        grad: dy `[R, d_out]`.
        product: x A^T `[R, pad]`.
        ddown: float32 `[pad, d]`, the gradient in all A.
        columns, ranks: of each adapter; `FusedLinear._columns`.
        needed: whether each B needs its gradient.
    """
    factors: list[Tensor | None] = []
    row = 0
    for (first, last, scale), rank, is_needed in zip(columns, ranks, needed):
        own = slice(row, row + rank)
        dup = None
        if is_needed:
            dup = scale * mm_in_float32(grad[:, first:last].t(), product[:, own])
        factors += [ddown[own], dup]
        row += rank
    return factors


class _FusedLoraLinear(torch.autograd.Function):
    """Computes y = [x | x A^T] [W | s B]^T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, *rest: Any) -> Tensor:
        """`buffer` holds the factors, A and B of each adapter, in the dtype of x.

        `is_padded` says whether x has columns for x A^T on its right; `trains`, whether there will
        be a backward.
        """
        bias, columns, is_padded, trains, *factors = rest
        ctx.pad = len(buffer) - len(bias)
        ctx.columns = columns
        ctx.ranks = [len(a) for a in factors[::2]]
        ctx.is_padded = is_padded
        weight, down = _views(buffer, ctx.pad)
        if is_padded:
            _write_product(x, down)
            rows = x
        else:
            rows = torch.ops.sage_fast.adapter_rows(x, down, False)
        if trains:
            width = down.shape[1]
            product = rows[..., width:]
            # Beside an x of its own, a copy of the product frees the rows.
            kept = (x[..., :width], product) if is_padded else (x, product.contiguous())
            ctx.save_for_backward(*kept, buffer)
        return F.linear(rows, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # read once: under checkpointing this triggers the recomputation
        x, product, buffer = ctx.saved_tensors
        *batch, width = x.shape
        grad, x, product = (t.flatten(0, -2) for t in (grad, x, product))
        dx, ddown = _input_gradients(grad, x, *_views(buffer, ctx.pad), ctx.needs_input_grad[0])
        factors = _factor_gradients(
            grad, product, ddown, ctx.columns, ctx.ranks, ctx.needs_input_grad[7::2]
        )
        if dx is not None:
            columns = dx.shape[1] if ctx.is_padded else width
            dx = dx[:, :columns].unflatten(0, batch)
        return dx, *[None] * 5, *factors


def project_streams(
    x: Tensor, counts: Sequence[int], projections: Sequence[FusedLinear | None]
) -> list[Any]:
    """Map each stream of x by its own layer, as `FusedLinear.unpadded` does.

    The backward writes the streams' gradients into one tensor. The backward of `split` would copy
    them there.

    Args:
        x: `[B, S, d]`, streams of `counts` tokens one after the other.
        projections: the layer of each stream; None where nothing reads the result, which is None.
    """
    present = [projection for projection in projections if projection is not None]
    if all(projection.pad for projection in present):
        factors = [factor for projection in present for factor in projection.factors]
        trains = torch.is_grad_enabled()
        return [*_LoraStreams.apply(x, counts, projections, trains, *factors)]

    parts = x.split(list(counts), dim=1)
    layers = [layer for projection in present for layer in projection.layers]
    if x.requires_grad and all(map(_is_at_hand, layers)):
        # The layers see no gradient in x: `_PlainStreams` computes it.
        results = [
            None if projection is None else projection(part.detach())
            for part, projection in zip(parts, projections)
        ]
        weights = [layer.weight for layer in layers]
        return [*_PlainStreams.apply(x, counts, *results, *weights)]
    return [
        None if projection is None else projection.unpadded(part)
        for part, projection in zip(parts, projections)
    ]


def _rows_of(stream: Tensor) -> Tensor:
    """Return `[R, d]` to write the rows of `[B, N, d]` to: a view where it is one matrix, as it is
    of one sample."""
    if len(stream) == 1:
        return stream[0]
    return stream.new_empty(stream.shape[0] * stream.shape[1], stream.shape[2])


def _write_rows(stream: Tensor, rows: Tensor) -> None:
    """Copy rows into the stream, unless they are its view."""
    if len(stream) > 1:
        stream.copy_(rows.view(stream.shape))


class _LoraStreams(torch.autograd.Function):
    """`_FusedLoraLinear` of each stream, without padding in x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        counts: Sequence[int],
        projections: Sequence[FusedLinear | None],
        trains: bool,
        *factors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.counts = counts
        ctx.layouts = [None if p is None else (p.pad, p._columns, p.ranks) for p in projections]
        results: list[Tensor | None] = []
        kept: list[Tensor] = []
        for part, projection in zip(x.split(list(counts), dim=1), projections):
            if projection is None:
                results.append(None)
                continue
            weight, down = _views(projection._buffer, projection.pad)
            rows = torch.ops.sage_fast.adapter_rows(part, down, False)
            if trains:
                # A copy of the product frees the rows.
                kept += [rows[..., down.shape[1] :].contiguous(), projection._buffer]
            results.append(F.linear(rows, weight, projection._bias))
        if trains:
            ctx.save_for_backward(x, *kept)
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # read once: under checkpointing this triggers the recomputation
        x, *kept = ctx.saved_tensors
        dx = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        needed = list(ctx.needs_input_grad[5::2])
        factors: list[Tensor | None] = []
        start = 0
        for grad, layout, count in zip(grads, ctx.layouts, ctx.counts):
            tokens = slice(start, start + count)
            start += count
            into = None if dx is None else dx[:, tokens]
            if layout is None:
                if into is not None:
                    into.zero_()
                continue
            pad, columns, ranks = layout
            product, buffer, *kept = kept
            asked, needed = needed[: len(ranks)], needed[len(ranks) :]
            if grad is None:
                factors += [None] * 2 * len(ranks)
                if into is not None:
                    into.zero_()
                continue
            rows, product, part = (t.flatten(0, -2) for t in (grad, product, x[:, tokens]))
            weight, down = _views(buffer, pad)
            width = down.shape[1]
            # dy s B apart from dy W, which is the tensor of all streams
            inner = rows @ weight[:, width:]
            ddown = mm_in_float32(inner.t(), part)
            if into is not None:
                written = _rows_of(into)
                torch.mm(rows, weight[:, :width], out=written)
                written.addmm_(inner, down)
                _write_rows(into, written)
            factors += _factor_gradients(rows, product, ddown, columns, ranks, asked)
        return dx, None, None, None, *factors


class _PlainStreams(torch.autograd.Function):
    """The results of plain layers as they are; the backward adds the gradient in x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Sequence[int], *rest: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.counts = counts
        results = rest[: len(counts)]
        ctx.present = [result is not None for result in results]
        ctx.like = x.shape, x.dtype, x.device
        ctx.save_for_backward(*rest[len(counts) :])
        return tuple(None if result is None else result.view_as(result) for result in results)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        weights = ctx.saved_tensors  # read once: under checkpointing this recomputes
        unread = iter(weights)
        shape, dtype, device = ctx.like
        dx = torch.empty(shape, dtype=dtype, device=device)
        for into, grad, is_present in zip(dx.split(list(ctx.counts), dim=1), grads, ctx.present):
            weight = next(unread) if is_present else None
            if weight is None or grad is None:
                into.zero_()
                continue
            written = _rows_of(into)
            torch.mm(grad.flatten(0, -2), weight.to(grad.dtype), out=written)
            _write_rows(into, written)
        return dx, None, *grads, *[None] * len(weights)


class _FeedForward(torch.autograd.Function):
    """Computes stream + gate down(gelu(up(x))), each as in `_FusedLoraLinear`; `adapter_rows` lies
    between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor, gate: Tensor, *rest: Any) -> Tensor:
        up_buffer, up_bias, buffer, bias, up_scale, scale, trains, *factors = rest
        up_a, _, a, _ = factors
        ctx.up_scale = up_scale
        ctx.scale = scale
        ctx.up_pad = len(up_buffer) - len(up_bias)
        ctx.pad = len(buffer) - len(bias)
        ctx.up_rank = len(up_a)
        ctx.rank = len(a)
        up_weight, up_down = _views(up_buffer, ctx.up_pad)
        weight, down = _views(buffer, ctx.pad)
        _write_product(x, up_down)
        inner = F.linear(x, up_weight, up_bias)
        hidden = torch.ops.sage_fast.adapter_rows(inner, down, True)
        # Of the hidden rows the backward reads only their product: a copy frees the others.
        kept = [inner, hidden[..., down.shape[1] :].contiguous()] if trains else []
        # four times as wide as the stream: without gradients it does not outlive its reader
        del inner
        needs_y = ctx.needs_input_grad[2]
        # tensors are saved when this returns: checkpointing cannot stop it before
        unread = is_recomputing()
        y = None if unread and not needs_y else F.linear(hidden, weight, bias)
        del hidden
        ctx.save_for_backward(x, up_buffer, buffer, gate, *kept, *([y] if needs_y else []))
        if unread:
            # any tensor: selective checkpointing allows no new operator here but `detach`
            return buffer.detach()
        total: Tensor = torch.ops.sage_fast.gated_sum(stream, y, gate)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, up_buffer, buffer, gate, inner, product, *kept = ctx.saved_tensors
        shape, (height, width) = x.shape, (size - ctx.pad for size in buffer.shape)
        dgate = (
            torch.ops.sage_fast.gated_sum_backward(grad, gate, kept[0])[1].to(gate.dtype)
            if kept
            else None
        )
        # dy is narrower than the hidden rows: dy s B is computed first, and [dy | dy s B] [W ; A]
        # is one matmul.
        rows = torch.ops.sage_fast.adapter_rows(
            grad, buffer[:height, width:].t(), False, gate
        ).flatten(0, 1)
        x, inner, product = (t.flatten(0, 1) for t in (x, inner, product))
        dup = ctx.scale * mm_in_float32(rows[:, :height].t(), product[:, : ctx.rank])
        up_product = x[:, x.shape[1] - ctx.up_pad :][:, : ctx.up_rank]
        d_inner = rows @ buffer[:, :width]  # of hidden, until the operator overwrites it
        ddown, up_dup = torch.ops.sage_fast.adapter_rows_backward(
            d_inner, rows[:, height:], inner, up_product
        )
        del rows  # as large as the gradient that follows
        up_views = _views(up_buffer, ctx.up_pad)
        dx, up_ddown = _input_gradients(
            d_inner, x[:, : x.shape[1] - ctx.up_pad], *up_views, ctx.needs_input_grad[0]
        )
        factors = up_ddown[: ctx.up_rank], ctx.up_scale * up_dup, ddown[: ctx.rank], dup
        return None if dx is None else dx.view(shape), grad, dgate, *[None] * 7, *factors


class _GeluBiasGrad(torch.autograd.Function):
    """GELU (tanh) of x = rows W^T + bias; its backward, which holds dx, also sums it to the
    gradient of the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        hidden = F.gelu(x, approximate="tanh")
        ctx.save_for_backward(x)
        ctx.dtype = bias.dtype
        return hidden

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = ctx.saved_tensors[0].flatten(0, -2)
        dx = grad.contiguous()  # of a matmul, so no one else's: it is overwritten
        rows = dx.view(x.shape)
        ones = rows.new_ones(1, 1).expand(len(rows), 1)
        _, sums = torch.ops.sage_fast.adapter_rows_backward(rows, rows[:, :0], x, ones)
        return dx, sums[:, 0].to(ctx.dtype)


class FeedForward(nn.Module):
    """diffusers' FeedForward with tanh GELU, and the gated residual after it: the end of a block.

    Args:
        up, down: the two layers.
    """

    def __init__(self, up: FusedLinear, down: FusedLinear) -> None:
        super().__init__()
        self.up = up
        self.down = down

    def forward(self, x: Tensor, stream: Tensor, gate: Tensor) -> Tensor:
        """Return stream + gate down(gelu(up(x))).

        In a recomputation (`is_recomputing`) the result is another tensor, of another shape:
        nothing may read it.

        Args:
            x: `[B, S, d + up.pad]`; its padding is overwritten.
            stream: `[B, S, d]`.
            gate: `[B, d]`.
        """
        up, down = self.up, self.down
        if up.pad and down.pad:
            return _FeedForward.apply(
                x, stream, gate, up._buffer, up._bias, down._buffer, down._bias, up._columns[0][2],
                down._columns[0][2],
                torch.is_grad_enabled(), *up.factors, *down.factors,
            )  # fmt: skip
        (layer,) = up.layers
        if _is_at_hand(layer) and layer.bias.requires_grad:
            hidden = _GeluBiasGrad.apply(F.linear(x, layer.weight, layer.bias.detach()), layer.bias)
        else:
            hidden = F.gelu(up(x), approximate="tanh")
        return gated_sum(stream, down.unpadded(hidden), gate)

    omits_last_matmul = forward


def _is_at_hand(layer: nn.Module) -> bool:
    """Whether the layer's weights can be read past its own forward: it is plain."""
    return type(layer) is nn.Linear and layer.bias is not None
