"""Shared by the benchmarks: interleaved timing, checked compilation, and results that are saved row
by row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sage_fast.util.environment import synchronize

Save = Callable[[Mapping[str, Any]], object]
"""Called with the result of a benchmark after every row, since the next row may hang."""


def save_nothing(result: Mapping[str, Any]) -> None:
    """Do nothing: the `Save` of a benchmark that writes no file."""
    del result


def launch_timer(function: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Return a function that runs `function` once and returns the seconds of the host: on a GPU,
    until everything is launched. They are more if the GPU falls so far behind that its queue is
    full."""

    def measure() -> float:
        synchronize(device)
        start = time.perf_counter()
        function()
        seconds = time.perf_counter() - start
        synchronize(device)
        return seconds

    return measure


def interleaved(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return name -> seconds of each round.

    Every timer runs once per round, so that all see the same noise.
    """
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer())
    return seconds


@contextlib.contextmanager
def fresh_compilation() -> Iterator[None]:
    """Run torch.compile with an empty cache, and raise where it would fall back to eager mode.

    All shapes of one function share a cache of torch._dynamo.config.recompile_limit (8) entries.
    Beyond that Dynamo runs the function uncompiled, and a row named "compiled" would time eager
    code.
    """
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
