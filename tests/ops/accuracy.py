"""The accuracy that every operator owes, and the implementations that owe it."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from sage_fast.ops import implementation
from sage_fast.ops._calls import registered
from sage_fast.tools.operators import OperatorResult
from tests.ops.checks import Kernels


def assert_accurate(comparisons: Iterable[OperatorResult], **bounds: dict[str, float]) -> None:
    """Fail on the first tensor that is not finite or errs more than `OperatorResult.problem`
    allows.

    Args:
        comparisons: what a check yields.
        bounds: name of a tensor -> arguments of `OperatorResult.problem` for it.
    """
    for comparison in comparisons:
        assert comparison.fused.isfinite().all(), f"{comparison.name}: not finite"
        problem = comparison.problem(**bounds.get(comparison.name, {}))
        assert not problem, problem


def launcher(name: str) -> Callable[..., Any]:
    """Triton's launcher of an operator or its backward."""
    return getattr(
        importlib.import_module(f"sage_fast.kernels.{name.removesuffix('_backward')}"), name
    )


def kernels_of(implementation_name: str) -> tuple[Kernels, torch.device]:
    """The functions of an implementation, and the device that runs them."""
    if implementation_name == "triton":
        pytest.importorskip("triton")
        return launcher, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if implementation(torch.device("cpu")) != "C++":
        pytest.skip("the C++ extension is not built (or SAGE_FAST_OPS is set)")
    # `adapter_rows` has no C++: the CPU runs what is registered.
    return (
        lambda name: getattr(torch.ops.sage_fast_cpu, name, None) or registered(name),
        torch.device("cpu"),
    )
