"""The testbed's text embedder: one fixed random vector per word, no learned weights.

The transformer has no text positions, so it sees a set of words. That is enough: no caption uses a
word twice.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from sage_fast.testbed.world import BALLS, World
from sage_fast.util.errors import UserError, nearest

TEXT_EMBED_DIM = 32
BEGIN = "<begin>"  # starts every prompt; the empty prompt is this token alone
_SEED = 1501


@lru_cache
def _table(words: int) -> Tensor:
    """Return word vectors, float32 [words, TEXT_EMBED_DIM], rows of unit variance."""
    return torch.randn(words, TEXT_EMBED_DIM, generator=torch.Generator().manual_seed(_SEED))


def embedder(world: World) -> Callable[[str], Tensor]:
    """Return the function that embeds a prompt of a world.

    It returns float32 [L, TEXT_EMBED_DIM], L = 1 + the number of words, never padded. The empty
    prompt, the "no condition" of classifier-free guidance, is only the begin token. A word that the
    world does not know is a UserError.
    """
    words = (BEGIN, *world.words)

    def embed(prompt: str) -> Tensor:
        rows = [0]
        for word in prompt.split():
            if word not in words:
                raise UserError(
                    f'the tiny model does not know "{word}" in prompt "{prompt}": '
                    f"{nearest(word, words[1:])}"
                )
            rows.append(words.index(word))
        return _table(len(words))[rows].clone()

    return embed


embed = embedder(BALLS)
