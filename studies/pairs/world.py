"""The world of pairs: two shapes of different colours cross a dark frame of 64 x 64 pixels, each
its own way.

A scene is two things of shape x colour x direction (864 captions). Its videos differ only in where
the two start; they never touch. Shapes, colours and coordinates are those of `studies.shapes`, at
the same size in pixels, so its autoencoder serves here too.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sage_fast.testbed.render import coverage
from sage_fast.testbed.world import BACKGROUND, COLORS, DIRECTIONS
from sage_fast.util.errors import UserError
from studies.shapes.world import SHAPES

FOLDER = Path(__file__).parent
BASE = FOLDER / "base"
"""Folder of the pre-trained weights."""
FRAMES = 5
SIZE = 64
SPEED = 1.0  # pixels per frame
MARGIN = 9.0  # pixels from the centroid to the frame's border, more than the reach of any shape
APART = 17.0  # pixels between the two centroids, at least


@dataclass(frozen=True)
class Thing:
    """One of the two shapes of a scene."""

    color: str
    shape: str
    direction: str

    @property
    def caption(self) -> str:
        return f"a {self.color} {self.shape} moves {self.direction}"

    @property
    def velocity(self) -> tuple[float, float]:
        """(x, y) in pixels per frame."""
        x, y = DIRECTIONS[self.direction]
        return SPEED * x, SPEED * y


Scene = tuple[Thing, Thing]
"""The content of a caption; the colour of the first is earlier in `COLORS`."""


def caption(scene: Scene) -> str:
    return " and ".join(thing.caption for thing in scene)


@functools.cache
def scenes() -> dict[str, Scene]:
    """Return caption -> scene for all 864 scenes, in a fixed order."""
    things = [
        [
            Thing(color, shape, direction)
            for shape, direction in itertools.product(SHAPES.forms, DIRECTIONS)
        ]
        for color in COLORS
    ]
    pairs = [
        pair
        for first, second in itertools.combinations(things, 2)
        for pair in itertools.product(first, second)
    ]
    return {caption(pair): pair for pair in pairs}


def parse(text: str) -> Scene:
    """Parse a caption, the inverse of `caption`.

    Raises:
        UserError: it is no caption of this world; names the nearest.
    """
    if text not in scenes():
        close = difflib.get_close_matches(text, scenes(), n=1, cutoff=0.0)[0]
        raise UserError(f"prompt {text!r}: expected a caption of two things, such as {close!r}")
    return scenes()[text]


def heldout_prompts() -> list[str]:
    """Return the 24 captions for evaluation: every 181st of all, four of each pair of colours."""
    return (FOLDER / "heldout.txt").read_text(encoding="utf-8").splitlines()


def train_prompts() -> list[str]:
    """Return the other 840 captions, on which the base model and the policy are trained, in a mixed
    order."""
    return (FOLDER / "train.txt").read_text(encoding="utf-8").splitlines()


def render(scene: Scene, generator: torch.Generator) -> Tensor:
    """Draw a video of the scene, float32 [5, 3, 64, 64] in [0, 1], from a random start."""
    return paint(scene, paths(scene, generator))


def paths(scene: tuple[Thing, ...], generator: torch.Generator) -> Tensor:
    """Draw the (x, y) of both centroids in each frame, float32 [2, 5, 2]: inside the frame, and
    never close."""
    velocity = torch.tensor([thing.velocity for thing in scene])
    travel = (FRAMES - 1) * velocity
    low, high = MARGIN - travel.clamp(max=0), SIZE - MARGIN - travel.clamp(min=0)
    time = torch.arange(FRAMES)[None, :, None]
    while True:
        start = low + torch.rand(2, 2, generator=generator) * (high - low)
        found = start[:, None] + time * velocity[:, None]
        if (found[0] - found[1]).norm(dim=-1).min() >= APART:
            return found


def paint(things: tuple[Thing, ...], centers: Tensor) -> Tensor:
    """Paint things at `centers` [things, F, 2]; return float32 [F, 3, 64, 64]."""
    video = torch.full((centers.shape[1], 3, SIZE, SIZE), BACKGROUND)
    for thing, center in zip(things, centers):
        rgb = torch.tensor(COLORS[thing.color])[:, None, None]
        video = video + coverage(SHAPES.forms[thing.shape], center, SIZE, SIZE)[:, None] * (
            rgb - video
        )
    return video
