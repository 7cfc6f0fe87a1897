"""`pytest benchmarks/`: transition_step against eager PyTorch, torch.compile and a copy of the same bytes."""

from typing import Any

import pytest
import torch

from sage_fast.measure.operators import Case, contenders


@pytest.mark.parametrize("name", ["fused", "eager", "compiled", "copy"])
def test_transition_step(benchmark: Any, case: Case, name: str) -> None:
    function = contenders("transition_step", compiled=name == "compiled")[name]

    def run() -> None:
        function(case)
        if case.x.is_cuda:
            torch.cuda.synchronize()

    benchmark.pedantic(run, rounds=10, warmup_rounds=2)
