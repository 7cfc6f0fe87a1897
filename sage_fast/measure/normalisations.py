"""Contenders for the block's normalisations, forward and backward: fused, eager PyTorch, torch.compile.

`pytest benchmarks/` times them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_fast.ops import norm_modulate, norm_rotate
from sage_fast.ops.norm_modulate import norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_reference

SIZES = {"testbed batch 32": (32, 80, 7, 4, 16), "8192 tokens": (1, 8000, 192, 16, 128)}
"""name -> samples, video tokens, text tokens, heads, width of a head."""
NAMES = ("fused", "eager", "compiled")

_OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "norm_modulate": (norm_modulate, norm_modulate_reference),
    "norm_rotate": (norm_rotate, norm_rotate_reference),
}


def inputs(operator: str, size: tuple[int, ...], device: torch.device) -> list[Any]:
    """Arguments of `norm_modulate` or `norm_rotate`: bf16 on a GPU, float32 on the CPU; activations want gradients."""
    batch, tokens, texts, heads, width = size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    if operator == "norm_modulate":
        shape = (batch, tokens, heads * width)
        return [random(*shape).requires_grad_(), random(batch, shape[2]), random(batch, shape[2]), 1e-6]
    heads_of = [random(batch, count, heads, width).requires_grad_() for count in (tokens, texts)]
    rotary = torch.randn(tokens, width // 2, 2, device=device)
    return [*heads_of, random(width), random(width), rotary, 1e-6]


def contender(operator: str, name: str, arguments: list[Any]) -> Callable[[], Any]:
    """A function that runs the operator forward and backward once, checked against the reference first.

    Raises:
        AssertionError: it differs from the reference by more than rounding.
    """
    fused, reference = _OPERATORS[operator]
    function = {"fused": fused, "eager": reference, "compiled": torch.compile(reference, dynamic=False)}[name]
    torch.testing.assert_close(function(*arguments), reference(*arguments), rtol=2e-2, atol=2e-2)
    trained = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]

    def run() -> Any:
        out = function(*arguments)
        return torch.autograd.grad(out, trained, torch.ones_like(out))

    return run
