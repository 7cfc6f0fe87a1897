"""The forward of HunyuanVideo 1.5 without what text-to-video rollouts do not need.

diffusers' own forward finds the valid text tokens with boolean indexing (12 B + 1 host synchronisations), masks padding
that is not there, builds a [B, 1, S, S] mask in every block and computes the rotary tables anew. Here a batch whose
prompts have one length runs with no mask at all, so that any attention kernel can serve it and nothing synchronises; a
batch of mixed lengths masks keys alone. The blocks, the refiner and every weight are the stock modules, so LoRA,
gradient checkpointing and `state_dict` are untouched.

Attention knows no order among text tokens (only video tokens are rotated), so their order does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from sage_fast.policy.text import TextBatch

Rotary = Tensor
"""complex64 `[tokens, head_dim / 2]`: one unit complex number per pair of channels."""


class JointAttention:
    """Attention processor over video and text tokens; the mask, where there is one, is `[B, S]` over keys."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden_states.shape[1]
        heads = (attn.heads, -1)
        query = _normalize(attn.to_q(hidden_states).unflatten(2, heads), attn.norm_q)
        key = _normalize(attn.to_k(hidden_states).unflatten(2, heads), attn.norm_k)
        query, key = _rotate(query, image_rotary_emb), _rotate(key, image_rotary_emb)
        text_query = _normalize(attn.add_q_proj(encoder_hidden_states).unflatten(2, heads), attn.norm_added_q)
        text_key = _normalize(attn.add_k_proj(encoder_hidden_states).unflatten(2, heads), attn.norm_added_k)
        value = torch.cat([attn.to_v(hidden_states), attn.add_v_proj(encoder_hidden_states)], 1).unflatten(2, heads)
        query, key = torch.cat([query, text_query], dim=1), torch.cat([key, text_key], dim=1)

        mask = None
        if attention_mask is not None:
            mask = F.pad(attention_mask.bool(), (query.shape[1] - attention_mask.shape[1], 0), value=True)
            mask = mask[:, None, None, :]
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        video, text = out[:, :tokens], out[:, tokens:]
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)


def _normalize(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.dim, norm.weight.to(x.dtype), norm.eps)


def _rotate(x: Tensor, rotary: Rotary | tuple[Tensor, Tensor] | None) -> Tensor:
    if rotary is None:
        return x
    if isinstance(rotary, tuple):  # (cos, sin), as the stock forward hands them over
        rotary = _as_complex(rotary)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).to(torch.promote_types(x.dtype, torch.float32)))
    return torch.view_as_real(pairs * rotary[None, :, None, :]).flatten(-2).to(x.dtype)


def _as_complex(cos_sin: tuple[Tensor, Tensor]) -> Rotary:
    cos, sin = cos_sin  # [tokens, head_dim], each value twice
    return torch.complex(cos[:, ::2], sin[:, ::2])


class TextToVideoForward:
    """`velocity = forward(x, sigma, text)` over the modules of a stock transformer.

    Args:
        transformer: its blocks are given the processor above; its own forward keeps working.
    """

    def __init__(self, transformer: HunyuanVideo15Transformer3DModel) -> None:
        self.transformer = transformer
        self._rotary: dict[tuple[Any, ...], Rotary] = {}
        processor = JointAttention()
        for block in transformer.transformer_blocks:
            block.attn.set_processor(processor)

    def __call__(self, x: Tensor, timestep: Tensor, text: TextBatch) -> Tensor:
        """Velocity.

        Args:
            x: `[B, C, T, H, W]` latents in the activation type.
            timestep: float32 `[B]`, 1000 sigma.
            text: B prompts.

        Returns:
            `[B, C, T, H, W]`.
        """
        model = self.transformer
        config = model.config
        batch, channels, *space = x.shape
        # Text-to-video: no conditioning frames, mask 0, no image tokens.
        condition = x.new_zeros(batch, config.in_channels - channels, *space)
        rotary = self._rotary_of(x)
        temb = model.time_embed(timestep)
        hidden = model.x_embedder(torch.cat([x, condition], dim=1))
        context, mask = self._context(text, timestep)
        for block in model.transformer_blocks:
            if model.gradient_checkpointing and torch.is_grad_enabled():
                hidden, context = model._gradient_checkpointing_func(block, hidden, context, temb, mask, rotary)
            else:
                hidden, context = block(hidden, context, temb, mask, rotary)
        out = model.proj_out(model.norm_out(hidden, temb))

        patch = (config.patch_size_t, config.patch_size, config.patch_size)
        grid = [size // p for size, p in zip(space, patch)]
        out = out.view(batch, *grid, -1, *patch)  # [B, T, H, W, C, pt, ph, pw]
        return out.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(batch, -1, *space)

    def _context(self, text: TextBatch, timestep: Tensor) -> tuple[Tensor, Tensor | None]:
        """Refined text and glyph tokens `[B, L + L2, d]`, and their key mask where lengths differ."""
        model = self.transformer
        kinds = model.cond_type_embed.weight
        refined = model.context_embedder(text.text, timestep, text.text_mask) + kinds[0]
        if text.text_mask is not None:
            # The refiner leaves anything, nan included, where it was masked; as values these tokens must be finite.
            refined = torch.where(text.text_mask.bool()[..., None], refined, 0)
        if text.glyphs.shape[1] == 0:
            return refined, text.text_mask
        glyphs = model.context_embedder_2(text.glyphs) + kinds[1]
        if text.text_mask is None and text.glyphs_mask is None:
            return torch.cat([glyphs, refined], dim=1), None
        masks = [
            torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) if mask is None else mask.bool()
            for t, mask in ((glyphs, text.glyphs_mask), (refined, text.text_mask))
        ]
        return torch.cat([glyphs, refined], dim=1), torch.cat(masks, dim=1)

    def _rotary_of(self, x: Tensor) -> Rotary:
        """The rotary table of this latent size, computed once."""
        key = (*x.shape[2:], x.device)
        if key not in self._rotary:
            self._rotary[key] = _as_complex(self.transformer.rope(x))
        return self._rotary[key]
