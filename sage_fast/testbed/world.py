"""The world of balls: one coloured ball, small or big, crosses a dark frame at a constant velocity.

A scene is a point of a small grid (size x colour x direction x speed, 64 captions). Its videos
differ only in where the ball starts. Coordinates are in pixels, x to the right and y down; pixel
`i` covers `[i, i + 1)`. Imports nothing heavy.

`World` also describes other worlds of this kind: `studies.shapes` has circles, squares and
triangles.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sage_fast.util.errors import UserError, nearest

FRAMES = 17
HEIGHT = 32
WIDTH = 32

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
BACKGROUND = 0.06
HELDOUT = 0
"""Column of the scenes whose captions are held out."""


@dataclass(frozen=True)
class Form:
    """An outline at a size: a disc, or a polygon with an inscribed circle.

    Attributes:
        area: pixels that it covers.
        radius: pixels: of the disc, or of the circle inside the polygon.
        normals: unit (x, y) that point out of each side of the polygon; none for a disc.
        extent: pixels from its centroid to its left, right, upper and lower end.
    """

    area: float
    radius: float
    normals: tuple[tuple[float, float], ...]
    extent: tuple[float, float, float, float]


def disc(area: float) -> Form:
    """Return the disc of an area in pixels."""
    radius = math.sqrt(area / math.pi)
    return Form(area=area, radius=radius, normals=(), extent=(radius,) * 4)


@dataclass(frozen=True)
class Scene:
    """The content of a caption: everything about a video except where its thing starts.

    Attributes:
        form: name of its `Form`: `small` or `big` in the world of balls.
        color, direction, speed: words of `COLORS`, `DIRECTIONS`, `SPEEDS`.
    """

    form: str
    color: str
    direction: str
    speed: str

    @property
    def velocity(self) -> tuple[float, float]:
        """(x, y) in pixels per frame."""
        x, y = DIRECTIONS[self.direction]
        return x * SPEEDS[self.speed], y * SPEEDS[self.speed]


@dataclass(frozen=True, eq=False)
class World:
    """Scenes, their captions, and the split of the captions.

    Attributes:
        form_name: what captions tell forms apart by: `size` in the world of balls.
        forms: word -> form.
        template: a caption with `{form}`, `{color}`, `{direction}` and `{speed}` in it.
        window: pixels: radius of a window around the centroid that holds every form.
        temperature: difference of overlap that tells one form from another.
    """

    form_name: str
    forms: Mapping[str, Form]
    template: str
    window: float
    temperature: float

    @functools.cached_property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        """Field of a `Scene` -> its words."""
        return {
            "form": tuple(self.forms),
            "color": tuple(COLORS),
            "direction": tuple(DIRECTIONS),
            "speed": tuple(SPEEDS),
        }

    def attribute_of(self, field: str) -> str:
        """Return what a field of a `Scene` is called in this world."""
        return self.form_name if field == "form" else field

    @functools.cached_property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """What a caption names -> its words."""
        return {self.attribute_of(field): words for field, words in self.vocabulary.items()}

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Every word of a caption, in a fixed order."""
        literal = [word for word in self.template.split() if not word.startswith("{")]
        return (*literal, *COLORS, *self.forms, *DIRECTIONS, *SPEEDS)

    @property
    def told_by_outline(self) -> bool:
        """Whether the forms have one area, so that only their outlines tell them apart."""
        return len({form.area for form in self.forms.values()}) == 1

    def words_of(self, scene: Scene) -> dict[str, str]:
        """Return what a caption names -> its word in this scene."""
        return {self.attribute_of(field): getattr(scene, field) for field in self.vocabulary}

    def caption(self, scene: Scene) -> str:
        return self.template.format(**dataclasses.asdict(scene))

    def parse(self, caption: str) -> Scene:
        """Parse a caption, the inverse of `caption`.

        Raises:
            UserError: names the word at fault.
        """
        words, expected = caption.split(), self.template.split()
        if len(words) != len(expected):
            example = self.caption(self.scenes[0])
            raise UserError(
                f'caption "{caption}": expected {len(expected)} words, such as "{example}"'
            )
        found = {}
        for word, place in zip(words, expected):
            named = re.fullmatch(r"\{(\w+)\}", place)
            known = self.vocabulary[named[1]] if named else (place,)
            if word not in known:
                raise UserError(
                    f'unknown word "{word}" in caption "{caption}": {nearest(word, known)}'
                )
            if named:
                found[named[1]] = word
        return Scene(**found)

    @functools.cached_property
    def scenes(self) -> list[Scene]:
        """All scenes in a fixed order."""
        grid = itertools.product(*self.vocabulary.values())
        return [Scene(**dict(zip(self.vocabulary, words))) for words in grid]

    def train_prompts(self) -> list[str]:
        """Return the captions that the base model and the policy are trained on."""
        return [self.caption(scene) for scene in self.scenes if self.column(scene) != HELDOUT]

    def heldout_prompts(self) -> list[str]:
        """Return the captions held out for evaluation, in a mixed order: an evaluation of the first
        few has several words of every kind."""
        captions = [self.caption(scene) for scene in self.scenes if self.column(scene) == HELDOUT]
        # 7 divides the number of captions of no world here, so that each comes once
        return [captions[7 * i % len(captions)] for i in range(len(captions))]

    def column(self, scene: Scene) -> int:
        """Return the column of a Latin design that a scene is in, 0 to 3.

        For each form, direction and speed exactly one colour is in a column, each colour equally
        often. Training without a column sees every word and every pair of words, but not these
        combinations.
        """
        form = list(self.forms).index(scene.form)
        color = list(COLORS).index(scene.color)
        direction = list(DIRECTIONS).index(scene.direction)
        speed = list(SPEEDS).index(scene.speed)
        return (form + color + direction + 2 * speed) % 4


BALLS = World(
    form_name="size",
    forms={"small": disc(45.0), "big": disc(135.0)},
    template="a {form} {color} ball moves {direction} {speed}",
    window=8.5,
    temperature=0.2,
)


def train_prompts() -> list[str]:
    """Return the 48 captions that the base model and the policy are trained on."""
    return BALLS.train_prompts()


def heldout_prompts() -> list[str]:
    """Return the 16 captions held out for evaluation."""
    return BALLS.heldout_prompts()
