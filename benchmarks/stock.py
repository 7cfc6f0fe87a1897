"""diffusers' own forward and decode behind our interfaces: the baseline of benchmarks and tests.

It runs in our process, so cuBLAS sums its matmuls in float32 too (`local_device`), where PyTorch's default need not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from sage_fast.models.hunyuan15.decode import VideoDecoder
from sage_fast.models.hunyuan15.encoder import IMAGE_TOKENS
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.text import TextBatch, TextEmbedding, collate
from sage_fast.testbed.model import allow_batches

PADDED_TEXT, PADDED_GLYPHS = 1000, 256
"""Token counts to which the published pipeline pads a prompt; without an image, that has masked tokens too."""


@dataclasses.dataclass(frozen=True)
class StockConditioning:
    """Inputs of the stock forward, which computes everything else in every forward."""

    sigma: Tensor
    text: TextBatch
    negative: StockConditioning | None = None
    end: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class StockSchedule:
    sigmas: Tensor
    ends: Tensor | None
    text: TextBatch
    negative: StockSchedule | None = None

    def at(self, steps: Tensor) -> StockConditioning:
        sigma = self.sigmas[steps].expand(len(self.text.text))
        end = None if self.ends is None else self.ends[steps].expand(len(self.text.text))
        return StockConditioning(sigma, self.text, self.negative.at(steps) if self.negative else None, end)


@dataclasses.dataclass(frozen=True)
class StockTable:
    policy: StockPolicy
    sigmas: Tensor
    embeddings: Mapping[Any, TextEmbedding]

    def of(self, keys: Sequence[Any]) -> StockSchedule:
        texts = [self.embeddings[key] for key in keys]
        negatives = [self.embeddings[text.negative] for text in texts] if self.policy.uses_guidance else []
        ends = self.policy._ends(self.sigmas)
        negative = StockSchedule(self.sigmas, ends, self._batch(negatives)) if negatives else None
        return StockSchedule(self.sigmas, ends, self._batch(texts), negative)

    def at(self, keys: Sequence[Any], steps: Tensor) -> StockConditioning:
        return self.of(keys).at(steps)

    def _batch(self, texts: Sequence[TextEmbedding]) -> TextBatch:
        return collate(texts, self.policy.device, self.policy.dtype)


class StockPolicy(HunyuanVideo15Policy):
    """The policy through diffusers' own forward. `padded` pads the text as the published pipeline does."""

    padded = False

    def __init__(self, transformer: HunyuanVideo15Transformer3DModel, **options: Any) -> None:
        super().__init__(transformer, **options)
        # The stock forward hands its fp32 timestep to an embedder that may have bf16 weights.
        transformer.time_embed.timestep_embedder.register_forward_pre_hook(_match_weight_dtype)

    def velocity(self, x: Tensor, inputs: Any) -> Tensor:
        with self._autocast():
            end = None if inputs.end is None else 1000 * inputs.end
            return self.stock_forward(x.to(self.dtype), 1000 * inputs.sigma, inputs.text, end)

    def condition(
        self, sigma: Tensor, text: TextBatch, negative: TextBatch | None = None, end: Tensor | None = None
    ) -> Any:
        return StockConditioning(sigma, text, StockConditioning(sigma, negative, end=end) if negative else None, end)

    def conditioning_table(self, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding]) -> Any:
        return StockTable(self, sigmas.to(self.device, torch.float32), embeddings)

    def stock_forward(self, x: Tensor, timestep: Tensor, text: TextBatch, end: Tensor | None = None) -> Tensor:
        config, batch, channels = self.transformer.config, len(x), x.shape[1]
        tokens, mask = _padded(text.text, text.text_mask, PADDED_TEXT if self.padded else 0)
        glyphs, glyphs_mask = _padded(text.glyphs, text.glyphs_mask, PADDED_GLYPHS if self.padded else 0)
        condition = x.new_zeros(batch, config.in_channels - channels, *x.shape[2:])
        images = x.new_zeros(batch, IMAGE_TOKENS if self.padded else 0, config.image_embed_dim)
        if text.images is not None and text.frames is not None:
            images, condition[:, :channels, :1] = text.images, text.frames
            condition[:, channels:, :1].fill_(1)
        return self.transformer(
            torch.cat([x, condition], dim=1), timestep, tokens, mask, encoder_hidden_states_2=glyphs,
            encoder_attention_mask_2=glyphs_mask, image_embeds=images, timestep_r=end, return_dict=False,
        )[0]  # fmt: skip


class StockDecoder(VideoDecoder):
    """diffusers' own decode. With `batches`, it patches the autoencoder; otherwise it decodes one video at a time."""

    def __init__(self, vae: AutoencoderKLHunyuanVideo15, batches: bool) -> None:
        super().__init__(vae, channels_last=False)
        if batches:
            allow_batches(vae)
        else:
            vae.enable_slicing()

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        latents = latents.to(self.vae.dtype) / self.vae.config.scaling_factor
        video = self.vae.decode(latents, return_dict=False)[0]
        return (video.float() * 0.5 + 0.5).clamp(0, 1).transpose(1, 2)


def _match_weight_dtype(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg.to(next(module.parameters()).dtype) for arg in args)


def _padded(tokens: Tensor, mask: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    if mask is None:
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    extra = max(length - tokens.shape[1], 0)
    return (
        torch.nn.functional.pad(tokens, (0, 0, 0, extra)),
        torch.nn.functional.pad(mask, (0, extra)).to(torch.int64),
    )
