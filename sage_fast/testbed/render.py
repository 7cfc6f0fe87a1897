"""Draw the forms of a world."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.testbed.world import HEIGHT, WIDTH, Form


def coverage(form: Form, center: Tensor, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Return the share of each pixel that a form covers (anti-aliased), [..., height, width] in
    [0, 1].

    Args:
        form: what is drawn.
        center: [..., 2], the (x, y) of its centroid.
        height: pixels.
        width: pixels.
    """
    x = torch.arange(width, dtype=center.dtype, device=center.device) + 0.5
    y = torch.arange(height, dtype=center.dtype, device=center.device) + 0.5
    dx = x - center[..., 0, None]  # [..., width]
    dy = y - center[..., 1, None]  # [..., height]
    dx, dy = dx[..., None, :], dy[..., :, None]
    if not form.normals:
        distance = torch.sqrt(dx * dx + dy * dy)
    else:
        first, *others = (nx * dx + ny * dy for nx, ny in form.normals)
        distance = first
        for beyond in others:
            distance = torch.maximum(distance, beyond)
    return (0.5 - (distance - form.radius)).clamp_(0.0, 1.0)
