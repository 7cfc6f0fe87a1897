"""`pytest benchmarks/`: norm_rotate forward and backward against eager PyTorch and torch.compile."""

from typing import Any

import pytest

from benchmarks.conftest import DEVICE, time
from sage_fast.tools.normalisations import NAMES, SIZES, contender, inputs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_norm_rotate(benchmark: Any, size: tuple[int, ...], name: str) -> None:
    time(benchmark, contender("norm_rotate", name, inputs("norm_rotate", size, DEVICE)))
