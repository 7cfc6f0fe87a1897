"""The random-number specification: Philox4x32-10 (Salmon et al., SC'11) and Box-Muller.

Every implementation that draws noise (this reference, csrc/, kernels/) follows it. So a seed gives
the same noise on every device, in every batch, and in every replay of a CUDA graph.

    key      (seed & 0xffffffff, seed >> 32)                 one 64-bit seed per sample
    counter  (block & 0xffffffff, block >> 32, step, stream) block = i // 4 for element i of the
                                                             sample, C order
    output   four 32-bit words w0..w3
    uniform  u_j = (w_j >> 8) 2^-24 + 2^-25                  in (0, 1], products exact and the sum
                                                             rounded in float32
    normal   element 4 block + 0: sqrt(-2 ln u0) cos(2 pi u1)     + 1: sqrt(-2 ln u0) sin(2 pi u1)
             element 4 block + 2: sqrt(-2 ln u2) cos(2 pi u3)     + 3: sqrt(-2 ln u2) sin(2 pi u3)

`stream` separates the uses of one seed: 0 for transition noise, 1 for initial latents, 2 for
noising final samples again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

STREAM_TRANSITION = 0
STREAM_INITIAL_LATENTS = 1
STREAM_FORWARD = 2

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Run ten rounds of Philox4x32 on int64 tensors that hold 32-bit words; return four such
    tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # An int64 product wraps, but has the same 64 bits as the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return [c0, c1, c2, c3]


def philox_normal(
    seed: Tensor,
    step: Tensor,
    sample_shape: Sequence[int],
    stream: int = STREAM_TRANSITION,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal noise, a pure function of (seed, step, stream, element).

    Args:
        seed: int64 `[B]`, one per sample.
        step: int64 `[]` or `[B]`, the transition's index.
        sample_shape: shape of one sample.
        stream: see the module's docstring.
        dtype: float32, or float64 for tests.

    Returns:
        `[B, *sample_shape]` on the device of `seed`.
    """
    numel = math.prod(sample_shape)
    block = torch.arange((numel + 3) // 4, device=seed.device)[None, :]
    ones = torch.ones_like(block)
    step = step.expand(seed.shape)[:, None]
    counter = (block & _MASK, block >> 32, (step & _MASK) * ones, stream * ones)
    words = philox4x32(counter, ((seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None]))
    # The uniforms are float32 in every implementation; only what follows uses `dtype`.
    u0, u1, u2, u3 = (((word >> 8).float() * 2.0**-24 + 2.0**-25).to(dtype) for word in words)
    radius_01, radius_23 = torch.sqrt(-2 * torch.log(u0)), torch.sqrt(-2 * torch.log(u2))
    angle_01, angle_23 = (2 * math.pi) * u1, (2 * math.pi) * u3
    normal = torch.stack(
        [
            radius_01 * torch.cos(angle_01),
            radius_01 * torch.sin(angle_01),
            radius_23 * torch.cos(angle_23),
            radius_23 * torch.sin(angle_23),
        ],
        dim=-1,
    )
    return normal.flatten(1)[:, :numel].reshape(len(seed), *sample_shape)
