"""The check of each operator: every output and gradient of one implementation against the reference
in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.ops.adapter_rows import adapter_rows_backward_reference, adapter_rows_reference
from sage_fast.ops.gated_norm import gated_norm_backward_reference, gated_norm_reference
from sage_fast.ops.gated_sum import gated_sum_backward_reference, gated_sum_reference
from sage_fast.ops.norm_modulate import norm_modulate_backward_reference, norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_backward_reference, norm_rotate_reference
from sage_fast.ops.norm_silu import norm_silu_reference
from sage_fast.ops.transition_score import (
    transition_score_backward_reference,
    transition_score_reference,
)
from sage_fast.ops.transition_step import transition_step_reference
from sage_fast.tools.operators import MemoryLayout, OperatorResult, as_it_is, double

Kernels = Callable[[str], Callable[..., Any]]
"""Name of an operator, or of its backward such as `norm_rotate_backward` -> the function of one
implementation."""


def compare(
    names: Sequence[str],
    function: Callable[..., Any],
    reference: Callable[..., Any],
    *arguments: Any,
) -> Iterator[OperatorResult]:
    """Compare each output of `function` with those of `reference`, in the same dtypes and in
    float64."""
    results = (function(*arguments), reference(*arguments), reference(*double(*arguments)))
    outputs = ((result,) if isinstance(result, Tensor) else result for result in results)
    for name, *values in zip(names, *outputs, strict=True):
        yield OperatorResult(name, *values)


def check_transition_step(
    kernels: Kernels, layout: MemoryLayout, *arguments: Any
) -> Iterator[OperatorResult]:
    x, v, v_uncond, guidance, coefs, step, _ = arguments
    x_next, logp = kernels("transition_step")(*arguments)
    (plain, _), (exact, _) = (
        transition_step_reference(*arguments),
        transition_step_reference(*double(*arguments)),
    )
    yield OperatorResult("x_next", x_next, plain, exact)
    # The log-prob belongs to the value as stored, so the references score that value.
    plain, exact = (
        transition_score_reference(
            before, after, v, v_uncond, guidance, None, None, coefs, step, None
        )[0]
        for before, after in ((x, x_next), (x.double(), x_next.double()))
    )
    yield OperatorResult("logp", logp, plain, exact)


def check_transition_score(
    kernels: Kernels, layout: MemoryLayout, *arguments: Any
) -> Iterator[OperatorResult]:
    names = ("logp", "kl_anchor", "kl_old", "error_plus", "error_minus")
    yield from compare(names, kernels("transition_score"), transition_score_reference, *arguments)
    x = arguments[0]
    grads = (layout(torch.randn(len(x), device=x.device)) for _ in range(3))
    backward = kernels("transition_score_backward")
    yield from compare(
        ["dv", "dv_uncond"], backward, transition_score_backward_reference, *grads, *arguments[:-1]
    )


def check_norm_modulate(
    kernels: Kernels, layout: MemoryLayout, *arguments: Any
) -> Iterator[OperatorResult]:
    yield from compare(["out"], kernels("norm_modulate"), norm_modulate_reference, *arguments)
    x, scale, _, eps = arguments
    grad, backward = layout(torch.randn_like(x)), kernels("norm_modulate_backward")
    for modulation in (False, True):
        for residual in (None, layout(torch.randn_like(x))):
            yield from compare(
                ["dx", "dscale", "dshift"], backward, norm_modulate_backward_reference,
                grad, x, scale, eps, modulation, residual,
            )  # fmt: skip


def check_gated_norm(
    kernels: Kernels, layout: MemoryLayout, *arguments: Any
) -> Iterator[OperatorResult]:
    _, y, gate, scale, shift, eps = arguments
    total, out = kernels("gated_norm")(*arguments)
    yield OperatorResult(
        "sum",
        total,
        gated_norm_reference(*arguments)[0],
        gated_norm_reference(*double(*arguments))[0],
    )
    # The sum is normalised as it is stored.
    yield from compare(["out"], lambda *_: out, norm_modulate_reference, total, scale, shift, eps)
    names, backward = ("dx", "dy", "dgate", "dscale", "dshift"), kernels("gated_norm_backward")
    grads = [layout(torch.randn_like(y)) for _ in range(2)]
    for kept in (None, y):
        yield from compare(
            names, backward, gated_norm_backward_reference, *grads, total, gate, scale, kept, eps
        )


def check_gated_sum(
    kernels: Kernels, layout: MemoryLayout, x: Tensor, y: Tensor, gate: Tensor
) -> Iterator[OperatorResult]:
    yield from compare(["sum"], kernels("gated_sum"), gated_sum_reference, x, y, gate)
    grad, backward = layout(torch.randn_like(y)), kernels("gated_sum_backward")
    for kept in (None, y):
        yield from compare(
            ["dy", "dgate"], backward, gated_sum_backward_reference, grad, gate, kept
        )


def check_norm_rotate(
    kernels: Kernels, layout: MemoryLayout, joint: Tensor, text: Tensor, *arguments: Any
) -> Iterator[OperatorResult]:
    """Compare the operator on `joint`, which holds text already."""
    yield from compare(
        ["query", "key"], kernels("norm_rotate"), norm_rotate_reference, joint, *arguments
    )
    grads = [layout(torch.randn_like(joint[:, :, 0])) for _ in range(3)]
    for weights in (False, True):
        yield from compare(
            ["d joint", "d weights"], kernels("norm_rotate_backward"),
            norm_rotate_backward_reference,
            *grads, joint, *arguments, weights,
        )  # fmt: skip


def check_adapter_rows(
    kernels: Kernels, layout: MemoryLayout, x: Tensor, down: Tensor, _: bool
) -> Iterator[OperatorResult]:
    for gelu in (False, True):
        yield from compare(["out"], kernels("adapter_rows"), adapter_rows_reference, x, down, gelu)
    gate = layout(torch.randn_like(x[:, :1]).flatten(1)) if x.shape[1] else x[:, 0:0].sum(1)
    yield from compare(
        ["gated out"], kernels("adapter_rows"), adapter_rows_reference, x, down, False, gate
    )
    x = x.flatten(0, 1)
    inner, up = (layout(torch.randn_like(x.new_empty(len(x), len(down)))) for _ in range(2))

    def backward(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(grad: Tensor, inner: Tensor, x: Tensor, up: Tensor) -> tuple[Tensor, ...]:
            dx = grad.clone()  # overwritten
            return dx, *function(dx, inner, x, up)

        return run

    yield from compare(
        ["dx", "dA", "dB"], backward(kernels("adapter_rows_backward")),
        backward(adapter_rows_backward_reference),
        torch.randn_like(x, memory_format=torch.contiguous_format), inner, x, up,
    )  # fmt: skip


def check_norm_silu(
    kernels: Kernels, layout: MemoryLayout, x: Tensor, gamma: Tensor, scale: float, _: Tensor
) -> Iterator[OperatorResult]:
    """Compare the operator inside a border, which stays zero."""

    def padded(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(x: Tensor, gamma: Tensor, scale: float) -> Tensor:
            batch, channels, *sizes = x.shape
            out = x.new_zeros(batch, *(size + 2 for size in sizes), channels).permute(0, 4, 1, 2, 3)
            function(x, gamma, scale, out[:, :, 2:, 1:-1, 1:-1])
            return out

        return run

    yield from compare(
        ["out"], padded(kernels("norm_silu")), padded(norm_silu_reference), x, gamma, scale
    )


CHECKS: dict[str, Callable[..., Iterator[OperatorResult]]] = {
    "transition_step": check_transition_step,
    "transition_score": check_transition_score,
    "adapter_rows": check_adapter_rows,
    "gated_norm": check_gated_norm,
    "gated_sum": check_gated_sum,
    "norm_modulate": check_norm_modulate,
    "norm_rotate": check_norm_rotate,
    "norm_silu": check_norm_silu,
}
"""Operator -> (implementation, layout of the gradients, *arguments) -> comparisons."""


def check(
    operator: str, kernels: Kernels, arguments: Sequence[Any], layout: MemoryLayout = as_it_is
) -> Iterator[OperatorResult]:
    """Compare every output and gradient of an implementation, with random upstream gradients."""
    return CHECKS[operator](kernels, layout, *arguments)
