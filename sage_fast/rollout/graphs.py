"""CUDA graphs of a denoising step: the host issues one launch where it would issue thousands.

A graph holds the transformer and the fused transition over buffers that stay where they are: latents, step index,
seeds, coefficients and conditioning. The step index advances inside, so a rollout is T replays and nothing else. A
graph is tied to the addresses of the weights: in-place updates (the optimizer, `Policy.using`) are seen
by the next rollout, after replaced weights or adapters it records again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from sage_fast.models.policy import Policy
from sage_fast.models.protocol import Schedule
from sage_fast.ops import transition_step
from sage_fast.ops.transition_step import guided
from sage_fast.util.profiling import annotate
from sage_fast.util.ranks import sequence_size

MAX_TOKENS = 8192
"""Tokens of a batch above which the kernels outlast their launches by far: 54 blocks take the host some 30 ms to issue
and an H200 at its ceiling 80 ms to compute."""
MAX_GRAPHS = 16
MAX_MEMORY_SHARE = 0.25
"""Of the device, for what the graphs keep allocated between replays."""

Run = Callable[[], tuple[Tensor, ...]]
Recorder = Callable[[Run], tuple[Callable[[], object], tuple[Tensor, ...], int]]
"""run -> (replay, the outputs that a replay fills, bytes that are kept)."""


def denoise(
    policy: Policy,
    coefs: Tensor,
    schedule: Schedule,
    seeds: Tensor,
    x: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of B samples: x_next, log-prob `[B]` and the guided velocity; `step` is int64 `[1]`."""
    with annotate("transformer"):
        v, v_uncond = policy.velocities(x, schedule.at(step))
    with annotate("transition"):
        guidance = None if v_uncond is None else torch.full((), policy.guidance_scale, device=x.device)
        x_next, log_prob = transition_step(x, v, coefs, step[0], seeds, v_uncond, guidance)
    return x_next, log_prob, v if v_uncond is None else guided(v, v_uncond, guidance, x.dtype)


class StepGraph:
    """A recorded step and its buffers, shaped after the arguments of a first rollout.

    Args:
        policy: of the velocity.
        record: how to record.
    """

    def __init__(
        self,
        policy: Policy,
        coefs: Tensor,
        schedule: Schedule,
        seeds: Tensor,
        latents: Tensor,
        record: Recorder,
    ) -> None:
        coefs, schedule, seeds, x = coefs.clone(), schedule.clone(), seeds.clone(), latents.clone()
        step = torch.zeros(1, dtype=torch.int64, device=x.device)
        self._buffers = [coefs, *schedule.tensors(), seeds, x]
        self._step, self._x_before = step, torch.empty_like(x)

        def run() -> tuple[Tensor, ...]:
            self._x_before.copy_(x)
            outputs = denoise(policy, coefs, schedule, seeds, x, step)
            x.copy_(outputs[0])
            step.add_(1).remainder_(len(coefs))  # warming up and benchmarks may take more steps than there are
            return outputs

        self._replay, self._outputs, self.memory = record(run)

    def load(self, coefs: Tensor, schedule: Schedule, seeds: Tensor, latents: Tensor) -> None:
        """Begin a rollout at step 0."""
        for buffer, value in zip(self._buffers, [coefs, *schedule.tensors(), seeds, latents], strict=True):
            buffer.copy_(value)
        self._step.zero_()

    def step(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Replay: x, x_next, log-prob, velocity; the next call overwrites them."""
        self._replay()
        x_next, log_prob, velocity = self._outputs
        return self._x_before, x_next, log_prob, velocity


class StepGraphs:
    """Graphs by shape, a bounded number of them in a bounded share of memory; the least recently used goes first.

    Args:
        policy: whose steps are recorded.
        record: a `CudaRecorder`.
        max_memory: bytes that all graphs together may keep.
        say: told once for each reason why a step runs without a graph.
    """

    def __init__(self, policy: Policy, record: Recorder, max_memory: int, say: Callable[[str], object] = print) -> None:
        self.policy = policy
        self.record = record
        self.max_memory = max_memory
        self.say = say
        self._graphs: OrderedDict[tuple[Any, ...], StepGraph] = OrderedDict()
        self._refused: set[tuple[Any, ...]] = set()
        self._seen: set[tuple[Any, ...]] = set()
        self._failed = False

    def prepare(self, coefs: Tensor, schedule: Schedule, seeds: Tensor, latents: Tensor) -> StepGraph | None:
        """The graph of these shapes, loaded with these values; None if the step runs without one.

        The first rollout of a shape does: recording costs as much as some steps, and a shape may never come back.
        """
        inputs = (coefs, schedule, seeds, latents)
        self.policy.refresh()  # a replay does not
        tokens = len(latents) * (latents[0, 0].numel() // self.policy.patch + schedule.tokens)
        if tokens > MAX_TOKENS:
            self._refuse(("tokens",), f"a step has {tokens:,} tokens, and they pay below {MAX_TOKENS:,}")
            return None
        shapes = tuple((t.shape, t.dtype) for t in (coefs, *schedule.tensors(), seeds, latents))
        key = (weights_key(self.policy), shapes)
        if key in self._refused or (self._failed and key not in self._graphs):
            return None
        if key not in self._seen:
            self._seen.add(key)
            return None
        if key not in self._graphs:
            for other in [other for other in self._graphs if other[0] != key[0]]:
                del self._graphs[other]  # its weights are gone
            try:
                graph = StepGraph(self.policy, *inputs, self.record)
            except RuntimeError as error:  # an operator that cannot be recorded, or no memory
                self._refuse(key, str(error).splitlines()[0])
                self._failed = True  # torch 2.11's allocator takes a capture that failed for one that still goes on
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
        if key not in self._refused:
            self._refused.add(key)
            self.say(f"no CUDA graph for this rollout: {reason}")


def weights_key(policy: Policy) -> int:
    """Changes when a weight or adapter is replaced, or a setting that a recording fixes; not by in-place updates."""
    addresses = [p.data_ptr() for _, p in policy.named_parameters()]
    adapters = [
        (layer.disable_adapters, layer.merged, *layer.active_adapters, *layer.scaling.items())
        for network in policy.networks.values()
        for layer in network.modules()
        if isinstance(layer, LoraLayer)
    ]
    return hash((*addresses, *adapters, policy.guidance_scale, policy.attention))


class CudaRecorder:
    """Records into one memory pool: graphs that never run at the same time may share it. And on one stream, that of the
    warm-up too, so that the workspace which cuBLAS takes for each stream is not part of a graph."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Run) -> tuple[Callable[[], object], tuple[Tensor, ...], int]:
        """Record `run` after a warm-up (Triton compiles, cuBLAS takes its workspace)."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        # As the capture is about to: given back there, the warm-up's memory would hide what the graph keeps.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # A call of another thread, such as a reward's that works beside the rollout, would spoil a global capture.
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            with capture:
                outputs = run()
        finally:
            torch.cuda.set_stream(current)  # which a capture that fails does not
        return graph.replay, outputs, torch.cuda.memory_reserved() - before


def step_graphs(policy: Policy, say: Callable[[str], object]) -> StepGraphs | None:
    """Graphs for a policy on a CUDA device; None on the CPU, which has none, where weights come and go (ZeRO-3), and
    where ranks share samples, whose exchanges DeepSpeed issues from the host."""
    if policy.device.type != "cuda" or policy.states.gathers or sequence_size() > 1:
        return None
    total = torch.cuda.get_device_properties(policy.device).total_memory
    return StepGraphs(policy, CudaRecorder(), int(MAX_MEMORY_SHARE * total), say)
