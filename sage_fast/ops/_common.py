"""Shared by the operators: library handle and compute dtype; row lookup and input checks of the
transitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LIBRARY = torch.library.Library("sage_fast", "DEF")

Implementation = Callable[..., Any]
"""What computes an operator, or its backward: a kernel, or the reference."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Accumulation dtype: float64 for float64 inputs (tests), fp32 for every other storage
    dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Coefficients(NamedTuple):
    """Coefficients of B transitions, each `[B]`, as `TransitionTable.coefficients` defines them."""

    a: Tensor
    b: Tensor
    c: Tensor
    w: Tensor
    k: Tensor
    m: Tensor


def row(coefs: Tensor, step: Tensor, x: Tensor) -> Coefficients:
    """Look up the rows of `step` (int64 `[]` or `[B]`), in the compute dtype of x `[B, ...]`."""
    return Coefficients(
        *coefs.index_select(0, step.reshape(-1))
        .to(compute_dtype(x))
        .expand(x.shape[0], 6)
        .unbind(1)
    )


def per_sample(scalar: Tensor, x: Tensor) -> Tensor:
    """Reshape `[B]` to `[B, 1, ...]`, which broadcasts over each sample."""
    return scalar.view(-1, *[1] * (x.ndim - 1))


def sample_numel(x: Tensor) -> int:
    """Number of elements per sample, at least 1: the mean of an empty sample is 0."""
    return max(math.prod(x.shape[1:]), 1)


def sample_mean(x: Tensor) -> Tensor:
    """Mean over every dimension but the batch, `[B]`; 0 for empty samples."""
    return x.reshape(len(x), math.prod(x.shape[1:])).sum(1) / sample_numel(x)


def check(
    x: Tensor,
    coefs: Tensor,
    step: Tensor,
    guidance: float | None,
    like_x: dict[str, Tensor | None],
    **others: Tensor,
) -> None:
    """Check shapes and devices from metadata alone, without synchronising.

    Args:
        guidance: goes together with `v_uncond` of `like_x`.
        like_x: name -> tensor that must have the shape of x.
        others: further tensors that must be on the device of x.

    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    if x.ndim < 1:
        raise ValueError("x: expected [B, ...], got a scalar")
    if coefs.ndim != 2 or coefs.shape[1] != 6:
        raise ValueError(
            f"coefs: expected [T, 6] from TransitionTable.coefficients(), got {list(coefs.shape)}"
        )
    if step.dtype != torch.int64 or step.shape not in (torch.Size([]), x.shape[:1]):
        raise ValueError(
            f"step: expected int64 [] or [{len(x)}], got {step.dtype} {list(step.shape)}"
        )
    if (like_x["v_uncond"] is None) != (guidance is None):
        raise ValueError("v_uncond and guidance go together: give both or neither")
    for name, tensor in like_x.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(
                f"{name}: expected the shape of x {list(x.shape)}, got {list(tensor.shape)}"
            )
    for name, tensor in {"coefs": coefs, "step": step, **like_x, **others}.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: is on {tensor.device}, x is on {x.device}")
