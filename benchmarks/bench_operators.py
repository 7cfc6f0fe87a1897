"""`pytest benchmarks/`: every operator, forward and backward, against eager PyTorch and
torch.compile."""

from typing import Any

import pytest
from sage_fast.benchmarks.operators import SIZES, case_of, contenders, gate, sizes_of

from sage_fast.ops import implementation
from sage_fast.tools.operators import OPERATORS
from sage_fast.util.environment import synchronize
from sage_fast.util.ranks import local_device

DEVICE = local_device()
CHOSEN = ("480p batch 1", "480p batch 4", "testbed batch 32", "8192 tokens")
CASES = [
    (operator, size) for operator in OPERATORS for size in sizes_of(operator) if size in CHOSEN
]


@pytest.mark.parametrize(
    "contender",
    [
        pytest.param("fused", id=implementation(DEVICE).replace(" ", "-")),
        "eager",
        "compiled",
        "copy",
    ],
)
@pytest.mark.parametrize(("operator", "size"), CASES)
def test_operator(benchmark: Any, operator: str, size: str, contender: str) -> None:
    """Time ten rounds, the device's work included, after the correctness gate."""
    case = case_of(operator, SIZES[size], DEVICE)
    gate(operator, case)
    function, arguments = contenders(operator, case, compiled=contender == "compiled")[contender]
    benchmark.group = f"{operator}, {size}"

    def run() -> None:
        function(*arguments)
        synchronize(DEVICE)

    benchmark.pedantic(run, rounds=10, warmup_rounds=3)
