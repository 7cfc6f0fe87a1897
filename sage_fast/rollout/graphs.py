"""CUDA graphs of a denoising step: one launch from the host instead of thousands.

A graph holds the transformer and the fused transition over buffers at fixed addresses: latents, step index, seeds,
coefficients, conditioning and a sampler's history. The step index advances inside the graph, so a rollout is just T
replays. A graph is tied to the addresses of the weights. The next rollout sees in-place updates (the optimizer,
`Policy.using`); if weights or adapters are replaced, it records a new graph.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from sage_fast.models.policy import Policy
from sage_fast.models.protocol import BatchConditions
from sage_fast.rollout.step import History, denoise
from sage_fast.util.errors import first_line
from sage_fast.util.ranks import sequence_size

log = logging.getLogger(__name__)

MAX_TOKENS = 8192
"""Tokens per batch above which kernels take far longer than their launches: at this size, the 54 blocks of
HunyuanVideo 1.5 take the host about 30 ms to launch, and an H200 at its ceiling 80 ms to compute."""
MAX_GRAPHS = 16
MAX_MEMORY_SHARE = 0.25
"""Share of the device's memory that graphs may keep allocated between replays."""

Recordable = Callable[[], tuple[Tensor, ...]]
Recorder = Callable[[Recordable], tuple[Callable[[], object], tuple[Tensor, ...], int]]
"""run -> (replay, the outputs that a replay fills, bytes kept allocated)."""


class StepGraph:
    """A recorded step and its buffers, with the shapes of the given arguments.

    Args:
        policy: predicts the velocity.
        record: records a function as a graph.
    """

    def __init__(
        self,
        policy: Policy,
        coefs: Tensor,
        conditions: BatchConditions,
        seeds: Tensor,
        latents: Tensor,
        history: History | None,
        record: Recorder,
    ) -> None:
        coefs, conditions, seeds, x = coefs.clone(), conditions.clone(), seeds.clone(), latents.clone()
        history = None if history is None else History(*(t.clone() for t in history))
        step = torch.zeros(1, dtype=torch.int64, device=x.device)
        self._buffers = [coefs, *conditions.tensors(), seeds, x, *(history or ())]
        self._step, self._x_before = step, torch.empty_like(x)

        def run() -> tuple[Tensor, ...]:
            self._x_before.copy_(x)
            outputs = denoise(policy, coefs, conditions, seeds, x, step, history)
            x.copy_(outputs[0])
            step.add_(1).remainder_(len(coefs))  # warm-ups and benchmarks may run more than T steps
            return outputs

        self._replay, self._outputs, self.memory = record(run)

    def load(
        self, coefs: Tensor, conditions: BatchConditions, seeds: Tensor, latents: Tensor, history: History | None
    ) -> None:
        """Copy in a rollout's inputs and start at step 0."""
        values = [coefs, *conditions.tensors(), seeds, latents, *(history or ())]
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)
        self._step.zero_()

    def skip_to(self, step: int) -> None:
        """Make `step` the next step."""
        self._step.fill_(step)

    def step(self) -> tuple[Tensor, ...]:
        """Replay one step; return x and the outputs of `denoise`, which the next call overwrites."""
        self._replay()
        return self._x_before, *self._outputs


class StepGraphs:
    """Graphs by shape, bounded in number and memory; the least recently used is evicted first.

    Args:
        policy: whose steps are recorded.
        record: a `CudaRecorder`.
        max_memory: bytes that all graphs together may keep.

    Attributes:
        refused: shapes -> why their steps run without a graph.
    """

    def __init__(self, policy: Policy, record: Recorder, max_memory: int) -> None:
        self.policy = policy
        self.record = record
        self.max_memory = max_memory
        self._graphs: OrderedDict[tuple[Any, ...], StepGraph] = OrderedDict()
        self.refused: dict[tuple[Any, ...], str] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._failed = False

    def prepare(
        self, coefs: Tensor, conditions: BatchConditions, seeds: Tensor, latents: Tensor, history: History | None = None
    ) -> StepGraph | None:
        """Return the graph for these shapes, loaded with these values; None if the steps run without one.

        A shape's first rollout runs without one: recording costs as much as a few steps, and the shape may not recur.
        """
        inputs = (coefs, conditions, seeds, latents, history)
        self.policy.refresh()  # a replay does not do this
        tokens = len(latents) * (latents[0, 0].numel() // self.policy.patch + conditions.tokens)
        if tokens > MAX_TOKENS:
            self._refuse(("tokens",), f"a step has {tokens:,} tokens; graphs pay off below {MAX_TOKENS:,}")
            return None
        shapes = tuple((t.shape, t.dtype) for t in (coefs, *conditions.tensors(), seeds, latents, *(history or ())))
        key = (weights_key(self.policy), shapes)
        if key in self.refused or (self._failed and key not in self._graphs):
            return None
        if key not in self._seen:
            self._seen.add(key)
            return None
        if key not in self._graphs:
            for other in [other for other in self._graphs if other[0] != key[0]]:
                del self._graphs[other]  # recorded with weights that were replaced
            try:
                graph = StepGraph(self.policy, *inputs, self.record)
            except RuntimeError as error:  # an operator that cannot be recorded, or no memory
                self._refuse(key, first_line(error))
                self._failed = True  # torch 2.11's allocator treats a failed capture as still running
                return None
            if graph.memory > self.max_memory:
                needed, allowed = (size / 2**30 for size in (graph.memory, self.max_memory))
                self._refuse(key, f"it would keep {needed:.2f} GiB, and all may keep {allowed:.2f} GiB")
                return None
            self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > MAX_GRAPHS or sum(g.memory for g in self._graphs.values()) > self.max_memory:
            self._graphs.popitem(last=False)
        self._graphs[key].load(*inputs)
        return self._graphs[key]

    def __len__(self) -> int:
        return len(self._graphs)

    def _refuse(self, key: tuple[Any, ...], reason: str) -> None:
        if key not in self.refused:
            self.refused[key] = f"no CUDA graph for this rollout: {reason}"
            log.info(self.refused[key])


def weights_key(policy: Policy) -> int:
    """Return a hash that changes if a weight, an adapter or a recorded setting is replaced, not by in-place updates."""
    addresses = [p.data_ptr() for _, p in policy.named_parameters()]
    adapters = [
        (layer.disable_adapters, layer.merged, *layer.active_adapters, *layer.scaling.items())
        for network in policy.networks.values()
        for layer in network.modules()
        if isinstance(layer, LoraLayer)
    ]
    return hash((*addresses, *adapters, policy.guidance_scale, policy.attention))


class CudaRecorder:
    """Records graphs into one memory pool, on one stream.

    Graphs that never run at the same time may share a pool. The warm-up runs on the same stream, so that cuBLAS
    allocates its workspace, one per stream, outside the graph.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Recordable) -> tuple[Callable[[], object], tuple[Tensor, ...], int]:
        """Record `run` after a warm-up, in which Triton compiles and cuBLAS allocates its workspace."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        # The capture does this too; there, the freed warm-up memory would offset what the graph keeps.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # A CUDA call from another thread, such as a concurrent reward, would invalidate a global capture.
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            with capture:
                outputs = run()
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not restore it
        return graph.replay, outputs, torch.cuda.memory_reserved() - before


def step_graphs(policy: Policy) -> StepGraphs | None:
    """Return graphs for a policy on a CUDA device; None where graphs cannot be used.

    That is: on the CPU; if weights are gathered and released (ZeRO-3); and if ranks share samples, because DeepSpeed
    issues their exchanges from the host.
    """
    if policy.device.type != "cuda" or policy.states.gathers or sequence_size() > 1:
        return None
    total = torch.cuda.get_device_properties(policy.device).total_memory
    return StepGraphs(policy, CudaRecorder(), int(MAX_MEMORY_SHARE * total))
