"""Distance of a video to the data manifold of the world of shapes: that to the nearest true clip.

A true clip is one of the 96 scenes, from a start position at which the shape stays inside the
frame. The distance is the root mean square difference over frames, channels and pixels, in units of
the pixel range [0, 1].
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from sage_fast.testbed.render import coverage
from sage_fast.testbed.world import BACKGROUND, COLORS, FRAMES, Scene
from studies.shapes.world import SHAPES
from studies.testbed.render import render, start_range

SPACING = 1.0
"""Pixels between the start positions of the first search; a shape is ten pixels wide."""
STRIDE = 4
"""Frame stride of the first search."""
CANDIDATES = 12
"""Scenes whose start position is refined."""
HALVINGS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearestClip:
    """The true clip nearest to a video.

    Attributes:
        distance: root mean square difference over frames, channels and pixels.
        scene, start: the clip, as in `render(SHAPES, scene, start=start)`.
    """

    distance: float
    scene: Scene
    start: tuple[float, float]


@torch.no_grad()
def nearest_clips(videos: Tensor) -> list[NearestClip]:
    """Find the true clip nearest to each video.

    With u = video - background and w = colour - background, a clip with coverage alpha is at the
    squared distance |u|^2 - 2 <alpha, u w> + |w|^2 |alpha|^2, so a start costs one inner product
    per colour. The first search tries starts one pixel apart for all scenes, on every fourth frame.
    The second refines the best twelve scenes on all frames: the step shrinks from half a pixel to a
    thousandth by halving, and at each step a start moves to the best of itself and its eight
    neighbours, and the better half of the scenes stays.

    The distance belongs to a clip that exists, so it is never too small. It is too large by the
    cost of a thousandth of a pixel: up to 2e-4 near a true clip, and below 1e-6 at the distances of
    decoded videos (0.02 and more). It is not proved that no better clip is missed, but tested
    against a fine grid over every scene.

    Args:
        videos: float `[B, 17, 3, 32, 32]` in [0, 1].
    """
    u = videos.float() - BACKGROUND
    paint = torch.tensor(list(COLORS.values())) - BACKGROUND  # [colours, 3]
    # <u, w> of each pixel, [colours, B, F, H W]
    seen = torch.einsum("bfchw,kc->kbfhw", u, paint).flatten(3)
    weight = paint.square().sum(1)

    scenes = SHAPES.scenes
    first = torch.arange(0, FRAMES, STRIDE)
    few = seen[:, :, first].flatten(2)
    least = torch.empty(len(videos), len(scenes))
    starts = torch.empty(len(videos), len(scenes), 2)
    for motion in {(scene.form, scene.direction, scene.speed): scene for scene in scenes}.values():
        grid = _grid(motion)
        alpha = _coverage(motion, grid, first)
        for k, color in enumerate(COLORS):
            i = scenes.index(dataclasses.replace(motion, color=color))
            least[:, i], index = (weight[k] * alpha.square().sum(1) - 2 * few[k] @ alpha.T).min(1)
            starts[:, i] = grid[index]

    found = []
    for b, best in enumerate(least.topk(CANDIDATES, largest=False).indices.tolist()):
        left = [(0.0, scenes[i], starts[b, i]) for i in best]
        for halving in range(1, HALVINGS + 1):
            moved = [
                _move(scene, start, SPACING / 2**halving, seen[:, b], weight)
                for _, scene, start in left
            ]
            left = sorted(moved, key=lambda candidate: candidate[0])[: max(len(left) // 2, 1)]
        [(_, scene, start)] = left
        x, y = start.tolist()
        distance = float(
            (videos[b] - render(SHAPES, scene, start=(x, y))).double().square().mean().sqrt()
        )
        found.append(NearestClip(distance=distance, scene=scene, start=(x, y)))
    return found


def manifold_distances(videos: Tensor) -> Tensor:
    """Return the distance of each video to the nearest true clip, float64 `[B]`; see
    `nearest_clips`."""
    return torch.tensor([clip.distance for clip in nearest_clips(videos)], dtype=torch.float64)


def _move(
    scene: Scene, start: Tensor, step: float, seen: Tensor, weight: Tensor
) -> tuple[float, Scene, Tensor]:
    """Return the best of a start and its eight neighbours, clamped so that the shape stays inside
    the frame."""
    low, high = (torch.tensor(corner) for corner in start_range(SHAPES, scene))
    neighbours = (start + step * torch.cartesian_prod(*[torch.tensor([0.0, -1.0, 1.0])] * 2)).clamp(
        low, high
    )
    alpha = _coverage(scene, neighbours, torch.arange(FRAMES))
    k = list(COLORS).index(scene.color)
    costs = weight[k] * alpha.square().sum(1) - 2 * alpha @ seen[k].flatten()
    best = int(costs.argmin())
    return float(costs[best]), scene, neighbours[best]


def _grid(scene: Scene) -> Tensor:
    """Return a grid of start positions at most SPACING apart, both ends included, float32 `[starts,
    2]`."""
    axes = [
        torch.linspace(low, high, math.ceil((high - low) / SPACING) + 1)
        for low, high in zip(*start_range(SHAPES, scene))
    ]
    return torch.cartesian_prod(*axes)


def _coverage(scene: Scene, starts: Tensor, frames: Tensor) -> Tensor:
    """Return the coverage of each start in each frame, float32 `[starts, frames H W]`."""
    centers = starts[:, None] + frames[:, None] * torch.tensor(scene.velocity)
    return coverage(SHAPES.forms[scene.form], centers).flatten(1)
