"""Benchmark contenders for the block's normalisations, forward and backward: fused, eager PyTorch, torch.compile.

`pytest benchmarks/` times them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sage_fast.ops.gated_norm import gated_norm, gated_norm_reference
from sage_fast.ops.norm_modulate import norm_modulate, norm_modulate_reference
from sage_fast.ops.norm_rotate import joined_reference, norm_rotate
from sage_fast.tools.harness import usual_dtype

SIZES = {"testbed batch 32": (32, 80, 7, 4, 16), "8192 tokens": (1, 8000, 192, 16, 128)}
"""Name -> (samples, video tokens, text tokens, heads, width of a head)."""
NAMES = ("fused", "eager", "compiled")


OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gated_norm": (gated_norm, gated_norm_reference),
    "norm_modulate": (norm_modulate, norm_modulate_reference),
    "norm_rotate": (norm_rotate, joined_reference),
}
"""Name -> (operator, reference)."""


def inputs(operator: str, size: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None) -> list[Any]:
    """Make the arguments of an operator, by default in the device's usual dtype. Activations require gradients."""
    batch, tokens, texts, heads, width = size
    dtype = dtype or usual_dtype(device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    shape = (batch, tokens, heads * width)
    if operator == "norm_modulate":
        return [random(*shape).requires_grad_(), random(batch, shape[2]), random(batch, shape[2]), 1e-6]
    if operator == "gated_norm":
        return [
            *(random(*shape).requires_grad_() for _ in range(2)),
            *(random(batch, shape[2]) for _ in range(3)),
            1e-6,
        ]
    joint, text = (random(batch, rows, 3, heads, width).requires_grad_() for rows in (tokens + texts, texts))
    angles = 6.3 * torch.rand(tokens, width // 2, device=device)
    rotary = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return [joint, text, *(random(width) for _ in range(4)), rotary, 1e-6]


def contender(operator: str, name: str, arguments: list[Any]) -> Callable[[], Any]:
    """Check the operator against the reference; return a function that runs it forward and backward once.

    Raises:
        AssertionError: the operator differs from the reference by more than rounding.
    """
    fused, reference = OPERATORS[operator]
    function = {"fused": fused, "eager": reference, "compiled": torch.compile(reference, dynamic=False)}[name]
    torch.testing.assert_close(function(*arguments), reference(*arguments), rtol=2e-2, atol=2e-2)
    trained = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]

    def run() -> Any:
        outs = tree_leaves(function(*arguments))
        return torch.autograd.grad(outs, trained, [torch.ones_like(out) for out in outs])

    return run
