"""CUDA graphs of a denoising step: one launch from the host instead of thousands.

A graph holds the transformer and the fused transition over buffers at fixed addresses: latents,
step index, seeds, coefficients and conditioning. A step copies its latents and index into the
buffers and replays. A graph is tied to the addresses of the weights. The next rollout sees in-place
updates (the optimizer, `Policy.using`); if weights or adapters are replaced, it records a new
graph.

Graphs are replayed one rollout after another, so they share one memory pool and all buffers that
fit: a further text length adds little memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sage_fast.models.interface import BatchConditions
from sage_fast.models.policy import Policy
from sage_fast.models.spec import MAX_GRAPHS
from sage_fast.rollout.step import denoise
from sage_fast.util.errors import first_line

log = logging.getLogger(__name__)

Recordable = Callable[[], tuple[Tensor, ...]]
Recorder = Callable[[Recordable], tuple[Callable[[], object], tuple[Tensor, ...], int]]
"""run -> (replay, the outputs that a replay fills, bytes that the recorder's memory pool grew by).
"""
Buffers = dict[tuple[Any, ...], Tensor]
"""(index among a step's inputs, shape, strides, dtype) -> buffer."""


class StepInputs(NamedTuple):
    """What a rollout's steps read, besides their index."""

    coefs: Tensor
    seeds: Tensor
    latents: Tensor
    conditions: BatchConditions

    def tensors(self) -> list[Tensor]:
        """Return all tensors in a fixed order."""
        return [leaf for leaf in tree_leaves(self) if isinstance(leaf, Tensor)]


class StepGraph:
    """A recorded step and its input buffers.

    Args:
        policy: predicts the velocity.
        inputs: inputs of the shapes to record.
        shared: buffers of other graphs, used where they fit.
        record: records a function as a graph.

    Attributes:
        buffers: the input buffers.
        replay: replays the step over the buffers.
        growth: bytes by which recording enlarged the memory pool.
    """

    def __init__(
        self, policy: Policy, inputs: StepInputs, shared: Buffers, record: Recorder
    ) -> None:
        self.buffers: Buffers = {}
        for i, tensor in enumerate(inputs.tensors()):
            slot = (i, tensor.shape, tensor.stride(), tensor.dtype)
            self.buffers[slot] = shared[slot] if slot in shared else tensor.clone()

        self._policy = policy
        buffers = iter(self.buffers.values())
        self._inputs = tree_map_only(Tensor, lambda _: next(buffers), inputs)
        self._step = torch.zeros(1, dtype=torch.int64, device=inputs.latents.device)
        self.replay, self._outputs, self.growth = record(self.run)

    def run(self) -> tuple[Tensor, ...]:
        """Run the step over the buffers, one kernel at a time."""
        coefs, seeds, x, conditions = self._inputs
        return denoise(self._policy, coefs, conditions.at(self._step), seeds, x, self._step)

    def load(self, inputs: StepInputs) -> None:
        """Copy a rollout's inputs into the buffers."""
        for buffer, value in zip(self.buffers.values(), inputs.tensors(), strict=True):
            buffer.copy_(value)

    def step(self, x: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """Replay a step of the latents `x`; `step` is its index, int64 `[1]`.

        Return x and the outputs of `denoise`, which the next call overwrites.
        """
        self._inputs.latents.copy_(x)
        self._step.copy_(step)
        self.replay()
        return self._inputs.latents, *self._outputs


class StepGraphs:
    """Graphs by shape, bounded in number and memory; the least recently used is evicted first.

    Args:
        policy: whose steps are recorded.
        record: a `recorder.CudaRecorder`.
        max_memory: bytes that all graphs together may keep.

    Attributes:
        refused: shapes -> why their steps run without a graph.
    """

    def __init__(self, policy: Policy, record: Recorder, max_memory: float) -> None:
        self.policy = policy
        self.record = record
        self.max_memory = max_memory
        self.refused: dict[tuple[Any, ...], str] = {}
        self._graphs: OrderedDict[tuple[Any, ...], StepGraph] = OrderedDict()
        self._pool = 0  # bytes
        self._seen: set[tuple[Any, ...]] = set()
        self._failed = False

    def prepare(
        self, coefs: Tensor, conditions: BatchConditions, seeds: Tensor, latents: Tensor
    ) -> StepGraph | None:
        """Return the graph for these shapes, loaded with these values; None if the steps run
        without one.

        A shape's first rollout runs without one: it compiles the kernels, and the shape may not
        recur.
        """
        inputs = StepInputs(coefs, seeds, latents, conditions)
        self.policy.refresh()  # a replay does not do this
        shapes = tuple((t.shape, t.dtype) for t in inputs.tensors())
        key = (weights_key(self.policy), self.policy.guidance_scale, shapes)
        if key in self.refused or (self._failed and key not in self._graphs):
            return None
        if key not in self._seen:
            self._seen.add(key)
            return None
        if key not in self._graphs:
            for other in [other for other in self._graphs if other[0] != key[0]]:
                del self._graphs[other]  # recorded with weights that were replaced
            recorded = self._recorded(key, inputs)
            if recorded is None:
                return None
            self._graphs[key] = recorded
        self._graphs.move_to_end(key)
        while self._graphs and (
            len(self._graphs) > MAX_GRAPHS or self._kept(self._graphs.values()) > self.max_memory
        ):
            self._graphs.popitem(last=False)
        # evicted too if a refused graph has left a pool too large for any
        graph = self._graphs.get(key)
        if graph is not None:
            graph.load(inputs)
        return graph

    def __len__(self) -> int:
        return len(self._graphs)

    def _recorded(self, key: tuple[Any, ...], inputs: StepInputs) -> StepGraph | None:
        """Record a graph; return None if that fails or if it needs too much memory."""
        if not self._graphs:
            self._pool = 0  # its last graph freed it
        try:
            graph = StepGraph(self.policy, inputs, _buffers(self._graphs.values()), self.record)
        except RuntimeError as error:  # an operator that cannot be recorded, or no memory
            self._refuse(key, first_line(error))
            self._failed = True  # torch 2.11's allocator treats a failed capture as still running
            return None
        self._pool += graph.growth
        needed: float = self._kept([graph])
        if needed > self.max_memory:
            needed, allowed = (size / 2**30 for size in (needed, self.max_memory))
            self._refuse(key, f"it would keep {needed:.2f} GiB, and all may keep {allowed:.2f} GiB")
            return None
        return graph

    def _kept(self, graphs: Iterable[StepGraph]) -> int:
        """Return the bytes of the pool and of the buffers of `graphs`."""
        return self._pool + sum(buffer.nbytes for buffer in _buffers(graphs).values())

    def _refuse(self, key: tuple[Any, ...], reason: str) -> None:
        self.refused[key] = f"no CUDA graph for this rollout: {reason}"
        log.info(self.refused[key])


def _buffers(graphs: Iterable[StepGraph]) -> Buffers:
    return {slot: buffer for graph in graphs for slot, buffer in graph.buffers.items()}


def weights_key(policy: Policy) -> int:
    """Return a hash that changes if a weight, an adapter or the attention is replaced, not by
    in-place updates."""
    addresses = [p.data_ptr() for _, p in policy.named_parameters()]
    adapters = [
        (layer.disable_adapters, layer.merged, *layer.active_adapters, *layer.scaling.items())
        for network in policy.networks.values()
        for layer in network.modules()
        if isinstance(layer, LoraLayer)
    ]
    return hash((*addresses, *adapters, policy.attention))
