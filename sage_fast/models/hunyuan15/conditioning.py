"""Inputs of a forward besides the latents: AdaLN of every block, and the prompt as it enters the first one.

Both depend only on the timestep and the prompt, and a rollout knows its timesteps in advance. `ConditionTable`
computes them once per schedule. If their weights are frozen, as under LoRA on the blocks, training reads the same
table.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_fast.models.hunyuan15.text import TextEmbedding
from sage_fast.models.interface import Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one forward of B samples; a single row stands for B equal ones.

    Attributes:
        modulation: `[1 or B, layers, 2, 6, d]`: per block, for video and text: shift, scale and gate of attention, then
            of the feed-forward.
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
    """Conditions of B samples at T steps: as `Inputs`, with a leading dimension T on all but the images.

    The context is without the images' tokens.
    """

    modulation: Tensor
    final: Tensor
    context: Tensor
    images: Images | None = None
    negative: BatchConditions | None = None

    def at(self, steps: Tensor) -> Inputs:
        """Return the rows of `steps`, int64 `[1]` (one step for all samples) or `[B]`, without synchronising."""
        if len(steps) == 1:
            context = self.context.index_select(0, steps)[0]
        else:
            sample = torch.arange(len(steps), device=steps.device) if self.context.shape[1] > 1 else 0
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


@dataclasses.dataclass
class ConditionTable:
    """Conditions at every step of a rollout; each prompt's part is computed on first use.

    Attributes:
        modulation: `[T, layers, 2, 6, d]`.
        final: `[T, 2, d]`.
        embeddings: key -> embedding, including the negative ones with guidance.
        contextualize: P embeddings of one length -> glyph and text tokens `[T, P, L, d]`, and their images.
        uses_guidance: whether there is an unconditional pass.
        trained: (keys, steps) -> conditioning with gradients; None while the weights behind the table are frozen.
    """

    modulation: Tensor
    final: Tensor
    embeddings: Mapping[Any, TextEmbedding]
    contextualize: Callable[[Sequence[TextEmbedding]], tuple[Tensor, Images | None]]
    uses_guidance: bool
    trained: Callable[[Sequence[Key], Tensor], Inputs] | None = None
    _contexts: dict[Key, Tensor] = dataclasses.field(default_factory=dict, init=False)
    _images: dict[Key, Images] = dataclasses.field(default_factory=dict, init=False)

    def of(self, keys: Sequence[Key]) -> BatchConditions:
        """Return the conditions of a batch, whose prompts have one number of tokens."""
        negatives = [self.embeddings[key].negative for key in keys]
        return self._batch(keys)._replace(negative=self._batch(negatives) if self.uses_guidance else None)

    def at(self, keys: Sequence[Key], steps: Tensor) -> Inputs:
        """Return rows of the table; if the weights behind it are trained, recompute them with gradients."""
        return self.of(keys).at(steps) if self.trained is None else self.trained(keys, steps)

    def _batch(self, keys: Sequence[Key]) -> BatchConditions:
        self._fill(keys)
        keys = keys[:1] if len(set(keys)) == 1 else keys
        context = torch.stack([self._contexts[key] for key in keys], dim=1)
        own = [self._images[key] for key in keys if key in self._images]
        images = Images(*map(torch.cat, zip(*own))) if own else None
        return BatchConditions(self.modulation, self.final, context, images)

    @torch.no_grad()
    def _fill(self, keys: Sequence[Key]) -> None:
        """Compute missing contexts, prompts of equal length together."""
        missing: dict[tuple[int, int], list[Key]] = defaultdict(list)
        for key in dict.fromkeys(keys):
            if key not in self._contexts:
                embedding = self.embeddings[key]
                missing[len(embedding.text), len(embedding.glyphs)].append(key)
        for group in missing.values():
            contexts, images = self.contextualize([self.embeddings[key] for key in group])
            self._contexts.update(zip(group, contexts.unbind(1)))
            if images is not None:
                self._images.update(zip(group, map(Images, images.tokens.split(1), images.frame.split(1))))
