"""`pytest benchmarks/`: transition_step against eager PyTorch, torch.compile and a copy of the same bytes."""

from typing import Any

import pytest
from sage_fast.benchmarks.operators import Case, contenders

from benchmarks.conftest import time


@pytest.mark.parametrize("name", ["fused", "eager", "compiled", "copy"])
def test_transition_step(benchmark: Any, case: Case, name: str) -> None:
    function = contenders("transition_step", compiled=name == "compiled")[name]
    time(benchmark, lambda: function(case))
