"""Checks of operators against their reference in float64.

`sage-fast doctor` runs them on one example each, the tests on many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops.gated_norm import gated_norm_backward_reference, gated_norm_reference
from sage_fast.ops.guidance import guided
from sage_fast.ops.norm_modulate import norm_modulate_backward_reference, norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_backward_reference, norm_rotate_reference
from sage_fast.ops.transition_score import transition_score_backward_reference, transition_score_reference
from sage_fast.ops.transition_step import transition_step_reference

UNIT = torch.finfo(torch.float32).eps
Kernels = Callable[[str], Callable[..., Any]]
"""Name of an operator, or of its backward such as `norm_rotate_backward` -> the function of one implementation."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A tensor computed by an implementation, by plain PyTorch in the same dtypes, and in float64.

    Raises:
        TypeError: `exact` is not float64, so there is nothing to compare with.
    """

    name: str
    fused: Tensor
    plain: Tensor
    exact: Tensor

    def __post_init__(self) -> None:
        if self.exact.dtype != torch.float64:
            raise TypeError(f"{self.name}: compared with {self.exact.dtype}, expected float64")

    def errors(self) -> tuple[float, float, float]:
        """Return the largest error of the implementation, that of plain PyTorch, and the largest exact value."""
        if self.exact.numel() == 0:
            return 0.0, 0.0, 0.0
        error, allowed = ((value.double() - self.exact).abs().max().item() for value in (self.fused, self.plain))
        return error, allowed, self.exact.abs().max().item()

    def problem(self, absolute: float = 0.0, relative: float = 2 * UNIT) -> str:
        """Say what is wrong, or return an empty text.

        The implementation may err twice as much as plain PyTorch, plus `absolute`, plus `relative` times the largest
        exact value, whatever the storage type.
        """
        if (self.fused.dtype, self.fused.shape) != (self.plain.dtype, self.exact.shape):
            return (
                f"{self.name}: {self.fused.dtype} {list(self.fused.shape)}, "
                f"expected {self.plain.dtype} {list(self.exact.shape)}"
            )
        error, allowed, largest = self.errors()
        if error <= 2 * allowed + absolute + relative * largest:
            return ""
        return f"{self.name}: error {error:.1e}, plain PyTorch {allowed:.1e}"


def compare(
    names: Sequence[str], function: Callable[..., Any], reference: Callable[..., Any], *arguments: Any
) -> Iterator[Comparison]:
    """Compare each output of `function` with those of `reference`, in the same dtypes and in float64."""
    results = (function(*arguments), reference(*arguments), reference(*double(*arguments)))
    outputs = ((result,) if isinstance(result, Tensor) else result for result in results)
    for name, *values in zip(names, *outputs, strict=True):
        yield Comparison(name, *values)


def double(*values: Any) -> list[Any]:
    """Return the values, floating-point tensors in float64."""
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def check_transition_step(kernels: Kernels, *arguments: Any) -> Iterator[Comparison]:
    """Compare the operator on `arguments`: x, v, v_uncond, guidance, coefs, step, seed."""
    x, v, v_uncond, guidance, coefs, step, _ = arguments
    x_next, logp = kernels("transition_step")(*arguments)
    (plain, _), (exact, _) = transition_step_reference(*arguments), transition_step_reference(*double(*arguments))
    yield Comparison("x_next", x_next, plain, exact)
    # The log-prob belongs to the value as stored, so the references score that value.
    plain, exact = (
        transition_score_reference(
            x.to(dtype), x_next.to(dtype), guided(v, v_uncond, guidance, dtype), None, None, coefs, step, None
        )[0]
        for dtype in (torch.float32, torch.float64)
    )
    yield Comparison("logp", logp, plain, exact)


def check_transition_score(kernels: Kernels, *arguments: Any) -> Iterator[Comparison]:
    """Compare the operator on `arguments`: x, x_next, v, v_anchor, v_old, coefs, step, beta."""
    names = ("logp", "kl_anchor", "kl_old", "error_plus", "error_minus")
    yield from compare(names, kernels("transition_score"), transition_score_reference, *arguments)
    x = arguments[0]
    grads = (torch.randn(len(x), device=x.device) for _ in range(3))
    backward = kernels("transition_score_backward")
    yield from compare(["dv"], backward, transition_score_backward_reference, *grads, *arguments[:-1])


def check_norm_modulate(
    kernels: Kernels, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor
) -> Iterator[Comparison]:
    yield from compare(["out"], kernels("norm_modulate"), norm_modulate_reference, x, scale, shift, 1e-6)
    backward = kernels("norm_modulate_backward")
    for modulation in (False, True):
        for residual in (None, torch.randn_like(x)):
            yield from compare(
                ["dx", "dscale", "dshift"], backward, norm_modulate_backward_reference,
                grad, x, scale, 1e-6, modulation, residual,
            )  # fmt: skip


def check_gated_norm(kernels: Kernels, grad_sum: Tensor, grad: Tensor, *inputs: Any) -> Iterator[Comparison]:
    """Compare the operator on `inputs`: x, y, gate, scale, shift."""
    _, y, gate, scale, shift = inputs
    arguments = (*inputs, 1e-6)
    total, out = kernels("gated_norm")(*arguments)
    yield Comparison("sum", total, gated_norm_reference(*arguments)[0], gated_norm_reference(*double(*arguments))[0])
    # The sum is normalised as it is stored.
    yield from compare(["out"], lambda *_: out, norm_modulate_reference, total, scale, shift, 1e-6)
    names, backward = ("dx", "dy", "dgate", "dscale", "dshift"), kernels("gated_norm_backward")
    for kept in (None, y):
        grads = (grad_sum, grad)
        yield from compare(names, backward, gated_norm_backward_reference, *grads, total, gate, scale, kept, 1e-6)


def check_norm_rotate(
    kernels: Kernels, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, *arguments: Any
) -> Iterator[Comparison]:
    """Compare the operator on `arguments`: joint, the four weights, rotary, eps."""
    yield from compare(["query", "key"], kernels("norm_rotate"), norm_rotate_reference, *arguments)
    grads, backward = (grad_query, grad_key, grad_value), kernels("norm_rotate_backward")
    for weights in (False, True):
        names = ("d joint", "d weights")
        yield from compare(names, backward, norm_rotate_backward_reference, *grads, *arguments, weights)


CHECKS: dict[str, Callable[..., Iterator[Comparison]]] = {
    "transition_step": check_transition_step,
    "transition_score": check_transition_score,
    "gated_norm": check_gated_norm,
    "norm_modulate": check_norm_modulate,
    "norm_rotate": check_norm_rotate,
}
"""Operator -> (implementation, arguments) -> comparisons of every output and gradient."""


def registered(name: str) -> Callable[..., Any]:
    """Return an operator as registered: what a run calls on every device."""
    return getattr(torch.ops.sage_fast, name).default


def example(operator: str, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Make small arguments of odd shapes for the check of an operator. Latents are float32, all else is `dtype`."""

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    if operator.startswith("transition"):
        shape = (3, 32, 5, 7, 9)
        table = transition_table(sigma_schedule(20, 5.0), "flow", 0.7)
        coefs = table.coefficients(math.prod(shape[1:])).to(device)
        step = torch.tensor(7, device=device)
        x, v, other, old = random(*shape, dtype=torch.float32), *(random(*shape) for _ in range(3))
        if operator == "transition_step":
            return [x, v, other, torch.tensor(6.0, device=device), coefs, step, torch.arange(3, device=device)]
        x_next = float(table.a[7]) * x + float(table.b[7]) * v.float() + float(table.c[7]) * torch.randn_like(x)
        return [x, x_next, v, other, old, coefs, step, 0.3]
    if operator == "norm_rotate":
        angles = 6.3 * torch.rand(75, 32, device=device)
        rotary = torch.stack([angles.cos(), angles.sin()], dim=-1)
        grads = (random(2, 86, 2, 64) for _ in range(3))
        return [*grads, random(2, 86, 3, 2, 64), *(random(64) for _ in range(4)), rotary, 1e-6]
    tokens, rows = (4, 3) if operator == "gated_norm" else (2, 2)
    return [*(random(2, 75, 128) for _ in range(tokens)), *(random(2, 128) for _ in range(rows))]
