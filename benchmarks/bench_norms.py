"""`pytest benchmarks/`: the block's normalisations, forward and backward, against eager PyTorch and torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.ops import norm_modulate, norm_rotate
from sage_fast.ops.norm_modulate import norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
SIZES = {"testbed batch 32": (32, 80, 7, 4, 16), "8192 tokens": (1, 8000, 192, 16, 128)}  # B, N, L, H, D


def inputs(operator: str, size: tuple[int, ...]) -> list[Any]:
    batch, tokens, texts, heads, width = size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=DTYPE)

    if operator == "norm_modulate":
        shape = (batch, tokens, heads * width)
        return [random(*shape).requires_grad_(), random(batch, shape[2]), random(batch, shape[2]), 1e-6]
    heads_of = [random(batch, count, heads, width).requires_grad_() for count in (tokens, texts)]
    rotary = torch.randn(tokens, width // 2, 2, device=DEVICE)
    return [*heads_of, random(width), random(width), rotary, 1e-6]


@pytest.mark.parametrize("path", ["fused", "eager", "compiled"])
@pytest.mark.parametrize("operator", ["norm_modulate", "norm_rotate"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_norm(benchmark: Any, size: tuple[int, ...], operator: str, path: str) -> None:
    fused: Callable[..., Tensor] = norm_modulate if operator == "norm_modulate" else norm_rotate
    plain: Callable[..., Tensor] = norm_modulate_reference if operator == "norm_modulate" else norm_rotate_reference
    arguments = inputs(operator, size)
    torch.testing.assert_close(fused(*arguments), plain(*arguments), rtol=2e-2, atol=2e-2)
    function = {"fused": fused, "eager": plain, "compiled": torch.compile(plain, dynamic=False)}[path]
    trained = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]

    def run() -> None:
        out = function(*arguments)
        torch.autograd.grad(out, trained, torch.ones_like(out))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(run, rounds=10, warmup_rounds=3)
