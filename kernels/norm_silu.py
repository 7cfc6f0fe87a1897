"""RMSNorm over channels and SiLU on the GPU, some pixels of a row at a time.

x and out `[B, C, T, H, W]` with any strides. x is read once and out written once, 16 bytes a thread
where the channels lie next to each other. `sage_fast.ops.norm_silu` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sage_fast.kernels.common import LAUNCH_OPTIONS, power_of_2
from torch import Tensor

TILE = 4096
"""Values of a program: 32 a thread."""


@triton.jit
def _norm_silu_fwd_kernel(
    x_ptr,
    gamma_ptr,
    out_ptr,
    frames,
    width,
    channels,
    scale,
    gamma_stride,
    x_batch_stride,
    x_channel_stride,
    x_frame_stride,
    x_row_stride,
    x_pixel_stride,
    out_batch_stride,
    out_channel_stride,
    out_frame_stride,
    out_row_stride,
    out_pixel_stride,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute PIXELS pixels of a row of a frame. Grid `(pixel tiles, H, B T)`."""
    pixel = (tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)).to(tl.int64)[:, None]
    row = tl.program_id(1).to(tl.int64)
    sample, frame = (
        (tl.program_id(2) // frames).to(tl.int64),
        (tl.program_id(2) % frames).to(tl.int64),
    )
    channel = tl.arange(0, CHANNELS).to(tl.int64)[None, :]
    mask = (pixel < width) & (channel < channels)
    x_ptr += sample * x_batch_stride + frame * x_frame_stride + row * x_row_stride
    x = tl.load(
        x_ptr + pixel * x_pixel_stride + channel * x_channel_stride, mask=mask, other=0.0
    ).to(tl.float32)
    gamma = tl.load(gamma_ptr + channel * gamma_stride, mask=channel < channels, other=0.0).to(
        tl.float32
    )
    length = tl.sqrt(tl.sum(x * x, axis=1))[:, None]
    length = tl.maximum(length, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    y = x * (scale / length) * gamma
    out_ptr += sample * out_batch_stride + frame * out_frame_stride + row * out_row_stride
    out = (y / (1.0 + tl.exp(-y))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pixel * out_pixel_stride + channel * out_channel_stride, out, mask=mask)


def norm_silu(x: Tensor, gamma: Tensor, scale: float, out: Tensor) -> None:
    """Launch the kernel; arguments as `sage_fast::norm_silu`."""
    batch, channels, frames, height, width = x.shape
    if x.numel() == 0:
        return
    columns = power_of_2(channels)
    pixels = max(TILE // columns, 1)
    with torch.cuda.device_of(x):
        _norm_silu_fwd_kernel[(-(-width // pixels), height, batch * frames)](
            x,
            gamma,
            out,
            frames,
            width,
            channels,
            scale,
            gamma.stride(0),
            *x.stride(),
            *out.stride(),
            PIXELS=pixels,
            CHANNELS=columns,
            **LAUNCH_OPTIONS,
        )
