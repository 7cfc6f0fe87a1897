"""What every measurement shares: ceilings, interleaved timing, honest compilation, and the head line of a table."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

H200_BF16_FLOPS = 790e12
"""FLOP/s of a large bf16 matrix product on one H200, measured, though not by a run of this code."""
H200_BYTES_PER_SECOND = 4.3e12
"""Bandwidth of a copy on one H200, measured likewise."""

Save = Callable[[Mapping[str, Any]], object]
"""Told the result of a benchmark after every row, since the next one may never end."""


def save_nothing(result: Mapping[str, Any]) -> None:
    """`Save` of a benchmark that keeps its result to itself."""
    del result


class Budget:
    """Wall-clock time that a benchmark may take, from now on.

    Args:
        seconds: None for no end.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; below 0 after the end."""
        return self._end - time.monotonic()


def best_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usual_dtype(device: torch.device) -> torch.dtype:
    """Of activations, in a run there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_timer(function: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """A function that runs `function` once and returns its seconds, the device's work included."""

    def measure() -> float:
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - start

    return measure


def interleaved(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """name -> seconds of each round; in a round every timer runs once, so that all meet the same noise."""
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer())
    return seconds


@contextlib.contextmanager
def fresh_compilation() -> Iterator[None]:
    """torch.compile with an empty cache, and an error where it would go on in eager mode.

    All shapes of one function share a cache of torch._dynamo.config.recompile_limit (8) entries; beyond that Dynamo
    runs the function uncompiled, and a row called "compiled" would time eager code.
    """
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p20, p50 and p80."""
    values = torch.tensor(seconds, dtype=torch.float64)
    return dict(zip(("p20", "p50", "p80"), values.quantile(values.new_tensor([0.2, 0.5, 0.8])).tolist()))


def matmul_ceiling(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """FLOP/s of the fastest of several large square matrix products: what this device gives now, in this dtype."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timer = host_timer(lambda: a @ b, device)
    best, stop = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < stop:
        best = min(best, timer())
    return 2 * size**3 / best


def head_line(environment: Mapping[str, Any]) -> str:
    """First line of every table: device, threads, versions, date."""
    parts = [environment["device"], f"{environment['threads']} threads", f"torch {environment['torch']}"]
    parts += [str(environment[key]) for key in ("dtype", "operators", "date") if key in environment]
    return ", ".join(parts)
