"""Draw the true clips of a world."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.testbed.render import coverage
from sage_fast.testbed.world import (
    BACKGROUND,
    COLORS,
    FRAMES,
    HEIGHT,
    WIDTH,
    Scene,
    World,
)


def start_range(world: World, scene: Scene) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the smallest and the largest start (x, y) from which the form stays inside for all
    frames."""
    left, right, up, down = world.forms[scene.form].extent
    travel_x, travel_y = (v * (FRAMES - 1) for v in scene.velocity)
    low = (left - min(travel_x, 0.0), up - min(travel_y, 0.0))
    return low, (WIDTH - right - max(travel_x, 0.0), HEIGHT - down - max(travel_y, 0.0))


def random_start(world: World, scene: Scene, generator: torch.Generator) -> tuple[float, float]:
    """Draw a start position uniformly from `start_range`."""
    low, high = start_range(world, scene)
    u, w = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    return low[0] + u * (high[0] - low[0]), low[1] + w * (high[1] - low[1])


def render(world: World, scene: Scene, start: tuple[float, float] | torch.Generator) -> Tensor:
    """Render the video of a scene, float32 [17, 3, 32, 32] in [0, 1].

    Args:
        world: the world of the scene.
        scene: what is drawn.
        start: (x, y) of the form's centroid in the first frame, or the generator that draws it.
    """
    if isinstance(start, torch.Generator):
        start = random_start(world, scene, start)
    time = torch.arange(FRAMES, dtype=torch.float64)[:, None]
    center = torch.tensor(start, dtype=torch.float64) + time * torch.tensor(
        scene.velocity, dtype=torch.float64
    )
    return paint(coverage(world.forms[scene.form], center), scene.color)


def paint(alpha: Tensor, color: str) -> Tensor:
    """Blend the colour over the background with coverage `alpha` [..., H, W]; return float32 [...,
    3, H, W]."""
    rgb = torch.tensor(COLORS[color], dtype=alpha.dtype)[:, None, None]
    return (BACKGROUND + alpha[..., None, :, :] * (rgb - BACKGROUND)).to(torch.float32)
