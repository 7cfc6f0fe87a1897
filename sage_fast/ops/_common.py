"""What the operators share: the library handle and the compute type; and of the transitions, row lookup and checks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LIBRARY = torch.library.Library("sage_fast", "DEF")


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp32 accumulation for every storage type; float64 inputs (tests) stay float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Row(NamedTuple):
    """The coefficients of B transitions, each `[B]`; `TransitionTable.coefficients` says what they are."""

    a: Tensor
    b: Tensor
    c: Tensor
    w: Tensor
    k: Tensor
    m: Tensor


def row(coefs: Tensor, step: Tensor, x: Tensor) -> Row:
    """The rows of `step` int64 `[]` or `[B]`, in the compute type of x `[B, ...]`."""
    return Row(*coefs[step].to(compute_dtype(x)).expand(x.shape[0], 6).unbind(1))


def per_sample(scalar: Tensor, x: Tensor) -> Tensor:
    """`[B]` -> `[B, 1, ...]`, to broadcast over a sample."""
    return scalar.view(-1, *[1] * (x.ndim - 1))


def sample_numel(x: Tensor) -> int:
    """Elements of one sample, at least 1 (the mean over none is 0)."""
    return max(math.prod(x.shape[1:]), 1)


def sample_mean(x: Tensor) -> Tensor:
    """Mean over everything but the batch, `[B]`; 0 for samples without elements."""
    return x.reshape(len(x), math.prod(x.shape[1:])).sum(1) / sample_numel(x)


def check(
    x: Tensor, coefs: Tensor, step: Tensor, same_shape: dict[str, Tensor | None], others: dict[str, Tensor | None]
) -> None:
    """Shapes and devices, from metadata alone (no synchronisation).

    Args:
        same_shape: tensors that must have the shape of x, by name.
        others: further tensors that must be on the device of x.

    Raises:
        ValueError: naming the tensor that does not fit.
    """
    if x.ndim < 1:
        raise ValueError("x: expected [B, ...], got a scalar")
    if coefs.ndim != 2 or coefs.shape[1] != 6:
        raise ValueError(f"coefs: expected [T, 6] from TransitionTable.coefficients(), got {list(coefs.shape)}")
    if step.dtype != torch.int64 or step.shape not in (torch.Size([]), x.shape[:1]):
        raise ValueError(f"step: expected int64 [] or [{len(x)}], got {step.dtype} {list(step.shape)}")
    for name, tensor in same_shape.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name}: expected the shape of x {list(x.shape)}, got {list(tensor.shape)}")
    for name, tensor in {"coefs": coefs, "step": step, **same_shape, **others}.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: is on {tensor.device}, x is on {x.device}")
