"""`pytest benchmarks/`: forward, step, rollout and training step on stock diffusers, eager, compiled and graphed."""

from typing import Any

import pytest
import torch
from sage_fast.benchmarks.rung import (
    CPU_SIZES,
    GPU_SIZES,
    PARTS,
    PATHS,
    SIZES,
    Rung,
    random_decoders,
    random_transformer,
)

from benchmarks.conftest import DEVICE, time
from sage_fast.tools.harness import fresh_compilation

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


@pytest.fixture(scope="module", params=GPU_SIZES if torch.cuda.is_available() else CPU_SIZES)
def rung(request: pytest.FixtureRequest) -> Rung:
    """A size of the ladder, checked for correctness before anything is timed."""
    size = SIZES[request.param]
    models = [make(size.testbed, DEVICE, DTYPE) for make in (random_transformer, random_decoders)]
    made = Rung(models[0], size, models[1])
    for gate in ("forward", "decode"):
        assert made.check(gate) == {}
    return made


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("part", PARTS)
def test_rollout(benchmark: Any, rung: Rung, part: str, path: str) -> None:
    contenders = rung.contenders(part, [path])
    if path not in contenders:
        pytest.skip(f"no {path} {part} here")
    with fresh_compilation():
        time(benchmark, contenders[path])
