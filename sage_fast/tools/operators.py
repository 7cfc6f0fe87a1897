"""The operators as a table: how each is called, its inputs, and a check of all that it runs against
the references.

`sage-fast doctor`, the benchmarks and the tests take operators and their inputs from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops import adapter_rows, norm_silu, transition_score, transition_step  # noqa: F401  # defines the first two
from sage_fast.ops._calls import registered
from sage_fast.ops._common import LIBRARY
from sage_fast.ops._dispatch import REFERENCES
from sage_fast.ops.gated_norm import gated_norm
from sage_fast.ops.gated_sum import gated_sum
from sage_fast.ops.norm_modulate import norm_modulate
from sage_fast.ops.norm_rotate import norm_rotate

UNIT = torch.finfo(torch.float32).eps
MemoryLayout = Callable[[Tensor], Tensor]
"""Lays a tensor out in memory in another way, as a view."""
CPU = torch.device("cpu")
STEP = 4
"""The step of a batch whose samples are at one."""


@dataclasses.dataclass(frozen=True)
class OperatorResult:
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
        """Return the largest error of the implementation, that of plain PyTorch, and the largest
        exact value."""
        if self.exact.numel() == 0:
            return 0.0, 0.0, 0.0
        error = (self.fused.double() - self.exact).abs().max().item()
        allowed = (self.plain.double() - self.exact).abs().max().item()
        return error, allowed, self.exact.abs().max().item()

    def problem(self, absolute: float = 0.0, relative: float = 2 * UNIT) -> str:
        """Say what is wrong, or return an empty text.

        The implementation may err twice as much as plain PyTorch, plus `absolute`, plus `relative`
        times the largest exact value, whatever the storage type.
        """
        if (self.fused.dtype, self.fused.shape) != (self.plain.dtype, self.exact.shape):
            return (
                f"{self.name}: {self.fused.dtype} {list(self.fused.shape)}, expected "
                f"{self.plain.dtype} {list(self.exact.shape)}"
            )
        error, allowed, largest = self.errors()
        if error <= 2 * allowed + absolute + relative * largest:
            return ""
        return f"{self.name}: error {error:.1e}, plain PyTorch {allowed:.1e}"


def double(*values: Any) -> list[Any]:
    """Return the values, floating-point tensors in float64."""
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


class Operator(NamedTuple):
    """An operator.

    Attributes:
        function: what a model calls, on the arguments that `inputs` makes. `norm_silu` writes to
            one and returns None.
        trained: positions of the arguments with a gradient where a model trains a LoRA.
        example: a small, odd shape.
        production: shape of one sample of a run.
        more_examples: of the operator's other cases.
    """

    function: Callable[..., Any]
    trained: tuple[int, ...]
    example: tuple[int, ...]
    production: tuple[int, ...]
    more_examples: tuple[tuple[int, ...], ...] = ()


LATENTS = (3, 32, 5, 7, 9), (1, 32, 21, 45, 80)
TOKENS = (2, 75, 128), (1, 8000, 2048)
PIXELS = (2, 3, 5, 7, 24), (1, 1, 480, 832, 128)
OPERATORS: dict[str, Operator] = {
    "transition_step": Operator(
        lambda x, v, v_uncond, guidance, coefs, step, seed: transition_step(
            x, v, coefs, step, seed, v_uncond, guidance
        ),
        (), *LATENTS,
    ),
    "transition_score": Operator(
        lambda x, x_next, v, v_uncond, guidance, v_anchor, v_old, coefs, step,
        beta: transition_score(
            x, x_next, v, coefs, step, v_anchor, v_old, beta, v_uncond, guidance
        ),
        (2,), *LATENTS,
    ),
    "adapter_rows": Operator(torch.ops.sage_fast.adapter_rows, (), *TOKENS),
    "gated_norm": Operator(gated_norm, (0, 1), *TOKENS),
    "gated_sum": Operator(gated_sum, (0, 1), *TOKENS),
    "norm_modulate": Operator(norm_modulate, (0,), *TOKENS),
    "norm_rotate": Operator(
        norm_rotate, (0, 1), (2, 75, 11, 2, 64), (1, 8000, 192, 16, 128), ((2, 75, 11, 3, 64, 3),)
    ),
    "norm_silu": Operator(torch.ops.sage_fast.norm_silu, (), *PIXELS),
}  # fmt: skip


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Compared(TorchDispatchMode):
    """Compares every call of one of our operators within it with the operator's reference."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[OperatorResult] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if operator.namespace != LIBRARY.ns:
            return operator(*arguments, **(keywords or {}))
        name = operator._opname
        reference = REFERENCES[name]
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        doubles = double(*arguments)
        plain = _outputs(reference(*copies), copies)
        exact = _outputs(reference(*doubles), doubles)

        result = operator(*arguments)
        # an autograd function may write to them
        fused = [out.clone() for out in _outputs(result, arguments)]
        for number, tensors in enumerate(zip(fused, plain, exact, strict=True)):
            self.found.append(OperatorResult(f"{name}.{number}", *tensors))
        return result


def _outputs(result: Any, arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of a result; without one, the last argument, which the operator has
    written to."""
    return [arguments[-1]] if result is None else tree_leaves(result)


def check(operator: str, arguments: Sequence[Any]) -> list[OperatorResult]:
    """Compare all outputs of an operator, and of its backward for a LoRA and for all weights, with
    the references."""
    row = OPERATORS[operator]
    compared = _Compared()
    floats = [i for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.is_floating_point()]
    # arguments with a gradient: of a LoRA, then of all weights
    trainings: list[Sequence[int]] = [row.trained, floats] if row.trained else [()]
    for trained in trainings:
        inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in arguments]
        leaves = [inputs[index].requires_grad_() for index in trained]
        with compared:
            outputs = []
            for out in tree_leaves(row.function(*inputs)):
                if isinstance(out, Tensor) and out.requires_grad:
                    outputs.append(out)
            if outputs:
                upstream = [torch.randn_like(out) for out in outputs]
                torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    return compared.found


def wrong(comparisons: Iterable[OperatorResult], units: int = 8) -> str:
    """Say which tensors are wrong, or return an empty text.

    A sum in plain PyTorch may happen to be exact; another order of summation may differ by `units`
    of the largest.
    """
    found = []
    for comparison in comparisons:
        problem = comparison.problem(relative=units * UNIT)
        if problem and problem not in found:
            found.append(problem)
    return "; ".join(found)


def inputs(
    operator: str,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype] | torch.dtype,
    device: torch.device = CPU,
    *,
    layout: MemoryLayout = as_it_is,
    coefs: Tensor | None = None,
    optional: bool = True,
) -> list[Any]:
    """Make random arguments of an operator.

    Args:
        shape: `[B, ...]` of latents, `[B, S, d]` of tokens, (B, N, L, H, D) of `norm_rotate` and H
            once more to normalise all heads of a token together, or (B, T, H, W, C), the order in
            memory, of `norm_silu`.
        dtypes: of the latents and of the velocities: the policy's, the unconditional, the anchor's
            and the old one; or of the tokens and their modulation or weights. The last one serves
            the rest. One alone is that of a run, whose latents are float32.
        device: where they are.
        layout: of every tensor.
        coefs: table of the transitions, of 10 rows or more; by default that of flow, with a last
            row without noise.
        optional: with guidance, the old velocity and beta, and each sample at a step of its own.
            Otherwise as in a rollout or a KL to the anchor, at one step.
    """
    if isinstance(dtypes, torch.dtype):
        dtypes = (torch.float32, dtypes) if operator.startswith("transition") else (dtypes,)

    def dtype_of(number: int) -> torch.dtype:
        return dtypes[min(number, len(dtypes) - 1)]

    def random(*size: int, of: int = 0) -> Tensor:
        values = torch.randn(size, device=device).mul(2).add(0.5)
        return layout(values.to(dtype_of(of)))

    if operator.startswith("transition"):
        return _transition_inputs(operator, shape, random, layout, coefs, optional=optional)
    if operator == "norm_rotate":
        batch, tokens, texts, heads, width, *together = shape
        angles = 6.3 * torch.rand(tokens, width // 2, device=device)
        rotary = layout(torch.stack([angles.cos(), angles.sin()], dim=-1))
        joint = random(batch, tokens + texts, 3, heads, width)
        text = random(batch, texts, 3, heads, width)
        weights = [random(*together, width, of=1) for _ in range(4)]
        return [joint, text, *weights, rotary, 1e-6]
    if operator == "norm_silu":
        x = random(*shape).permute(0, 4, 1, 2, 3)
        weight = random(shape[4], of=1)[:, None, None, None]
        return [x, weight, shape[4] ** 0.5, torch.empty_like(x)]

    batch, _, width = shape
    if operator == "adapter_rows":
        return [random(*shape), random(min(width, 64), width), True]
    # chunks, as the model has them
    chunks = torch.randn(batch, 6, width, device=device).to(dtype_of(1)).unbind(1)
    sequences, modulations, more = TOKEN_INPUTS[operator]
    inputs = [random(*shape) for _ in range(sequences)]
    return [*inputs, *(layout(chunk) for chunk in chunks[:modulations]), *more]


TOKEN_INPUTS: dict[str, tuple[int, int, tuple[float, ...]]] = {
    "gated_sum": (2, 1, ()),
    "norm_modulate": (1, 2, (1e-6,)),
    "gated_norm": (2, 3, (1e-6,)),
}
"""Operator on tokens -> number of its sequences, number of its rows of modulation, and its last
argument, the epsilon of the norm."""


def _transition_inputs(
    operator: str,
    shape: Sequence[int],
    random: Callable[..., Tensor],
    layout: MemoryLayout,
    coefs: Tensor | None,
    *,
    optional: bool,
) -> list[Any]:
    """Make the arguments of a transition; those that are not named are as for `inputs`.

    Args:
        random: makes a tensor of a size, in the dtype of this number.
    """
    x, v, v_uncond, v_anchor = (random(*shape, of=i) for i in range(4))
    device, count = x.device, len(x)
    if coefs is None:
        table = transition_table(sigma_schedule(10, 5.0), "flow", 0.7).window(0, 9)
        coefs = table.coefficients()
    coefs = layout(coefs.to(device))
    step = torch.tensor(STEP, device=device)
    if optional:
        # ten take all rows
        step = layout(torch.arange(6, 6 + 3 * count, 3, device=device) % 10)
    lowest, highest = -(2**63), 2**63 - 1
    seed = layout(torch.randint(lowest, highest, (count,), device=device))
    guidance = (v_uncond, 6.0) if optional else (None, None)
    if operator == "transition_step":
        return [x, v, *guidance, coefs, step, seed]
    x_next = layout(registered("transition_step")(x, v, *guidance, coefs, step, seed)[0])
    v_old, beta = None, None
    if optional:
        v_old, beta = random(*shape, of=4), 0.3
    return [x, x_next, v, *guidance, v_anchor, v_old, coefs, step, beta]
