"""Prompts as the transformer reads them: valid tokens only, packed once per prompt, cached on disk.

The published pipeline pads every prompt to 1000 Qwen and 256 ByT5 tokens and masks the padding in every block. Here a
prompt keeps only its valid tokens; a batch pads to its longest member, and not at all if a group shares a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_fast.errors import UserError

if TYPE_CHECKING:
    from diffusers import HunyuanVideo15Pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEmbedding:
    """One prompt, without padding.

    Attributes:
        text: `[L, text_embed_dim]` states of the language model (Qwen2.5-VL).
        glyphs: `[L2, text_embed_2_dim]` states of ByT5 for quoted text; L2 = 0 without quotes.
    """

    text: Tensor
    glyphs: Tensor

    @property
    def tokens(self) -> int:
        return len(self.text) + len(self.glyphs)

    def to(self, device: torch.device, dtype: torch.dtype) -> TextEmbedding:
        return TextEmbedding(text=self.text.to(device, dtype), glyphs=self.glyphs.to(device, dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBatch:
    """A batch of prompts: `text [B, L, D]`, `glyphs [B, L2, D2]`, and bool masks `[B, L]`, `[B, L2]`.

    A mask is None if all lengths are equal: nothing is padded, nothing needs masking.
    """

    text: Tensor
    text_mask: Tensor | None
    glyphs: Tensor
    glyphs_mask: Tensor | None


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Stack `[L, ...]` tensors, zeros after the shorter ones, and a bool mask `[B, max L]`; None for equal lengths."""
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
    return TextBatch(text=text, text_mask=text_mask, glyphs=glyphs, glyphs_mask=glyphs_mask)


Encoder = Callable[[str], TextEmbedding]


def check_crop(pipeline: HunyuanVideo15Pipeline, path: str) -> None:
    """The pipeline drops a fixed number of first tokens, its system message: what is left must begin with the prompt.

    Raises:
        UserError: this tokenizer or chat template makes another number of them.
    """
    # Imported here: the testbed needs no pipeline.
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

    chats = format_text_input(["a", "z"], pipeline.system_message)
    first, second = pipeline.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    start = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)
    crop = pipeline.prompt_template_encode_start_idx
    if start != crop:
        harm = "words of the prompt would be lost" if start < crop else "the system message would be left in"
        raise UserError(
            f"model.path = {path!r}: its tokenizer begins the prompt at token {start}, and the pipeline crops {crop}: "
            f"{harm}; expected the tokenizer of the published checkpoint"
        )


@torch.no_grad()
def encode_with_pipeline(pipeline: HunyuanVideo15Pipeline, prompt: str, device: torch.device) -> TextEmbedding:
    """Encode one prompt with the text encoders of a published checkpoint, as the diffusers pipeline does."""
    text, text_mask, glyphs, glyphs_mask = pipeline.encode_prompt(prompt, device=device, batch_size=1)
    return TextEmbedding(text=text[0][text_mask[0].bool()].cpu(), glyphs=glyphs[0][glyphs_mask[0].bool()].cpu())
