"""Embeddings of prompts, and the inputs that forwards make of them: AdaLN of every block, and the
text's tokens.

The published model pads every prompt with zeros to 512 tokens and attends to the padding. So all
prompts have one length, and share batches and CUDA graphs. Neither input depends on the latents,
and a rollout knows its timesteps in advance, so `ConditionTable` (policy.py) computes both once a
schedule.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

from torch import Tensor

from sage_fast.models.interface import Condition

TEXT_TOKENS = 512
"""Tokens of every prompt in a forward, with its padding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEmbedding(Condition):
    """Embedding of one prompt.

    Attributes:
        text: `[L, text_dim]` hidden states of UMT5, L at most `TEXT_TOKENS`, without padding.
    """

    encoders: ClassVar = {"text": "text_encoder"}
    text: Tensor

    @property
    def tokens(self) -> int:
        return TEXT_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one forward of B samples; a single row stands for B equal ones.

    Attributes:
        modulation: float32 `[1 or B, layers, 6, d]`: shift, scale and gate of each block's
            self-attention, then of its feed-forward.
        final: float32 `[1 or B, 2, d]`, shift and scale of the last norm.
        text: `[1 or B, TEXT_TOKENS, d]`, what cross-attention reads.
        negative: inputs of the unconditional pass; None without guidance.
    """

    modulation: Tensor
    final: Tensor
    text: Tensor
    negative: Inputs | None = None


class BatchConditions(NamedTuple):
    """Conditions of B samples at T steps.

    Attributes:
        modulation: float32 `[T, layers, 6, d]`.
        final: float32 `[T, 2, d]`.
        text: as in `Inputs`, the same at every step.
        negative: text of the unconditional pass; None without guidance.
    """

    modulation: Tensor
    final: Tensor
    text: Tensor
    negative: Tensor | None = None

    def at(self, steps: Tensor) -> Inputs:
        """Return the rows of `steps`, int64 `[1]` (one step for all samples) or `[B]`, without
        synchronising."""
        return inputs_of(
            self.modulation.index_select(0, steps),
            self.final.index_select(0, steps),
            self.text,
            self.negative,
        )


def inputs_of(modulation: Tensor, final: Tensor, text: Tensor, negative: Tensor | None) -> Inputs:
    """Return the inputs of both passes, which differ in the text alone.

    Args:
        modulation, final, text: as in `Inputs`.
        negative: text of the unconditional pass; None without guidance.
    """
    unconditional = None
    if negative is not None:
        unconditional = Inputs(modulation=modulation, final=final, text=negative)
    return Inputs(modulation=modulation, final=final, text=text, negative=unconditional)
