"""Shared by the benchmarks: interleaved timing, checked compilation, and results that are saved row
by row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Save = Callable[[Mapping[str, Any]], object]
"""Called with the result of a benchmark after every row, since the next row may hang."""


def save_nothing(result: Mapping[str, Any]) -> None:
    """Do nothing: the `Save` of a benchmark that writes no file."""
    del result


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
