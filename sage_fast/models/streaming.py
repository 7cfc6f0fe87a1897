"""Blocks whose frozen weights stay in host memory and pass through the device
(`model.stream_blocks`).

A copy stream brings the weights of a block into one of two slots on the device while the block
before it computes. The forward, the recomputation and the backward read the same bits as from
weights that stay, so every result is the same. Adapters, biases and norms stay on the device.

    host memory     block 3 | block 8 | block 13 | ...     page-locked, laid out as the slots are
    device          slot 0: block 3     slot 1: block 8     (while block 3 computes)

A fused linear is copied as its one buffer (`models.lora.linear`): the frozen matrix, s B beside it
and A below it.

Order on a GPU. A copy waits until all that was enqueued before it is done, so the block that read
the slot has finished; a block waits for the copy of its own weights. What is enqueued between the
start of one block and the start of the next belongs to the first, also in a backward: autograd runs
the nodes that were recorded last before all others, and a block is recorded after those before it.

Without recomputation the backward needs a matrix long after its slot has gone to another block. So
autograd keeps the place of the matrix, and the backward fetches it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from sage_fast.models.checkpointing import is_checkpointed, reads_no_results, unseen
from sage_fast.models.lora.linear import FusedLinear, linears_of
from sage_fast.models.policy import Policy

SLOTS = 2
"""Blocks that are on the device at a time: the one that computes, and the next one."""
ALIGNMENT = 256
"""Bytes to which a tensor's beginning in a slot is aligned, as PyTorch aligns allocations."""
HOST_PIECE = 2**30
"""Bytes of one allocation of page-locked memory at most: PyTorch rounds each up to a power of two.
"""


def spread(count: int, blocks: int) -> list[int]:
    """Return the indices of `count` streamed blocks of `blocks`, far from each other: the copy of
    one then has the time of all blocks between them."""
    return [(2 * i + 1) * blocks // (2 * count) for i in range(count)]


@dataclasses.dataclass(kw_only=True)
class _Place:
    """Where a streamed tensor is read from.

    Attributes:
        holder: the fused linear whose buffer it is, or the module whose parameter it is.
        key: name of that parameter; empty for a buffer.
        host: the tensor in host memory.
        start: its first byte in a slot.
    """

    holder: Any
    key: str
    host: Tensor
    start: int = 0

    def view(self, slot: Tensor) -> Tensor:
        """Return the tensor in a slot, whose bytes are `slot`."""
        found = slot[self.start : self.start + self.host.nbytes]
        return found.view(self.host.dtype).view(self.host.shape)

    def show(self, tensor: Tensor) -> None:
        """Let the module read `tensor`."""
        if not self.key:
            self.holder._buffer = tensor
        elif isinstance(tensor, nn.Parameter):
            self.holder._parameters[self.key] = tensor
        else:
            self.holder._parameters[self.key] = nn.Parameter(tensor, requires_grad=False)

    def rehouse(self, host: Tensor) -> None:
        """Have the tensor at another place of host memory, where its values already are."""
        if self.key:
            self.host.data = host
        else:
            self.holder.use_buffer(host)
            self.host = host


def _places(module: nn.Module) -> list[_Place]:
    """Return the places of a module's frozen matrices, one after the other in a slot.

    Vectors stay on the device: biases and the weights of norms are small, and many.
    """
    places = []
    joined = set()
    for linear in linears_of(module):
        if linear.pad:
            places.append(_Place(holder=linear, key="", host=linear._buffer))
            joined |= {id(weight) for weight in linear.weights}
    for part, key, matrix in _frozen_matrices(module):
        if id(matrix) not in joined:
            places.append(_Place(holder=part, key=key, host=matrix))
    start = 0
    for place in places:
        place.start = start
        start += _aligned(place.host.nbytes)
    return places


def _frozen_matrices(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return (module that holds it, name there, matrix) of all frozen matrices but those of
    adapters."""
    adapters = set()
    for part in module.modules():
        if isinstance(part, LoraLinear):
            adapters |= {id(p) for name, p in part.named_parameters() if name.startswith("lora_")}
    found = {}  # by identity: a module may be reached by two names
    for part in module.modules():
        for key, p in part._parameters.items():
            if p is not None and not p.requires_grad and p.ndim >= 2 and id(p) not in adapters:
                found[id(p)] = (part, key, p)
    return [*found.values()]


def _aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def _size(places: Sequence[_Place]) -> int:
    """Return the bytes of a module's places in a slot."""
    return sum(_aligned(place.host.nbytes) for place in places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Bytes of one block.

    Attributes:
        frozen: frozen matrices, which leave the device if the block is streamed.
        copies: what the buffers of its fused linears hold beside the matrices: copies of the
            adapters in the dtype of the activations.
        host: what is in host memory if it is streamed.
        forward: what a forward copies then: no layers that are read once a schedule.
        largest: the largest unit, which a slot holds.
    """

    frozen: int
    copies: int
    host: int
    forward: int
    largest: int


def fused_linears(policy: Policy) -> list[FusedLinear]:
    """Return the fused linears of all blocks."""
    found = []
    for chain in policy.streamed_units(range(len(policy.block_list()))):
        for unit in chain:
            found += linears_of(unit)
    return found


def block_sizes(policy: Policy, itemsize: int) -> list[BlockSizes]:
    """Return the bytes of each block, with frozen weights of `itemsize` bytes an element.

    Args:
        policy: on any device, including meta; of any dtype.
    """
    found = []
    for index in range(len(policy.block_list())):
        chains = policy.streamed_units([index])
        block = chains[-1][0]
        units = [unit for chain in chains for unit in chain]
        frozen = 0
        for unit in units:
            for _, _, matrix in _frozen_matrices(unit):
                frozen += itemsize * matrix.numel()
        sizes = [_planned_size(unit, itemsize) for unit in units]
        unaligned = sum(_planned_size(unit, itemsize, alignment=1) for unit in units)
        sizes_of_block = BlockSizes(
            frozen=frozen,
            copies=unaligned - frozen,
            host=sum(sizes),
            forward=_planned_size(block, itemsize),
            largest=max(sizes),
        )
        found.append(sizes_of_block)
    return found


def _planned_size(module: nn.Module, itemsize: int, alignment: int = ALIGNMENT) -> int:
    """Return the bytes of a module's places, as `_size` does once its fused linears are joined."""
    total = 0
    joined = set()
    for linear in linears_of(module):
        shape = linear.buffer_shape(itemsize)
        if shape is not None:
            total += _aligned(math.prod(shape) * itemsize, alignment)
            joined |= {id(weight) for weight in linear.weights}
    for _, _, matrix in _frozen_matrices(module):
        if id(matrix) not in joined:
            total += _aligned(matrix.numel() * itemsize, alignment)
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSizes:
    """Bytes of a policy of which some blocks are streamed, perhaps none.

    Attributes:
        host: page-locked memory of a rank.
        slots: the slots on the device.
        leaving: frozen matrices that are not on the device.
        copies: copies of the adapters in the fused linears of the other blocks.
        forward: what a forward copies to the device.
    """

    host: int = 0
    slots: int = 0
    leaving: int = 0
    copies: int = 0
    forward: int = 0


def stream_sizes(blocks: Sequence[BlockSizes], count: int) -> StreamSizes:
    """Return the bytes of a policy that streams `count` of its blocks."""
    chosen = {*spread(count, len(blocks))}
    streamed = [block for index, block in enumerate(blocks) if index in chosen]
    return StreamSizes(
        host=sum(block.host for block in streamed),
        slots=SLOTS * max((block.largest for block in streamed), default=0),
        leaving=sum(block.frozen for block in streamed),
        copies=sum(block.copies for index, block in enumerate(blocks) if index not in chosen),
        forward=sum(block.forward for block in streamed),
    )


class _Slot:
    """Memory of the device for one unit.

    Attributes:
        bytes: the memory, uint8.
        unit: whose tensors are here, or on their way; None: no one's.
        ready: recorded after the copy; None on the CPU, where the copy is done.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.unit: _Unit | None = None
        self.ready: torch.cuda.Event | None = None


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A view of a streamed tensor, as autograd keeps it."""

    unit: _Unit
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int  # in bytes


class _Unit:
    """A module whose frozen matrices are streamed together: a block, or a layer of AdaLN.

    Its hooks let the module read from a slot while it runs.

    Args:
        stream: to which it belongs.
        chain: the chain of modules in which it is.
        index: its position there.
        module: the module.
    """

    def __init__(self, stream: BlockStream, chain: _Chain, index: int, module: nn.Module) -> None:
        self.stream = stream
        self.chain = chain
        self.index = index
        self.places = _places(module)
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        module.register_forward_pre_hook(self.enter)
        # a recomputation ends by an exception once it has what the backward needs
        module.register_forward_hook(self.leave, always_call=True)

    @reads_no_results
    def enter(self, *_: Any) -> None:
        """Let the module read from a slot."""
        slot = self.stream.fetch(self)
        for place in self.places:
            place.show(place.view(slot.bytes))
        # What a checkpoint recomputes is read before the next block, from the same slot.
        if torch.is_grad_enabled() and not is_checkpointed():
            self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._saving.__enter__()

    @reads_no_results
    def leave(self, *_: Any) -> None:
        """Let the module have its tensors in host memory again."""
        if self._saving is not None:
            self._saving.__exit__()
            self._saving = None
        for place in self.places:
            place.show(place.host)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        slot = self.stream.slot_of(self)
        first = slot.bytes.data_ptr()
        start = tensor.data_ptr() - first
        if not 0 <= start < slot.bytes.nbytes:
            return tensor
        return _Saved(self, tensor.dtype, tensor.shape, tensor.stride(), start)

    @staticmethod
    def _unpack(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        slot = saved.unit.stream.fetch(saved.unit)
        values = slot.bytes[saved.start :]
        whole = len(values) // saved.dtype.itemsize * saved.dtype.itemsize
        return values[:whole].view(saved.dtype).as_strided(saved.shape, saved.stride)


class _Chain:
    """Units that a forward calls one after the other, and a backward from the last to the first."""

    def __init__(self, stream: BlockStream, modules: Sequence[nn.Module]) -> None:
        self.units = [_Unit(stream, self, i, module) for i, module in enumerate(modules)]
        self._last = -1  # index of the unit that ran last

    def after(self, unit: _Unit) -> _Unit | None:
        """Return the unit that is likely to run after `unit`; None if `unit` runs on."""
        index, end = unit.index, len(self.units) - 1
        last, self._last = self._last, index
        if index == last:
            return None
        if index == end and end > 0:
            # its backward comes next; without gradients, the next forward
            following = end - 1 if torch.is_grad_enabled() else 0
        elif index < last and index > 0:
            following = index - 1
        else:
            following = min(index + 1, end)
        return self.units[following]


class BlockStream:
    """The streamed units of a policy, and the slots through which they pass.

    Args:
        policy: all of its weights are in host memory; those that are not streamed are moved to the
            device, adapters among them.
        count: blocks to stream, from 1 to all.
        device: where forwards run. On the CPU the same copies are made, at once.

    Attributes:
        count: as given.
        host_bytes: page-locked memory.
        sizes: bytes by the plan.
        slots: through which they pass, the one that is overwritten next first.
        copied_bytes: bytes that copies have brought to the device.
    """

    @torch.no_grad()
    def __init__(self, policy: Policy, count: int, device: torch.device) -> None:
        self.count = count
        self.device = device
        self.copied_bytes = 0
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        blocks = block_sizes(policy, policy.dtype.itemsize)
        chains = policy.streamed_units(spread(count, len(blocks)))
        modules = [module for chain in chains for module in chain]
        _move_others(policy, modules, device)
        policy.refresh()  # joins adapters and their matrices, in host memory

        units = [unit for chain in chains for unit in _Chain(self, chain).units]
        self.host_bytes = _pack_into_host_memory(units, pinned=device.type == "cuda")
        size = max(_size(unit.places) for unit in units)
        self.slots = [_Slot(size, device) for _ in range(SLOTS)]
        if self._copies is not None:
            for slot in self.slots:
                # a copy may be under way when the policy is dropped
                slot.bytes.record_stream(self._copies)
        self.sizes = stream_sizes(blocks, count)
        for module in modules:
            for linear in linears_of(module):
                linear.before_write = self.forget
                linear.is_streamed = True

    def slot_of(self, unit: _Unit) -> _Slot:
        """Return the slot that holds a unit which is running."""
        return next(slot for slot in self.slots if slot.unit is unit)

    def fetch(self, unit: _Unit) -> _Slot:
        """Return the slot with the tensors of `unit`, for work that is enqueued from now on; start
        the copy of the unit that is likely to follow."""
        slot = self._bring(unit)
        if slot.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.ready)
        following = unit.chain.after(unit)
        if following is not None:
            self._bring(following, keep=slot)
        return slot

    @torch.no_grad()
    def _bring(self, unit: _Unit, keep: _Slot | None = None) -> _Slot:
        """Return the slot of a unit, to which its tensors are copied if they are not there.

        Args:
            keep: a slot that may not be overwritten.
        """
        for slot in self.slots:
            if slot.unit is unit:
                return slot
        # the other slot than that of the newest unit
        slot = next(slot for slot in self.slots if slot is not keep)
        self.slots.remove(slot)
        self.slots.append(slot)
        slot.unit = unit
        with unseen():  # how many copies there are depends on what is in the slots
            slot.ready = self._copy(unit, slot)
        return slot

    def _copy(self, unit: _Unit, slot: _Slot) -> torch.cuda.Event | None:
        """Copy a unit into a slot; return the event after it."""
        self.copied_bytes += _size(unit.places)
        if self._copies is None:
            for place in unit.places:
                place.view(slot.bytes).copy_(place.host)
            return None
        # the slot's last readers are enqueued
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            for place in unit.places:
                place.view(slot.bytes).copy_(place.host, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return ready

    def forget(self) -> None:
        """Forget what the slots hold: host memory is about to change.

        Waits for copies that still read it.
        """
        if self._copies is not None and any(slot.unit is not None for slot in self.slots):
            self._copies.synchronize()
        for slot in self.slots:
            slot.unit = None


def _move_others(policy: Policy, streamed: Sequence[nn.Module], device: torch.device) -> None:
    """Move all weights and buffers to the device, but for the frozen matrices of the streamed
    modules."""
    staying = set()
    for module in streamed:
        staying |= {id(matrix) for _, _, matrix in _frozen_matrices(module)}

    def move(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in staying else tensor.to(device)

    for network in policy.networks.values():
        network._apply(move)


def _pack_into_host_memory(units: Sequence[_Unit], *, pinned: bool) -> int:
    """Move the tensors of all units into page-locked memory; return its bytes."""
    places = [place for unit in units for place in unit.places]
    total = 0
    for group in _groups(places):
        memory = torch.empty(_size(group), dtype=torch.uint8, pin_memory=pinned)
        total += memory.nbytes
        start = 0
        for place in group:
            new = memory[start : start + place.host.nbytes].view(place.host.dtype)
            new = new.view(place.host.shape)
            new.copy_(place.host)
            start += _aligned(place.host.nbytes)
            place.rehouse(new)
    return total


def _groups(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Yield places, as many at a time as `HOST_PIECE` holds."""
    group: list[_Place] = []
    for place in places:
        if group and _size([*group, place]) > HOST_PIECE:
            yield group
            group = []
        group.append(place)
    if group:
        yield group
