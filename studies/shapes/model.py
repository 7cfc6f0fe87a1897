"""The model of the world of shapes: the testbed's classes, with other words.

`model.path: studies.shapes.model:Shapes:studies/shapes/base` loads it.
"""

from __future__ import annotations

from typing import ClassVar

from sage_fast.testbed.text_encoder import embedder
from sage_fast.testbed.tiny_model import Testbed
from studies.shapes.world import SHAPES

embed = embedder(SHAPES)


class Shapes(Testbed):
    """The tiny model of the world of shapes."""

    title = "the world of shapes"
    randoms: ClassVar[tuple[str, ...]] = ()
    prompt_sets: ClassVar[tuple[str, ...]] = ()
    text_tokens = 7
    embed = staticmethod(embed)
