"""`pytest benchmarks/bench_adapter_rows.py` on a GPU: the tiles of `adapter_rows` with GELU, and what it replaces.

PyTorch's GELU into the padded rows and cuBLAS's product beside them is the reference, which `sage-fast bench` calls
eager.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sage_fast.kernels import adapter_rows as kernel

from sage_fast.ops.adapter_rows import adapter_rows_reference
from sage_fast.tools.operators import inputs
from sage_fast.util.environment import synchronize

SIZE = (1, 32_960, 8192)
"""Tokens of a 480p video of 81 frames and its text, at the width of the feed-forward's hidden layer."""
TILES = [(64, 64, 4), (128, 64, 8), (128, 64, 4), (64, 128, 4), (32, 128, 4), (32, 64, 8)]
"""Rows, columns and warps."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")
@pytest.mark.parametrize("contender", [*TILES, "GELU, then cuBLAS", "copy"], ids=str)
def test_gelu_and_product(benchmark: Any, contender: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    x, down, gelu = inputs("adapter_rows", SIZE, torch.bfloat16, device)
    function = {"GELU, then cuBLAS": adapter_rows_reference}.get(contender, kernel.adapter_rows)
    if isinstance(contender, tuple):
        rows, block, warps = contender
        tile = {"ROWS": rows, "BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}
        monkeypatch.setattr(kernel, "options", lambda *_, **__: dict(tile))
    if contender != "copy":
        torch.testing.assert_close(function(x, down, gelu), adapter_rows_reference(x, down, gelu), rtol=2e-2, atol=0.5)

    def run() -> None:
        x.clone() if contender == "copy" else function(x, down, gelu)
        synchronize(device)

    benchmark.pedantic(run, rounds=20, warmup_rounds=3)
