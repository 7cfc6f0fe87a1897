"""Embeddings of prompts, and the inputs that forwards make of them: AdaLN of every block, tokens
for the first one.

The published pipeline pads every prompt to 1000 Qwen and 256 ByT5 tokens and masks the padding in
every block. Here a prompt keeps only its valid tokens, and the prompts of a batch have one length,
so nothing is padded or masked.

A forward's inputs depend only on the timestep and the prompt, and a rollout knows its timesteps in
advance, so `ConditionTable` (policy.py) computes them once per schedule.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sage_fast.models.interface import Condition


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEmbedding(Condition):
    """Embedding of one prompt, without padding.

    Attributes:
        text: `[L, text_embed_dim]` hidden states of the language model (Qwen2.5-VL).
        glyphs: `[L2, text_embed_2_dim]` hidden states of ByT5 for quoted text; L2 = 0 without
            quotes.
        image: `[N, image_embed_dim]` hidden states of SigLIP for the image that begins the video;
            None without one.
        frame: `[C, 1, H, W]` latents of that image, in the policy's scale; None without one.
    """

    encoders: ClassVar = {
        "text": "text_encoder",
        "glyphs": "text_encoder_2",
        "image": "image_encoder",
        "frame": "vae",
    }
    text: Tensor
    glyphs: Tensor
    image: Tensor | None = None
    frame: Tensor | None = None

    @property
    def tokens(self) -> int:
        of_text = len(self.text) + len(self.glyphs)
        return of_text if self.image is None else of_text + len(self.image)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one forward of B samples; a single row stands for B equal ones.

    Attributes:
        modulation: `[1 or B, layers, 2, 6, d]`: per block, for video and text: shift, scale and
            gate of attention, then of the feed-forward.
        final: `[1 or B, 2, d]`, scale and shift of the last norm.
        context: `[1 or B, L, d]`, image, glyph and text tokens.
        frame: `[1 or B, C, 1, H, W]` latents of the image that begins the video; None without one.
        negative: conditioning of the unconditional pass; None without guidance.
    """

    modulation: Tensor
    final: Tensor
    context: Tensor
    frame: Tensor | None = None
    negative: Inputs | None = None


class Images(NamedTuple):
    """Images of B samples, the same at every step; a single row stands for B equal ones.

    Attributes:
        tokens: `[1 or B, N, d]`, as they enter the first block.
        frame: as in `Inputs`.
    """

    tokens: Tensor
    frame: Tensor

    def beside(self, context: Tensor) -> Tensor:
        """Return the tokens and after them a context `[1 or B, L, d]`."""
        return torch.cat([self.tokens.expand(len(context), -1, -1), context], dim=1)


class BatchConditions(NamedTuple):
    """Conditions of B samples at T steps: as `Inputs`, with a leading dimension T on all but the
    images.

    The context is without the images' tokens.
    """

    modulation: Tensor
    final: Tensor
    context: Tensor
    images: Images | None = None
    negative: BatchConditions | None = None

    def at(self, steps: Tensor) -> Inputs:
        """Return the rows of `steps`, int64 `[1]` (one step for all samples) or `[B]`, without
        synchronising."""
        if len(steps) == 1:
            context = self.context.index_select(0, steps)[0]
        else:
            sample = (
                torch.arange(len(steps), device=steps.device) if self.context.shape[1] > 1 else 0
            )
            context = self.context[steps, sample]
        if self.images is not None:
            context = self.images.beside(context)
        return Inputs(
            modulation=self.modulation.index_select(0, steps),
            final=self.final.index_select(0, steps),
            context=context,
            frame=None if self.images is None else self.images.frame,
            negative=None if self.negative is None else self.negative.at(steps),
        )
