"""Prompt embeddings: valid tokens only, packed once per prompt, cached on disk, with the image if there is one.

The published pipeline pads every prompt to 1000 Qwen and 256 ByT5 tokens and masks the padding in every block. Here a
prompt keeps only its valid tokens. A batch pads to its longest member, or not at all if its samples share a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sage_fast.models.interface import Condition


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEmbedding(Condition):
    """Embedding of one prompt, without padding.

    Attributes:
        text: `[L, text_embed_dim]` hidden states of the language model (Qwen2.5-VL).
        glyphs: `[L2, text_embed_2_dim]` hidden states of ByT5 for quoted text; L2 = 0 without quotes.
        image: `[N, image_embed_dim]` hidden states of SigLIP for the image that begins the video; None without one.
        frame: `[C, 1, H, W]` latents of that image, in the policy's scale; None without one.
    """

    text: Tensor
    glyphs: Tensor
    image: Tensor | None = None
    frame: Tensor | None = None

    @property
    def tokens(self) -> int:
        return len(self.text) + len(self.glyphs) + (0 if self.image is None else len(self.image))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBatch:
    """A batch of prompts: `text [B, L, D]`, `glyphs [B, L2, D2]`, and bool masks `[B, L]`, `[B, L2]`.

    A mask is None if all lengths are equal: nothing is padded, nothing needs masking. With images, which all have the
    same size: `images [B, N, D3]` and `frames [B, C, 1, H, W]`.
    """

    text: Tensor
    text_mask: Tensor | None
    glyphs: Tensor
    glyphs_mask: Tensor | None
    images: Tensor | None = None
    frames: Tensor | None = None


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Stack `[L, ...]` tensors, zero-padded, with a bool mask `[B, max L]`; the mask is None for equal lengths."""
    lengths = [len(row) for row in rows]
    if min(lengths) == max(lengths):
        return torch.stack(list(rows)), None
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return padded, mask.to(padded.device)


def collate(embeddings: Sequence[TextEmbedding], device: torch.device, dtype: torch.dtype) -> TextBatch:
    """Stack prompts, padded to the longest of them, on `device` in `dtype`."""
    text, text_mask = pad([embedding.text.to(device, dtype) for embedding in embeddings])
    glyphs, glyphs_mask = pad([embedding.glyphs.to(device, dtype) for embedding in embeddings])
    images, frames = (
        torch.stack(found).to(device, dtype) if (found := [t for t in tensors if t is not None]) else None
        for tensors in ([e.image for e in embeddings], [e.frame for e in embeddings])
    )
    return TextBatch(
        text=text, text_mask=text_mask, glyphs=glyphs, glyphs_mask=glyphs_mask, images=images, frames=frames
    )
