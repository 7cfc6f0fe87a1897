"""Derivatives that an operator does not have raise, where PyTorch would return 0 or None.

Every registered operator is walked, also those that only a backward calls. The kernel under test is
registered for `Autograd`, above the implementations of all devices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_fast.models.attention import sequence
from sage_fast.models.lora import linear
from sage_fast.ops import norm_modulate, norm_rotate
from sage_fast.ops._calls import registered
from sage_fast.ops._common import LIBRARY
from sage_fast.ops._dispatch import REFERENCES
from sage_fast.tools.operators import OPERATORS, inputs

REFUSED = (NotImplementedError, RuntimeError)
"""What raises: ours, and that of PyTorch for an autograd function, which has no jvp and no
functorch rule."""


class _Recorded(TorchDispatchMode):
    """Keeps the arguments of the first call of each of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Any]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if operator.namespace == LIBRARY.ns:
            copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in arguments]
            self.calls.setdefault(operator._opname, copies)
        return operator(*arguments, **(keywords or {}))


def floats(arguments: list[Any]) -> list[int]:
    return [i for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.is_floating_point()]


def recorded() -> dict[str, list[Any]]:
    """Arguments of a call of every operator, by a forward and a backward with all gradients."""
    torch.manual_seed(0)
    mode = _Recorded()
    for name, row in OPERATORS.items():
        given = inputs(name, row.example, torch.float32)
        for place in floats(given) if row.trained else ():
            given[place].requires_grad_()
        with mode:
            found = [
                x
                for x in tree_leaves(row.function(*given))
                if isinstance(x, Tensor) and x.requires_grad
            ]
            if found:
                torch.autograd.backward(found, [torch.randn_like(x) for x in found])
    x, grad = torch.randn(5, 8), torch.randn(5, 8)
    with mode:  # the fused feed-forward calls it
        torch.ops.sage_fast.adapter_rows_backward(grad, torch.randn(5, 3), x, torch.randn(5, 2))
    return mode.calls


CALLS = recorded()


PLACES = [(name, place) for name, arguments in CALLS.items() for place in floats(arguments)]
"""Every operator as registered, and each of its arguments that could have a derivative."""
CALLED = [
    (name, place)
    for name, row in OPERATORS.items()
    for place in floats(inputs(name, row.example, torch.float32))
]
"""Every operator as a model calls it, and each of these arguments."""


def test_every_operator_is_walked() -> None:
    assert CALLS.keys() == REFERENCES.keys()


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_forward_mode_of_a_registered_operator_raises(name: str, place: int) -> None:
    given = [x.clone() if isinstance(x, Tensor) else x for x in CALLS[name]]
    tangent = torch.ones_like(given[place])

    def at(value: Tensor) -> Any:
        out = registered(name)(*given[:place], value, *given[place + 1 :])
        return value if out is None else out

    message = f"sage_fast::{name} has no derivative in forward mode"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(at, (given[place],), (tangent,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        at(forward_ad.make_dual(given[place], tangent))
    at(given[place])  # without a tangent it runs


@pytest.mark.parametrize(("name", "place"), CALLED)
def test_forward_mode_of_what_a_model_calls_raises(name: str, place: int) -> None:
    function, given = OPERATORS[name].function, inputs(name, OPERATORS[name].example, torch.float32)
    tangent = torch.ones_like(given[place])

    def at(value: Tensor) -> Any:
        return function(*given[:place], value, *given[place + 1 :])

    with pytest.raises(REFUSED, match=r"forward mode|jvp|setup_context"):
        torch.func.jvp(at, (given[place],), (tangent,))
    with forward_ad.dual_level(), pytest.raises(REFUSED, match=r"forward mode|jvp"):
        at(forward_ad.make_dual(given[place], tangent))


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_an_operator_without_a_derivative_says_so(name: str, place: int) -> None:
    given = [x.clone() if isinstance(x, Tensor) else x for x in CALLS[name]]
    given[place].requires_grad_()
    if name in ("transition_score", "gated_norm", "gated_sum"):
        return  # they have one

    def differentiate() -> None:
        found = tree_leaves(registered(name)(*given))
        sum(x.sum() for x in found if x.is_floating_point()).backward()

    with pytest.raises(NotImplementedError, match=f"sage_fast::{name} has no derivative"):
        differentiate()
    with torch.no_grad():
        registered(name)(*given)


def second_derivative(name: str, places: list[int]) -> Any:
    """Differentiate the squared gradient of random projections of what a model calls."""
    given = inputs(name, OPERATORS[name].example, torch.float32)
    leaves = [given[place].requires_grad_() for place in places]
    found = [
        x
        for x in tree_leaves(OPERATORS[name].function(*given))
        if isinstance(x, Tensor) and x.requires_grad
    ]
    total = sum((x.square() * torch.randn_like(x)).sum() for x in found)
    gradients = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    penalty = sum(g.square().sum() for g in gradients if g is not None)
    return torch.autograd.grad(penalty, leaves, allow_unused=True)


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.trained])
@pytest.mark.parametrize("everything", [False, True])
def test_the_second_derivative_raises(name: str, everything: bool) -> None:
    row = OPERATORS[name]
    places = floats(inputs(name, row.example, torch.float32)) if everything else [*row.trained]
    with pytest.raises(
        NotImplementedError, match=r"has no second derivative \(create_graph=True\)"
    ):
        second_derivative(name, places)


def test_the_second_derivative_of_a_sum_raises_too() -> None:
    """Its incoming gradient is constant, so that the graph passes through what the backward saved
    alone."""
    given = inputs("transition_score", (2, 3, 4), torch.float32, optional=False)
    given[2].requires_grad_()
    log_prob, *_ = OPERATORS["transition_score"].function(*given)
    (gradient,) = torch.autograd.grad(log_prob.sum(), given[2], create_graph=True)
    with pytest.raises(NotImplementedError, match="transition_score has no second derivative"):
        torch.autograd.grad(gradient.square().sum(), given[2])


@pytest.mark.parametrize("name", ["transition_score", "gated_norm", "gated_sum"])
def test_the_first_derivative_is_that_of_every_way_to_ask(name: str) -> None:
    """Without a graph, and with one; `torch.func.grad`, which always asks for one, says what it
    lacks."""
    row = OPERATORS[name]
    given = inputs(name, row.example, torch.float32)
    place = row.trained[0]

    def total(value: Tensor) -> Tensor:
        outputs = tree_leaves(row.function(*given[:place], value, *given[place + 1 :]))
        return sum(x.double().square().sum() for x in outputs[:3])  # type: ignore[return-value]

    leaf = given[place].clone().requires_grad_()
    (plain,) = torch.autograd.grad(total(leaf), leaf)
    (graphed,) = torch.autograd.grad(total(leaf), leaf, create_graph=True)
    assert plain.abs().max() > 0
    assert torch.equal(plain, graphed)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(total)(given[place])


def test_every_autograd_function_around_operators_is_of_first_order() -> None:
    """Those of the operators, of the fused layers, and of the exchange of tokens."""
    modules = (norm_modulate, norm_rotate, linear, sequence)
    functions = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    ]
    assert len(functions) == 9
    for function in functions:
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            function.backward(None)
