"""The forward of HunyuanVideo 1.5, without the work that rollouts do not need.

diffusers' own forward finds the valid text tokens by boolean indexing (12 B + 1 host
synchronisations), masks padding even if nothing is padded, builds a [B, 1, S, S] mask in every
block, and recomputes the rotary tables, AdaLN and the refined text every time. Here the prompts of
a batch have one length, so it runs without a mask, any attention kernel can serve it, and nothing
synchronises. The weights are those of the stock modules, which stay unchanged: their own forward
still works, and LoRA and `state_dict` are unaffected.

Only video tokens are rotated, so the order of the others does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from sage_fast.models.attention.backends import Attention
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.hunyuan15.block import TextToVideoBlock
from sage_fast.models.hunyuan15.conditioning import Images, Inputs, TextEmbedding
from sage_fast.models.lora.linear import FusedLinear, linears_of
from sage_fast.ops.norm_modulate import norm_modulate

ADALN_UNITS = 6
"""Modules that hold AdaLN's linear layers, a third of all weights: ZeRO-3 gathers one at a time, of
0.9 GB in bf16."""


class AdaLN(nn.Module):
    """AdaLN's linear layers of some blocks."""

    def __init__(self, norms: Sequence[Any]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(norm.linear for norm in norms)

    def forward(self, temb: Tensor) -> Tensor:
        """Map `[R, d]` to `[R, layers, 6 d]`."""
        return torch.stack([linear(temb) for linear in self.linears], dim=1)


class TextToVideoForward(nn.Module):
    """`velocity = forward(x, conditioning)` over the modules of a stock transformer.

    Args:
        transformer: the stock transformer; its weights are shared.
        dtype: dtype of activations.
    """

    def __init__(self, transformer: HunyuanVideo15Transformer3DModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.transformer = transformer
        self.dtype = dtype
        self._rotary: dict[tuple[Any, ...], Tensor] = {}
        self.blocks = nn.ModuleList(
            TextToVideoBlock(block, index)
            for index, block in enumerate(transformer.transformer_blocks)
        )
        norms = [
            norm
            for block in transformer.transformer_blocks
            for norm in (block.norm1, block.norm1_context)
        ]
        size = -(-len(norms) // ADALN_UNITS)
        self.adaln = nn.ModuleList(AdaLN(norms[i : i + size]) for i in range(0, len(norms), size))
        self.out = FusedLinear(transformer, "proj_out")
        self.fused_linears = linears_of(self)

    def refresh(self) -> None:
        """Pick up changed adapters. Call before a forward and before replaying a recorded one."""
        for projection in self.fused_linears:
            projection.refresh(self.dtype)

    def forward(
        self,
        x: Tensor,
        conditioning: Inputs,
        attention: Attention,
        sequence: SequenceParallel | None = None,
    ) -> Tensor:
        """Return the velocity, `[B, C, T, H, W]`.

        Args:
            x: `[B, C, T, H, W]` latents in the activation dtype.
            conditioning: conditioning of B samples.
            attention: the attention kernel.
            sequence: how ranks share samples; None if they do not.
        """
        model = self.transformer
        config = model.config
        batch, _, *space = x.shape
        rotary = self._rotary_of(x)
        hidden = self._embed(x, conditioning.frame)
        context = conditioning.context.expand(batch, -1, -1)
        tokens = hidden.shape[1]
        exchange = None
        if sequence is not None:
            exchange = sequence.token_exchange(tokens, context.shape[1])
            hidden = sequence.part(hidden)
            context = sequence.part(context)
        for layer, block in enumerate(self.blocks):
            modulation = conditioning.modulation[:, layer]
            is_last = layer == len(self.blocks) - 1
            arguments = (hidden, context, modulation, rotary, attention, is_last, exchange)
            if model.gradient_checkpointing and torch.is_grad_enabled():
                hidden, context = model._gradient_checkpointing_func(block, *arguments)
            else:
                hidden, context = block(*arguments)
        scale, shift = conditioning.final.expand(batch, 2, -1).unbind(1)
        out = self.out(norm_modulate(hidden, scale, shift, pad=self.out.pad))
        if sequence is not None:
            out = sequence.whole(out, tokens)

        patch = (config.patch_size_t, config.patch_size, config.patch_size)
        grid = [size // p for size, p in zip(space, patch)]
        out = out.view(batch, *grid, -1, *patch)  # [B, T, H, W, C, pt, ph, pw]
        return out.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(batch, -1, *space)

    @property
    def has_mean_velocity(self) -> bool:
        """Whether the network predicts the mean velocity of a step and takes the end of the step
        (MeanFlow)."""
        return self.transformer.time_embed.timestep_embedder_r is not None

    def modulation(
        self, timestep: Tensor, dtype: torch.dtype, end: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute AdaLN at `timestep` float32 `[R]` (1000 sigma): `[R, layers, 2, 6, d]`; last
        norm: `[R, 2, d]`.

        A network with a mean velocity also takes `end`, the timestep at which the step ends,
        float32 `[R]`.
        """
        model, times = self.transformer, self.transformer.time_embed
        assert (end is not None) == self.has_mean_velocity
        temb = _embedded(times.time_proj(timestep), times.timestep_embedder)
        if end is not None:
            temb = temb + _embedded(times.time_proj_r(end), times.timestep_embedder_r)
        temb = F.silu(temb).to(dtype)
        rows = torch.cat([adaln(temb) for adaln in self.adaln], dim=1)
        last = model.norm_out.linear(temb).view(len(timestep), 2, -1)
        return rows.view(len(timestep), len(model.transformer_blocks), 2, 6, -1), last

    def context(
        self, timestep: Tensor, texts: Sequence[TextEmbedding], every: bool = False
    ) -> Tensor:
        """Return glyph and refined text tokens `[R, L2 + L, d]` of R prompts, which have one number
        of tokens.

        `every` runs the embedder of glyphs without glyphs too, so that all ranks have the same
        gradients.
        """
        if len({len(text.glyphs) for text in texts}) > 1:
            return torch.cat(
                [self.context(time, [text], every) for time, text in zip(timestep.split(1), texts)]
            )
        model = self.transformer
        kinds = model.cond_type_embed.weight
        refined = model.context_embedder(self._stacked(texts, "text"), timestep, None) + kinds[0]
        if len(texts[0].glyphs) == 0 and not every:
            return refined
        glyphs = model.context_embedder_2(self._stacked(texts, "glyphs")) + kinds[1]
        return torch.cat([glyphs, refined], dim=1)

    def images(self, texts: Sequence[TextEmbedding]) -> Images | None:
        """Return the images of a batch, as they enter the first block; None without images."""
        if texts[0].image is None:
            return None
        model = self.transformer
        tokens = (
            model.image_embedder(self._stacked(texts, "image")) + model.cond_type_embed.weight[2]
        )
        return Images(tokens.to(self.dtype), self._stacked(texts, "frame"))

    def _stacked(self, texts: Sequence[TextEmbedding], field: str) -> Tensor:
        """Stack a tensor of every prompt, on the device and in the dtype of the activations."""
        rows = torch.stack([getattr(text, field) for text in texts])
        return rows.to(self.transformer.cond_type_embed.weight.device, self.dtype)

    @property
    def conditioning_is_frozen(self) -> bool:
        """Whether training leaves AdaLN and the embedders of text and images as they are."""
        model = self.transformer
        modules = [
            model.time_embed,
            model.context_embedder,
            model.context_embedder_2,
            model.cond_type_embed,
        ]
        modules += [model.image_embedder]
        modules += [
            norm
            for block in model.transformer_blocks
            for norm in (block.norm1, block.norm1_context)
        ]
        return not any(
            p.requires_grad for module in [*modules, model.norm_out] for p in module.parameters()
        )

    def _embed(self, x: Tensor, frame: Tensor | None) -> Tensor:
        """Return video tokens `[B, N, d]`.

        The network has C + 1 further input channels. They are 0, but at the first frame if it is
        given: there they hold `frame`, `[1 or B, C, 1, H, W]`, and a 1.
        """
        proj, channels = self.transformer.x_embedder.proj, x.shape[1]
        if frame is not None:
            frame = F.pad(frame, (0, 0, 0, 0, 0, 0, 0, 1), value=1)
        # published patch: a matmul, no zeros needed
        if type(proj) is nn.Conv3d and proj.kernel_size == (1, 1, 1):
            weight = proj.weight.flatten(1)
            hidden = F.linear(x.flatten(2).transpose(1, 2), weight[:, :channels], proj.bias)
            if frame is not None:
                inputs = frame.flatten(2).transpose(1, 2)
                hidden[:, : inputs.shape[1]] += F.linear(inputs, weight[:, channels:])
            return hidden
        extra = x.new_zeros(len(x), self.transformer.config.in_channels - channels, *x.shape[2:])
        if frame is not None:
            extra[:, :, :1] = frame
        return self.transformer.x_embedder(torch.cat([x, extra], dim=1))

    def _rotary_of(self, x: Tensor) -> Tensor:
        """Return the rotary table of this latent size, float32 `[N, head_dim / 2, 2]`, computed
        once."""
        key = (*x.shape[2:], x.device)
        if key not in self._rotary:
            cos, sin = self.transformer.rope(x)  # [N, head_dim], each value twice
            self._rotary[key] = torch.stack([cos[:, ::2], sin[:, ::2]], dim=-1)
        return self._rotary[key]


def _embedded(sinusoid: Tensor, embedder: Any) -> Tensor:
    """Embed a timestep, which stays fp32 up to its sinusoid: in bf16 it is off by up to 2 units of
    1000."""
    embedded: Tensor = embedder(sinusoid.to(next(embedder.parameters()).dtype))
    return embedded
