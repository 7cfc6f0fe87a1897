"""The accuracy criterion of every operator, and the float64 copies that it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOAT32_UNIT = torch.finfo(torch.float32).eps


def assert_accurate(name: str, fused: Tensor, plain: Tensor, exact: Tensor, atol: float | None = None) -> None:
    """`fused` may err at most twice as much as plain PyTorch, plus `atol`.

    Args:
        name: of the tensor, for the message.
        fused: what the operator gave.
        plain: what the reference gave in the same dtype.
        exact: what the reference gave in float64.
        atol: two float32 units in the last place of the largest exact value, whatever the storage type, if None.
    """
    assert exact.dtype == torch.float64, f"{name}: compared with {exact.dtype}, expected float64"
    assert fused.dtype == plain.dtype, f"{name}: {fused.dtype}, the reference gives {plain.dtype}"
    assert fused.shape == plain.shape == exact.shape, f"{name}: {fused.shape}, the reference gives {plain.shape}"
    if fused.numel() == 0:
        return
    assert fused.isfinite().all(), f"{name}: not finite"
    if atol is None:
        atol = 2 * FLOAT32_UNIT * exact.abs().max().item()
    error, allowed = ((value.double() - exact).abs().max().item() for value in (fused, plain))
    assert error <= 2 * allowed + atol, f"{name}: error {error:.3e}, plain PyTorch {allowed:.3e}, atol {atol:.1e}"


def double(*values: Any) -> list[Any]:
    """Tensors in float64; anything else as it is."""
    return [value.double() if isinstance(value, Tensor) else value for value in values]
