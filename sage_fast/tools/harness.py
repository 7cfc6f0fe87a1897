"""Shared by all measurements: ceilings, interleaved timing, checked compilation, and the head line of a table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sage_fast.util.environment import synchronize

H200_BF16_FLOPS = 790e12
"""FLOP/s of a large bf16 matrix product on one H200; measured, but not by this code."""

Save = Callable[[Mapping[str, Any]], object]
"""Called with the result of a benchmark after every row, since the next row may hang."""


def save_nothing(result: Mapping[str, Any]) -> None:
    """Do nothing: the `Save` of a benchmark that writes no file."""
    del result


def usual_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of activations on `device`: bfloat16 on a GPU, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def host_timer(function: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Return a function that runs `function` once and returns its seconds, including the device's work."""

    def measure() -> float:
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - start

    return measure


def interleaved(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return name -> seconds of each round. Every timer runs once per round, so that all see the same noise."""
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer())
    return seconds


@contextlib.contextmanager
def fresh_compilation() -> Iterator[None]:
    """Run torch.compile with an empty cache, and raise where it would fall back to eager mode.

    All shapes of one function share a cache of torch._dynamo.config.recompile_limit (8) entries. Beyond that Dynamo
    runs the function uncompiled, and a row named "compiled" would time eager code.
    """
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def matmul_ceiling(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measure FLOP/s of the fastest of several large square matrix products: the device's ceiling in this dtype."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timer = host_timer(lambda: a @ b, device)
    best, stop = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < stop:
        best = min(best, timer())
    return 2 * size**3 / best


def of_limit(share: float, limit: str, beyond: str) -> str:
    """Format a share of a measured limit; above 100 % that was no limit, and `beyond` says why."""
    return f"{share:.0%} of {limit}" if share <= 1 else f"{share:.2g} times {limit}, which is no limit here: {beyond}"


def head_line(environment: Mapping[str, Any]) -> str:
    """Format the first line of every table: device, threads, versions, date."""
    parts = [environment["device"], f"{environment['threads']} threads", f"torch {environment['torch']}"]
    parts += [str(environment[key]) for key in ("dtype", "operators", "date") if key in environment]
    return ", ".join(parts)
