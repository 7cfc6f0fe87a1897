"""RMSNorm over the channels of a video, then SiLU, in one pass: what stands before each convolution
of a VAE's decoder.

    out = SiLU(x scale gamma / max(|x|, 1e-12))

It writes into a given tensor, such as the inside of a padded one, and has no gradient. On a GPU it
computes in float32 and rounds once; the reference, which the CPU runs (there is no C++), rounds
after each of its three steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_fast.ops._dispatch import register


def normalize(x: Tensor, gamma: Tensor, scale: float, out: Tensor) -> Tensor:
    """Compute x scale gamma / max(|x|, 1e-12) over the channels, the norm in float32 (no float32
    copy of x on a GPU).

    On the CPU this is for channels-last layout: PyTorch vectorises the reduction over the innermost
    dimension alone.
    """
    length = torch.linalg.vector_norm(
        x, dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    torch.mul(x, length.clamp_(min=1e-12).reciprocal_().mul_(scale), out=out)
    return out.mul_(gamma)


def norm_silu_reference(x: Tensor, gamma: Tensor, scale: float, out: Tensor) -> None:
    """Specification: x and out `[B, C, T, H, W]` of one dtype with any strides, gamma `[C, 1, 1,
    1]`."""
    F.silu(normalize(x, gamma, scale, out), inplace=True)


register(norm_silu_reference, mutates=("out",), cpp=False)
