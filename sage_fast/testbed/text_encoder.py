"""The testbed's text embedder: one fixed random vector per word, no learned weights.

The transformer has no text positions, so it sees a set of words. That is enough: no caption uses a
word twice.
"""

from functools import lru_cache

import torch
from torch import Tensor

from sage_fast.testbed.world import COLORS, DIRECTIONS, SHAPES, SPEEDS
from sage_fast.util.errors import UserError, nearest

TEXT_EMBED_DIM = 32
BEGIN = "<begin>"  # starts every prompt; the empty prompt is this token alone
WORDS = (BEGIN, "a", "moves", *COLORS, *SHAPES, *DIRECTIONS, *SPEEDS)
_SEED = 1501


@lru_cache(maxsize=1)
def _table() -> Tensor:
    """Return the word vectors, float32 [words, TEXT_EMBED_DIM], rows of unit variance."""
    return torch.randn(len(WORDS), TEXT_EMBED_DIM, generator=torch.Generator().manual_seed(_SEED))


def embed(prompt: str) -> Tensor:
    """Embed a prompt: float32 [L, TEXT_EMBED_DIM], L = 1 + the number of words, never padded.

    The empty prompt, the "no condition" of classifier-free guidance, is only the begin token.
    """
    rows = [0]
    for word in prompt.split():
        if word not in WORDS:
            raise UserError(
                f'the testbed does not know "{word}" in prompt "{prompt}": '
                f"{nearest(word, WORDS[1:])}"
            )
        rows.append(WORDS.index(word))
    return _table()[rows].clone()
