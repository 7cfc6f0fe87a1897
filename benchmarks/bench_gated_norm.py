"""`pytest benchmarks/`: gated_norm forward and backward against eager PyTorch and torch.compile."""

from typing import Any

import pytest

from benchmarks.conftest import DEVICE, time
from sage_fast.tools.normalisations import NAMES, SIZES, contender, inputs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_gated_norm(benchmark: Any, size: tuple[int, ...], name: str) -> None:
    time(benchmark, contender("gated_norm", name, inputs("gated_norm", size, DEVICE)))
