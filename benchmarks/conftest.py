"""What the benchmarks share: the device, inputs that have passed the gate, and pytest-benchmark around a function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sage_fast.measure.harness import synchronize
from sage_fast.measure.operators import SIZES, Case, check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def time(benchmark: Any, function: Callable[[], Any]) -> None:
    """Ten rounds of `function`, the device's work included."""

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
