"""The model of the world of pairs: the testbed's classes, with other words.

`model.path: studies.pairs.model:Pairs:studies/pairs/base` loads it.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from sage_fast.testbed.text_encoder import TEXT_EMBED_DIM
from sage_fast.testbed.tiny_model import Testbed
from sage_fast.testbed.world import COLORS, DIRECTIONS
from studies.pairs.world import parse
from studies.shapes.world import SHAPES

TOKENS = ("<begin>", "first", "second", *COLORS, *SHAPES.forms, *DIRECTIONS)
_SEED = 2604


@cache
def _table() -> Tensor:
    """Return the vectors of `TOKENS`, float32 [tokens, TEXT_EMBED_DIM], rows of unit variance."""
    return torch.randn(len(TOKENS), TEXT_EMBED_DIM, generator=torch.Generator().manual_seed(_SEED))


def embed(prompt: str) -> Tensor:
    """Embed a caption: float32 [7, TEXT_EMBED_DIM], a row for each attribute after the begin token.

    The transformer has no text positions. So a row is the word's vector plus that of its thing,
    first or second. The empty prompt, the "no condition" of classifier-free guidance, is only the
    begin token.
    """
    rows = [_vector("<begin>")]
    if prompt:
        for place, thing in zip(("first", "second"), parse(prompt)):
            rows += [
                _vector(word) + _vector(place)
                for word in (thing.color, thing.shape, thing.direction)
            ]
    return torch.stack(rows)


def _vector(token: str) -> Tensor:
    return _table()[TOKENS.index(token)]


class Pairs(Testbed):
    """The tiny model of the world of pairs."""

    title = "the world of pairs"
    randoms: ClassVar[tuple[str, ...]] = ()
    prompt_sets: ClassVar[tuple[str, ...]] = ()
    text_tokens = 7
    embed = staticmethod(embed)
