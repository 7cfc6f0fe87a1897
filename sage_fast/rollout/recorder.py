"""What records CUDA graphs of denoising steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from sage_fast.models.cost import Cost
from sage_fast.models.policy import Policy
from sage_fast.rollout.graphs import Recordable, StepGraphs
from sage_fast.util.environment import format_bytes

log = logging.getLogger(__name__)


class CudaRecorder:
    """Records graphs into one memory pool, on one stream.

    The first recording runs its function before, so that cuBLAS allocates its workspace, one per
    stream, outside the graph. Later functions must have run on some stream: what they compile
    cannot be compiled during a capture.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._warm = False

    def __call__(self, run: Recordable) -> tuple[Callable[[], object], tuple[Tensor, ...], int]:
        """Record `run`."""
        current = torch.cuda.current_stream()
        if not self._warm:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    run()
            current.wait_stream(self._stream)
            self._warm = True
        torch.cuda.synchronize()
        # The capture does this too; there, freed memory of the cache would offset what the graph
        # keeps.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        if not self._graphs:
            # PyTorch refuses one whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A CUDA call from another thread, such as a concurrent reward, would invalidate a global
        # capture.
        capture = torch.cuda.graph(
            graph, self._pool, self._stream, capture_error_mode="thread_local"
        )
        try:
            with capture:
                outputs = run()
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not restore it
        self._graphs.add(graph)
        return graph.replay, outputs, torch.cuda.memory_reserved() - before


def step_graphs(policy: Policy, cost: Cost, room: float) -> StepGraphs | None:
    """Return graphs for a policy's rollouts, of up to `room` bytes; None if one does not fit."""
    first = cost.step + cost.context
    if first <= room:
        return StepGraphs(policy, CudaRecorder(), room)
    if room:
        log.info(
            f"no CUDA graphs: a step keeps {format_bytes(first)}, training leaves "
            f"{format_bytes(max(room, 0))}"
        )
    return None
