"""Prompt embeddings: valid tokens only, packed once per prompt, cached on disk, with the image if there is one.

The published pipeline pads every prompt to 1000 Qwen and 256 ByT5 tokens and masks the padding in every block. Here a
prompt keeps only its valid tokens, and the prompts of a batch have one length, so nothing is padded or masked.
"""

from __future__ import annotations

import dataclasses

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
