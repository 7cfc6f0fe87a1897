"""The forward of Wan, without the work that rollouts do not need.

diffusers' own forward embeds the timestep, projects it for AdaLN and embeds the text at every call,
and its pipeline gives Wan 2.2 TI2V a timestep for each token, all of them equal without an image:
AdaLN of 27,280 tokens instead of one row. Here conditions are computed once a schedule, and any
attention kernel can serve. The weights are those of the stock modules, which stay unchanged: their
own forward still works, and LoRA and `state_dict` are unaffected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from sage_fast.models.attention.backends import Attention
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.lora.linear import FusedLinear, linears_of
from sage_fast.models.wan.block import WanBlock
from sage_fast.models.wan.conditioning import TEXT_TOKENS, Inputs, TextEmbedding
from sage_fast.ops.norm_modulate import norm_modulate


class WanForward(nn.Module):
    """`velocity = forward(x, inputs, attention)` over the modules of a stock transformer.

    Args:
        transformer: the stock transformer; its weights are shared.
        dtype: dtype of activations.
    """

    def __init__(self, transformer: WanTransformer3DModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.transformer: Any = transformer
        self.dtype = dtype
        self.eps = transformer.config.eps
        self._rotary: dict[tuple[Any, ...], Tensor] = {}
        self.blocks = nn.ModuleList(
            WanBlock(block, index, self.eps) for index, block in enumerate(transformer.blocks)
        )
        self.out = FusedLinear(transformer, "proj_out")
        self.fused_linears = linears_of(self)

    def refresh(self) -> None:
        """Pick up changed adapters. Call before a forward and before replaying a recorded one."""
        for projection in self.fused_linears:
            projection.refresh(self.dtype)

    def forward(
        self,
        x: Tensor,
        inputs: Inputs,
        attention: Attention,
        sequence: SequenceParallel | None = None,
    ) -> Tensor:
        """Return the velocity, `[B, C, T, H, W]`.

        Args:
            x: `[B, C, T, H, W]` latents in the activation dtype.
            inputs: inputs of B samples.
            attention: the attention kernel.
            sequence: how ranks share samples; None if they do not.
        """
        model = self.transformer
        batch, _, *space = x.shape
        rotary = self._rotary_of(x)
        hidden = model.patch_embedding(x).flatten(2).transpose(1, 2).contiguous()
        text = inputs.text.expand(batch, -1, -1)
        tokens = hidden.shape[1]
        exchange = None
        if sequence is not None:
            exchange = sequence.token_exchange(tokens)
            hidden = sequence.part(hidden)
            rotary = sequence.part(rotary[None])[0]
        for layer, block in enumerate(self.blocks):
            modulation = inputs.modulation[:, layer]
            arguments = (hidden, text, modulation, rotary, attention, exchange)
            if model.gradient_checkpointing and torch.is_grad_enabled():
                hidden = model._gradient_checkpointing_func(block, *arguments)
            else:
                hidden = block(*arguments)
        shift, scale = inputs.final.expand(batch, 2, -1).unbind(1)
        out = self.out(norm_modulate(hidden, scale, shift, self.eps, pad=self.out.pad))
        if sequence is not None:
            out = sequence.whole(out, tokens)

        patch = model.config.patch_size
        grid = [size // p for size, p in zip(space, patch)]
        out = out.view(batch, *grid, *patch, -1)  # [B, T, H, W, pt, ph, pw, C]
        return out.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(batch, -1, *space)

    def modulation(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Compute AdaLN at `timestep` float32 `[R]` (1000 sigma): float32 `[R, layers, 6, d]`; last
        norm: `[R, 2, d]`.

        It is for a call without autocast: the layers run in the dtype of their weights. diffusers
        keeps the embedder of timesteps in float32, whatever the dtype of the others, and adds the
        tables in float32.
        """
        model = self.transformer
        times = model.condition_embedder
        sinusoid = times.timesteps_proj(timestep).to(_dtype_of(times.time_embedder))
        embedded = times.time_embedder(sinusoid).to(self.dtype)
        active = times.act_fn(embedded).to(_dtype_of(times.time_proj))
        rows = times.time_proj(active).unflatten(1, (1, 6, -1))  # of every layer
        tables = torch.cat([block.scale_shift_table for block in model.blocks])
        last = model.scale_shift_table.float() + embedded.float()[:, None]
        return tables.float() + rows.float(), last

    def text(self, texts: Sequence[TextEmbedding]) -> Tensor:
        """Return the tokens `[R, TEXT_TOKENS, d]` of R prompts, with the padding that the model
        attends to."""
        padded = [F.pad(text.text, (0, 0, 0, TEXT_TOKENS - len(text.text))) for text in texts]
        model = self.transformer
        rows = torch.stack(padded).to(model.scale_shift_table.device, self.dtype)
        return model.condition_embedder.text_embedder(rows).to(self.dtype)

    @property
    def conditioning_is_frozen(self) -> bool:
        """Whether training leaves AdaLN and the embedder of texts as they are."""
        model = self.transformer
        tables = [model.scale_shift_table, *(block.scale_shift_table for block in model.blocks)]
        weights = [*tables, *model.condition_embedder.parameters()]
        return not any(p.requires_grad for p in weights)

    def _rotary_of(self, x: Tensor) -> Tensor:
        """Return the rotary table of this latent size, float32 `[N, head_dim / 2, 2]`, computed
        once."""
        key = (*x.shape[2:], x.device)
        if key not in self._rotary:
            cos, sin = (table[0, :, 0] for table in self.transformer.rope(x))  # each value twice
            self._rotary[key] = torch.stack([cos[:, ::2], sin[:, ::2]], dim=-1).float()
        return self._rotary[key]


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of a small module's weights."""
    return next(module.parameters()).dtype
