"""The operators as a table: how each is called, its inputs, and its check against the reference in float64.

`sage-fast doctor`, the benchmarks and the tests take operators and their inputs from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops import transition_score, transition_step
from sage_fast.ops.adapter_rows import adapter_rows_backward_reference, adapter_rows_reference
from sage_fast.ops.gated_norm import gated_norm, gated_norm_backward_reference, gated_norm_reference
from sage_fast.ops.gated_sum import gated_sum, gated_sum_backward_reference, gated_sum_reference
from sage_fast.ops.norm_modulate import norm_modulate, norm_modulate_backward_reference, norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate, norm_rotate_backward_reference, norm_rotate_reference
from sage_fast.ops.norm_silu import norm_silu_reference
from sage_fast.ops.transition_score import transition_score_backward_reference, transition_score_reference
from sage_fast.ops.transition_step import transition_step_reference

UNIT = torch.finfo(torch.float32).eps
Kernels = Callable[[str], Callable[..., Any]]
"""Name of an operator, or of its backward such as `norm_rotate_backward` -> the function of one implementation."""
Layout = Callable[[Tensor], Tensor]
"""Lays a tensor out in memory in another way, as a view."""
CPU = torch.device("cpu")
STEP = 4
"""The step of a batch whose samples are at one."""


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


def check_transition_step(kernels: Kernels, layout: Layout, *arguments: Any) -> Iterator[Comparison]:
    x, v, v_uncond, guidance, coefs, step, _ = arguments
    x_next, logp = kernels("transition_step")(*arguments)
    (plain, _), (exact, _) = transition_step_reference(*arguments), transition_step_reference(*double(*arguments))
    yield Comparison("x_next", x_next, plain, exact)
    # The log-prob belongs to the value as stored, so the references score that value.
    plain, exact = (
        transition_score_reference(before, after, v, v_uncond, guidance, None, None, coefs, step, None)[0]
        for before, after in ((x, x_next), (x.double(), x_next.double()))
    )
    yield Comparison("logp", logp, plain, exact)


def check_transition_score(kernels: Kernels, layout: Layout, *arguments: Any) -> Iterator[Comparison]:
    names = ("logp", "kl_anchor", "kl_old", "error_plus", "error_minus")
    yield from compare(names, kernels("transition_score"), transition_score_reference, *arguments)
    x = arguments[0]
    grads = (layout(torch.randn(len(x), device=x.device)) for _ in range(3))
    backward = kernels("transition_score_backward")
    yield from compare(["dv", "dv_uncond"], backward, transition_score_backward_reference, *grads, *arguments[:-1])


def check_norm_modulate(kernels: Kernels, layout: Layout, *arguments: Any) -> Iterator[Comparison]:
    yield from compare(["out"], kernels("norm_modulate"), norm_modulate_reference, *arguments)
    x, scale, _, eps = arguments
    grad, backward = layout(torch.randn_like(x)), kernels("norm_modulate_backward")
    for modulation in (False, True):
        for residual in (None, layout(torch.randn_like(x))):
            yield from compare(
                ["dx", "dscale", "dshift"], backward, norm_modulate_backward_reference,
                grad, x, scale, eps, modulation, residual,
            )  # fmt: skip


def check_gated_norm(kernels: Kernels, layout: Layout, *arguments: Any) -> Iterator[Comparison]:
    _, y, gate, scale, shift, eps = arguments
    total, out = kernels("gated_norm")(*arguments)
    yield Comparison("sum", total, gated_norm_reference(*arguments)[0], gated_norm_reference(*double(*arguments))[0])
    # The sum is normalised as it is stored.
    yield from compare(["out"], lambda *_: out, norm_modulate_reference, total, scale, shift, eps)
    names, backward = ("dx", "dy", "dgate", "dscale", "dshift"), kernels("gated_norm_backward")
    grads = [layout(torch.randn_like(y)) for _ in range(2)]
    for kept in (None, y):
        yield from compare(names, backward, gated_norm_backward_reference, *grads, total, gate, scale, kept, eps)


def check_gated_sum(kernels: Kernels, layout: Layout, x: Tensor, y: Tensor, gate: Tensor) -> Iterator[Comparison]:
    yield from compare(["sum"], kernels("gated_sum"), gated_sum_reference, x, y, gate)
    grad, backward = layout(torch.randn_like(y)), kernels("gated_sum_backward")
    for kept in (None, y):
        yield from compare(["dy", "dgate"], backward, gated_sum_backward_reference, grad, gate, kept)


def check_norm_rotate(
    kernels: Kernels, layout: Layout, joint: Tensor, text: Tensor, *arguments: Any
) -> Iterator[Comparison]:
    """Compare the operator on `joint`, which holds text already."""
    yield from compare(["query", "key"], kernels("norm_rotate"), norm_rotate_reference, joint, *arguments)
    grads = [layout(torch.randn_like(joint[:, :, 0])) for _ in range(3)]
    for weights in (False, True):
        yield from compare(
            ["d joint", "d weights"], kernels("norm_rotate_backward"), norm_rotate_backward_reference,
            *grads, joint, *arguments, weights,
        )  # fmt: skip


def check_adapter_rows(kernels: Kernels, layout: Layout, x: Tensor, down: Tensor, _: bool) -> Iterator[Comparison]:
    for gelu in (False, True):
        yield from compare(["out"], kernels("adapter_rows"), adapter_rows_reference, x, down, gelu)
    gate = layout(torch.randn_like(x[:, :1]).flatten(1)) if x.shape[1] else x[:, 0:0].sum(1)
    yield from compare(["gated out"], kernels("adapter_rows"), adapter_rows_reference, x, down, False, gate)
    out = adapter_rows_reference(x, down, True).flatten(0, 1)
    x = x.flatten(0, 1)
    inner, up = (layout(torch.randn_like(out[:, : len(down)])) for _ in range(2))

    def backward(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(grad: Tensor, inner: Tensor, x: Tensor, out: Tensor, up: Tensor) -> tuple[Tensor, ...]:
            dx = grad.clone()  # overwritten
            if x.dtype == torch.float64:  # the exact GELU: a kernel may round its own
                out = adapter_rows_reference(x, x.new_empty(0, x.shape[1]), True)
            return dx, *function(dx, inner, x, out, up)

        return run

    yield from compare(
        ["dx", "dA", "dB"], backward(kernels("adapter_rows_backward")), backward(adapter_rows_backward_reference),
        torch.randn_like(x, memory_format=torch.contiguous_format), inner, x, out, up,
    )  # fmt: skip


def check_norm_silu(
    kernels: Kernels, layout: Layout, x: Tensor, gamma: Tensor, scale: float, _: Tensor
) -> Iterator[Comparison]:
    """Compare the operator inside a border, which stays zero."""

    def padded(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(x: Tensor, gamma: Tensor, scale: float) -> Tensor:
            batch, channels, *sizes = x.shape
            out = x.new_zeros(batch, *(size + 2 for size in sizes), channels).permute(0, 4, 1, 2, 3)
            function(x, gamma, scale, out[:, :, 2:, 1:-1, 1:-1])
            return out

        return run

    yield from compare(["out"], padded(kernels("norm_silu")), padded(norm_silu_reference), x, gamma, scale)


class Operator(NamedTuple):
    """An operator.

    Attributes:
        function: what a model calls, on the arguments that `inputs` makes. `norm_silu` writes to one and returns None.
        check: (implementation, layout of the gradients, *arguments) -> comparisons of every output and gradient.
        example: a small, odd shape.
        production: shape of one sample of a run.
    """

    function: Callable[..., Any]
    check: Callable[..., Iterator[Comparison]]
    example: tuple[int, ...]
    production: tuple[int, ...]


LATENTS = (3, 32, 5, 7, 9), (1, 32, 21, 45, 80)
TOKENS = (2, 75, 128), (1, 8000, 2048)
PIXELS = (2, 3, 5, 7, 24), (1, 1, 480, 832, 128)
OPERATORS: dict[str, Operator] = {
    "transition_step": Operator(
        lambda x, v, v_uncond, guidance, coefs, step, seed: transition_step(
            x, v, coefs, step, seed, v_uncond, guidance
        ),
        check_transition_step, *LATENTS,
    ),
    "transition_score": Operator(
        lambda x, x_next, v, v_uncond, guidance, v_anchor, v_old, coefs, step, beta: transition_score(
            x, x_next, v, coefs, step, v_anchor, v_old, beta, v_uncond, guidance
        ),
        check_transition_score, *LATENTS,
    ),
    "adapter_rows": Operator(torch.ops.sage_fast.adapter_rows, check_adapter_rows, *TOKENS),
    "gated_norm": Operator(gated_norm, check_gated_norm, *TOKENS),
    "gated_sum": Operator(gated_sum, check_gated_sum, *TOKENS),
    "norm_modulate": Operator(norm_modulate, check_norm_modulate, *TOKENS),
    "norm_rotate": Operator(norm_rotate, check_norm_rotate, (2, 75, 11, 2, 64), (1, 8000, 192, 16, 128)),
    "norm_silu": Operator(torch.ops.sage_fast.norm_silu, check_norm_silu, *PIXELS),
}  # fmt: skip


def registered(name: str) -> Callable[..., Any]:
    """Return an operator as registered: what a run calls on every device."""
    return getattr(torch.ops.sage_fast, name).default


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def check(operator: str, kernels: Kernels, arguments: Sequence[Any], layout: Layout = as_it_is) -> Iterator[Comparison]:
    """Compare every output and gradient of an implementation, with random upstream gradients."""
    return OPERATORS[operator].check(kernels, layout, *arguments)


def wrong(comparisons: Iterable[Comparison], units: int = 8) -> str:
    """Say which tensors are wrong, or return an empty text.

    A sum in plain PyTorch may happen to be exact; another order of summation may differ by `units` of the largest.
    """
    found = [comparison.problem(relative=units * UNIT) for comparison in comparisons]
    return "; ".join(dict.fromkeys(filter(None, found)))


def inputs(
    operator: str,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype] | torch.dtype,
    device: torch.device = CPU,
    *,
    layout: Layout = as_it_is,
    coefs: Tensor | None = None,
    optional: bool = True,
) -> list[Any]:
    """Make random arguments of an operator.

    Args:
        shape: `[B, ...]` of latents, `[B, S, d]` of tokens, (B, N, L, H, D) of `norm_rotate`, or (B, T, H, W, C), the
            order in memory, of `norm_silu`.
        dtypes: of the latents and of the velocities: the policy's, the unconditional, the anchor's and the old one; or
            of the tokens and their modulation or weights. The last one serves the rest. One alone is that of a run,
            whose latents are float32.
        device: where they are.
        layout: of every tensor.
        coefs: table of the transitions, of 10 rows or more; by default that of flow, with a last row without noise.
        optional: with guidance, the old velocity and beta, and each sample at a step of its own. Otherwise as in a
            rollout or a KL to the anchor, at one step.
    """
    if isinstance(dtypes, torch.dtype):
        dtypes = (torch.float32, dtypes) if operator.startswith("transition") else (dtypes,)
    kinds = [*dtypes, *[dtypes[-1]] * 4]

    def random(*size: int, of: int = 0) -> Tensor:
        return layout(torch.randn(size, device=device).mul(2).add(0.5).to(kinds[of]))

    if operator.startswith("transition"):
        x, v, v_uncond, v_anchor = (random(*shape, of=i) for i in range(4))
        if coefs is None:
            table = transition_table(sigma_schedule(10, 5.0), "flow", 0.7).window(0, 9)
            coefs = table.coefficients()
        coefs = layout(coefs.to(device))
        step = torch.tensor(STEP, device=device)
        if optional:
            step = layout(torch.arange(6, 6 + 3 * shape[0], 3, device=device) % 10)  # ten take all rows
        seed = layout(torch.randint(-(2**63), 2**63 - 1, shape[:1], device=device))
        guidance = (v_uncond, 6.0) if optional else (None, None)
        if operator == "transition_step":
            return [x, v, *guidance, coefs, step, seed]
        x_next = layout(registered("transition_step")(x, v, *guidance, coefs, step, seed)[0])
        v_old, beta = (random(*shape, of=4), 0.3) if optional else (None, None)
        return [x, x_next, v, *guidance, v_anchor, v_old, coefs, step, beta]
    if operator == "norm_rotate":
        batch, tokens, texts, heads, width = shape
        angles = 6.3 * torch.rand(tokens, width // 2, device=device)
        rotary = layout(torch.stack([angles.cos(), angles.sin()], dim=-1))
        joint, text = (random(batch, rows, 3, heads, width) for rows in (tokens + texts, texts))
        return [joint, text, *(random(width, of=1) for _ in range(4)), rotary, 1e-6]
    if operator == "norm_silu":
        x = random(*shape).permute(0, 4, 1, 2, 3)
        return [x, random(shape[4], of=1)[:, None, None, None], shape[4] ** 0.5, torch.empty_like(x)]
    batch, _, width = shape
    if operator == "adapter_rows":
        return [random(*shape), random(min(width, 64), width), True]
    rows = torch.randn(batch, 6, width, device=device).to(kinds[1]).unbind(1)  # chunks, as the model has them
    if operator == "gated_sum":
        return [random(*shape), random(*shape), layout(rows[0])]
    count = 2 if operator == "norm_modulate" else 3
    return [*(random(*shape) for _ in range(count - 1)), *map(layout, rows[:count]), 1e-6]
