"""The world of shapes: one coloured circle, square or triangle crosses a dark frame at a constant
velocity (shape x colour x direction x speed, 96 captions).

The shapes have the same area, so that size does not give the shape away.
"""

from __future__ import annotations

import math
from pathlib import Path

from sage_fast.testbed.world import Form, World, disc

FOLDER = Path(__file__).parent
BASE = FOLDER / "base"
"""Folder of the pre-trained weights."""
WORLD_SETTINGS = {
    "model.path": "studies.shapes.model:Shapes:studies/shapes/base",
    "data.prompts": "studies/shapes/train.txt",
    "data.eval_prompts": "studies/shapes/heldout.txt",
    "reward.name": "studies.shapes.reward:ShapesReward",
    "eval.num_prompts": 24,
    "eval.judge": "studies.shapes.judge:ShapesJudge",
}
"""Settings of a run in this world, over those of a configuration for the testbed."""

AREA = 100.0  # pixels
_HALF = math.sqrt(AREA) / 2  # of the square's side
_INRADIUS = math.sqrt(AREA / (3 * math.sqrt(3)))  # of the triangle
_SQUARE = Form(
    area=AREA,
    radius=_HALF,
    normals=((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)),
    extent=(_HALF,) * 4,
)
_TRIANGLE = Form(
    area=AREA,
    radius=_INRADIUS,
    normals=((0.0, 1.0), (math.sqrt(3) / 2, -0.5), (-math.sqrt(3) / 2, -0.5)),  # base, then sides
    extent=(_INRADIUS * math.sqrt(3), _INRADIUS * math.sqrt(3), _INRADIUS * 2, _INRADIUS),
)

SHAPES = World(
    form_name="shape",
    forms={"circle": disc(AREA), "square": _SQUARE, "triangle": _TRIANGLE},
    template="a {color} {form} moves {direction} {speed}",
    window=7.5,
    temperature=0.05,  # two clean shapes differ by about 0.15
)


def train_prompts() -> list[str]:
    """Return the 72 captions that the base model and the policy are trained on: `train.txt`."""
    return SHAPES.train_prompts()


def heldout_prompts() -> list[str]:
    """Return the 24 captions held out for evaluation: `heldout.txt`."""
    return SHAPES.heldout_prompts()
