"""The moving-shapes world: one coloured shape crosses a dark frame at a constant velocity.

A scene is a point of a small grid (shape x colour x direction x speed, 96 captions). Its videos
differ only in where the shape starts. Coordinates are in pixels, x to the right and y down; pixel
`i` covers `[i, i + 1)`. Imports nothing heavy.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from sage_fast.util.errors import nearest

FRAMES = 17
HEIGHT = 32
WIDTH = 32

SHAPES = ("circle", "square", "triangle")
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
SPEEDS: dict[str, float] = {"slowly": 0.4, "quickly": 1.0}  # pixels per frame
# The largest channel of every colour is PEAK, so a pixel's largest channel alone gives its
# coverage.
PEAK = 0.9
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (PEAK, 0.12, 0.12),
    "green": (0.12, PEAK, 0.2),
    "blue": (0.15, 0.3, PEAK),
    "yellow": (PEAK, PEAK, 0.12),
}
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "color": tuple(COLORS),
    "direction": tuple(DIRECTIONS),
    "speed": tuple(SPEEDS),
}
BACKGROUND = 0.06

# Sizes in pixels. The three shapes have the same area, so that size does not give the shape away.
AREA = 100.0
CIRCLE_RADIUS = math.sqrt(AREA / math.pi)
SQUARE_HALF = math.sqrt(AREA) / 2
TRIANGLE_INRADIUS = math.sqrt(AREA / (3 * math.sqrt(3)))
# base below, apex above
TRIANGLE_NORMALS = ((0.0, 1.0), (math.sqrt(3) / 2, -0.5), (-math.sqrt(3) / 2, -0.5))


@dataclass(frozen=True)
class Scene:
    """The content of a caption: everything about a video except where its shape starts."""

    shape: str
    color: str
    direction: str
    speed: str

    @property
    def caption(self) -> str:
        return f"a {self.color} {self.shape} moves {self.direction} {self.speed}"

    @property
    def velocity(self) -> tuple[float, float]:
        """(x, y) in pixels per frame."""
        x, y = DIRECTIONS[self.direction]
        return x * SPEEDS[self.speed], y * SPEEDS[self.speed]


def parse(caption: str) -> Scene:
    """Parse a caption, the inverse of `Scene.caption`.

    Raises:
        ValueError: names the word at fault.
    """
    words = caption.split()
    if len(words) != 6:
        raise ValueError(
            f'caption "{caption}": expected 6 words, such as "a red circle moves left quickly"'
        )
    known: list[Iterable[str]] = [["a"], COLORS, SHAPES, ["moves"], DIRECTIONS, SPEEDS]
    for word, choices in zip(words, map(list, known)):
        if word not in choices:
            raise ValueError(
                f'unknown word "{word}" in caption "{caption}": {nearest(word, choices)}'
            )
    return Scene(color=words[1], shape=words[2], direction=words[4], speed=words[5])


def all_scenes() -> list[Scene]:
    """Return the 96 scenes in a fixed order."""
    grid = itertools.product(SHAPES, COLORS, DIRECTIONS, SPEEDS)
    return [Scene(shape=a, color=b, direction=c, speed=d) for a, b, c, d in grid]


def _is_heldout(scene: Scene) -> bool:
    # A Latin design: for each shape, direction and speed exactly one colour is held out, each
    # colour equally often. Training sees every word and most pairs of words, but not these
    # combinations.
    position = SHAPES.index(scene.shape) + list(COLORS).index(scene.color)
    position += list(DIRECTIONS).index(scene.direction) + 2 * list(SPEEDS).index(scene.speed)
    return position % 4 == 0


def train_prompts() -> list[str]:
    """Return the 72 captions that the base model and the policy are trained on."""
    return [scene.caption for scene in all_scenes() if not _is_heldout(scene)]


def heldout_prompts() -> list[str]:
    """Return the 24 captions held out for evaluation, ordered so that the first few differ in every
    attribute."""
    captions = [scene.caption for scene in all_scenes() if _is_heldout(scene)]
    return [captions[7 * i % len(captions)] for i in range(len(captions))]
