"""Calls of the operators by name, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def registered(name: str) -> Callable[..., Any]:
    """Return an operator as registered: what a run calls on every device."""
    return getattr(torch.ops.sage_fast, name).default


def bytes_of_call(name: str, arguments: Sequence[Any], results: Any) -> int:
    """Return the bytes that a call of a registered operator reads and writes: its arguments and
    results once each.

    Args:
        name: the operator, or its backward.
    """
    count = sum(t.nbytes for t in tree_leaves((arguments, results)) if isinstance(t, Tensor))
    if name.startswith("norm_rotate"):  # it does not touch the values in the joint tensor
        count -= max(t.nbytes for t in arguments if isinstance(t, Tensor)) // 3
    if name == "adapter_rows_backward":  # it writes over its gradient
        count += arguments[0].nbytes
    return count
