"""Classifier-free guidance of a velocity."""

from __future__ import annotations

import torch
from torch import Tensor


def guided(
    v: Tensor, v_uncond: Tensor | None, guidance: float | None, dtype: torch.dtype
) -> Tensor:
    """Return v_uncond + guidance (v - v_uncond) in `dtype`, or v without guidance.

    Each of the three operations rounds. The fused operators round alike, so a velocity stored by
    this function is, to the bit, the one that they form of the same inputs.
    """
    if v_uncond is None or guidance is None:
        return v.to(dtype)
    return v_uncond.to(dtype) + guidance * (v.to(dtype) - v_uncond.to(dtype))
