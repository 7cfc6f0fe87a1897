"""Draw the shapes of the moving-shapes world."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.testbed.world import (
    CIRCLE_RADIUS,
    HEIGHT,
    SQUARE_HALF,
    TRIANGLE_INRADIUS,
    TRIANGLE_NORMALS,
    WIDTH,
)


def coverage(shape: str, center: Tensor, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Return the share of each pixel that the shape covers (anti-aliased), [..., height, width] in
    [0, 1].

    Args:
        shape: one of `SHAPES`.
        center: [..., 2], the (x, y) of the shape's centroid.
        height: pixels.
        width: pixels.
    """
    x = torch.arange(width, dtype=center.dtype, device=center.device) + 0.5
    y = torch.arange(height, dtype=center.dtype, device=center.device) + 0.5
    dx = x - center[..., 0, None]  # [..., width]
    dy = y - center[..., 1, None]  # [..., height]
    dx, dy = dx[..., None, :], dy[..., :, None]
    if shape == "circle":
        distance = torch.sqrt(dx * dx + dy * dy) - CIRCLE_RADIUS
    elif shape == "square":
        distance = torch.maximum(dx.abs(), dy.abs()) - SQUARE_HALF
    else:
        (bottom, right, left) = (nx * dx + ny * dy for nx, ny in TRIANGLE_NORMALS)
        distance = torch.maximum(bottom, torch.maximum(right, left)) - TRIANGLE_INRADIUS
    return (0.5 - distance).clamp_(0.0, 1.0)
