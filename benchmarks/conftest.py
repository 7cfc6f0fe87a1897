"""Shared by the benchmarks: the device, inputs that passed the correctness gate, and the call of pytest-benchmark."""

from collections.abc import Callable
from typing import Any

import pytest
from sage_fast.benchmarks.operators import SIZES, Case, check

from sage_fast.util.environment import synchronize
from sage_fast.util.ranks import local_device

DEVICE = local_device()


def time(benchmark: Any, function: Callable[[], Any]) -> None:
    """Time ten rounds of `function`, including the device's work."""

    def run() -> None:
        function()
        synchronize(DEVICE)

    benchmark.pedantic(run, rounds=10, warmup_rounds=3)


@pytest.fixture(params=["480p batch 1", "480p batch 4"])
def case(request: pytest.FixtureRequest) -> Case:
    """Inputs at a production size, checked before anything is timed."""
    made = Case.make(SIZES[request.param], DEVICE)
    check(made)
    return made
