"""The autograd kernel of an operator: the derivatives that it does not have raise an error.

PyTorch would return 0 or None for them. An operator has at most its first derivative, in reverse
mode (`backward` and `torch.autograd.grad`). Its reference in plain PyTorch has all others, at the
price of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from sage_fast.ops._common import Implementation


def autograd_kernel(
    name: str,
    operator: Any,
    backward: Implementation | None,
    setup_context: Implementation | None,
    *,
    mutates: bool,
) -> Implementation:
    """Return the kernel to register for `Autograd`, with its keyset.

    Args:
        name: name of the operator.
        operator: its overload in `torch.ops`.
        backward, setup_context: as `torch.library.register_autograd` takes them; without, it has no
            derivative.
        mutates: it writes to an argument, so that it raises where one requires a gradient, before
            anything is written.
    """

    def forward(ctx: Any, *arguments: Any) -> Any:
        *inputs, keyset = arguments
        result = _below_autograd(operator, keyset, inputs)
        if setup_context is not None:
            setup_context(ctx, tuple(inputs), result)
        return result

    def first_derivative(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if backward is None:
            raise _no_derivative(name)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.is_grad_enabled():  # create_graph
            # The results depend on these alone, so that a second derivative passes through one of
            # them.
            sources = [
                x for x in (*grads, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad
            ]
            results = tree_map_only(
                Tensor, lambda result: _Underived.apply(name, result, *sources), results
            )
        return *results, None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(first_derivative)}
    function: Any = type(f"{name}_autograd", (torch.autograd.Function,), methods)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        check_no_tangent(name, arguments)
        # The dispatcher leaves out arguments that equal their defaults.
        defaults = [
            argument.default_value for argument in operator._schema.arguments[len(arguments) :]
        ]
        inputs = [*arguments, *defaults]
        needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if not needs_grad or not torch.is_grad_enabled():
            return _below_autograd(operator, keyset, inputs)
        if mutates:
            raise _no_derivative(name)
        return function.apply(*inputs, keyset)

    return kernel


def _below_autograd(operator: Any, keyset: Any, inputs: Iterable[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def check_no_tangent(name: str, arguments: Iterable[object]) -> None:
    """Check that no argument is differentiated in forward mode.

    Raises:
        NotImplementedError: one is a dual tensor, as within `torch.func.jvp` and
            `forward_ad.make_dual`.
    """
    for argument in arguments:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"sage_fast::{name} has no derivative in forward mode (torch.func.jvp, "
                "forward_ad); expected reverse mode, or its reference in plain PyTorch"
            )


def _no_derivative(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"sage_fast::{name} has no derivative; expected a call under torch.no_grad(), or its "
        "reference in plain PyTorch"
    )


def _no_second_derivative(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"sage_fast: {name} has no second derivative (create_graph=True); expected its first one "
        "alone, or its reference in plain PyTorch"
    )


class _Underived(torch.autograd.Function):
    """Result of a backward, which cannot be differentiated; `sources` are what it was computed
    from."""

    @staticmethod
    def forward(ctx: Any, name: str, result: Tensor, *sources: Tensor) -> Tensor:
        ctx.name = name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise _no_second_derivative(ctx.name)


def first_order(backward: Implementation) -> Implementation:
    """Decorate the backward of an autograd function around operators: it raises where its graph is
    asked for.

    It cannot wait until the graph is used: such a function saves tensors that have no graph of
    their own.
    """

    @functools.wraps(backward)
    def only_first(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise _no_second_derivative(backward.__qualname__.partition(".")[0].strip("_"))
        return backward(ctx, *grads)

    return only_first
