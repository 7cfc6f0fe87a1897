"""Draw the scenes of the moving-shapes world."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.testbed.world import (
    BACKGROUND,
    CIRCLE_RADIUS,
    COLORS,
    FRAMES,
    HEIGHT,
    SHAPES,
    SQUARE_HALF,
    TRIANGLE_INRADIUS,
    TRIANGLE_NORMALS,
    WIDTH,
    Scene,
    start_range,
)


def coverage(shape: str, center: Tensor, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Return the share of each pixel that the shape covers (anti-aliased), [..., height, width] in [0, 1].

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
    elif shape == "triangle":
        (bottom, right, left) = (nx * dx + ny * dy for nx, ny in TRIANGLE_NORMALS)
        distance = torch.maximum(bottom, torch.maximum(right, left)) - TRIANGLE_INRADIUS
    else:
        raise ValueError(f'unknown shape "{shape}"; expected one of {", ".join(SHAPES)}')
    return (0.5 - distance).clamp_(0.0, 1.0)


def random_start(scene: Scene, generator: torch.Generator) -> tuple[float, float]:
    """Draw a start position uniformly from `start_range`."""
    low, high = start_range(scene)
    u, w = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    return low[0] + u * (high[0] - low[0]), low[1] + w * (high[1] - low[1])


def render(
    scene: Scene,
    generator: torch.Generator | None = None,
    *,
    start: tuple[float, float] | None = None,
    frames: int = FRAMES,
) -> Tensor:
    """Render the video of a scene, float32 [frames, 3, 32, 32] in [0, 1].

    Give either `generator`, to draw a start position that suits the full 17 frames, or `start`, the (x, y) of the
    shape's centroid in the first frame. `start` is not checked: the shape may leave the frame.
    """
    if (generator is None) == (start is None):
        raise ValueError("render needs either a generator or a start position")
    if start is None:
        assert generator is not None
        start = random_start(scene, generator)
    time = torch.arange(frames, dtype=torch.float64)[:, None]
    center = torch.tensor(start, dtype=torch.float64) + time * torch.tensor(scene.velocity, dtype=torch.float64)
    return paint(coverage(scene.shape, center), scene.color)


def paint(alpha: Tensor, color: str) -> Tensor:
    """Blend the colour over the background with coverage `alpha` [..., H, W]; return float32 [..., 3, H, W]."""
    rgb = torch.tensor(COLORS[color], dtype=alpha.dtype)[:, None, None]
    return (BACKGROUND + alpha[..., None, :, :] * (rgb - BACKGROUND)).to(torch.float32)
