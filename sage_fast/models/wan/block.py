"""One block of Wan over its stock modules, with fused element-wise work.

diffusers' block copies the stream to float32 for each of its three norms, and normalises, scales,
rotates and joins in passes of their own. Here:

- AdaLN is precomputed;
- queries and keys are normalised, over all heads together, and rotated in one pass;
- a gated residual and the norm after it are one pass. The norm before cross-attention has weights:
  they are a scale and a shift.

The same operators run with and without autograd, so rollout and training round alike.
benchmarks/passes.py counts the bytes they move.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_fast.models.attention.backends import Attention
from sage_fast.models.attention.sequence import TokenExchange
from sage_fast.models.checkpointing import is_checkpointed
from sage_fast.models.lora.linear import FeedForward, FusedLinear
from sage_fast.ops.gated_norm import gated_norm
from sage_fast.ops.norm_modulate import residual_norm
from sage_fast.ops.norm_rotate import norm_rotate, recomputed_in_backward
from sage_fast.util.profiling import annotate_block


class WanBlock(nn.Module):
    """A stock WanTransformerBlock with its linear layers fused.

    It is a module so that hooks (FSDP2, profilers) can attach to it. The table of its AdaLN is not
    in it.

    Args:
        block: the stock block; its weights are shared.
        index: its number in the transformer, which a profiler shows.
        eps: added to the variances of all norms.
    """

    def __init__(self, block: Any, index: int, eps: float) -> None:
        super().__init__()
        self.index = index
        self.eps = eps
        self.attn1: Any = block.attn1
        self.attn2: Any = block.attn2
        self.norm2: Any = block.norm2
        self.qkv = FusedLinear(self.attn1, "to_q", "to_k", "to_v")
        self.out = FusedLinear(self.attn1.to_out, "0")
        self.text_query = FusedLinear(self.attn2, "to_q")
        self.text_kv = FusedLinear(self.attn2, "to_k", "to_v")
        self.text_out = FusedLinear(self.attn2.to_out, "0")
        self.ff = FeedForward(
            FusedLinear(block.ffn.net[0], "proj"), FusedLinear(block.ffn.net, "2")
        )

    @annotate_block
    def forward(
        self,
        video: Tensor,
        text: Tensor,
        modulation: Tensor,
        rotary: Tensor,
        attention: Attention,
        exchange: TokenExchange | None = None,
    ) -> Tensor:
        """Run one block; return the video tokens.

        Args:
            video: `[B, N, d]` video tokens; where ranks share samples, those of this rank.
            text: `[B, L, d]` text tokens, which every rank has whole.
            modulation: float32 `[1 or B, 6, d]`: shift, scale and gate of self-attention, then of
                the feed-forward.
            rotary: float32 `[N, head_dim / 2, 2]`, (cos, sin) of these video tokens.
            attention: the attention kernel, of both attentions.
            exchange: exchange of tokens for heads among ranks that share samples; None if they do
                not.
        """
        batch, _, width = video.shape
        rows = modulation.expand(batch, 6, width).unbind(1)
        shift, scale, gate, ff_shift, ff_scale, ff_gate = rows

        video, normed = residual_norm(video, scale, shift, self.eps, pad=self.qkv.pad)
        attended = self.out.unpadded(self._attend(normed, rotary, attention, exchange))
        weight = (self.norm2.weight - 1).expand(batch, width)
        bias = self.norm2.bias.expand(batch, width)
        video, normed = gated_norm(
            video, attended, gate, weight, bias, self.eps, pad=self.text_query.pad
        )
        read = self.text_out.unpadded(self._read(normed, text, attention))
        ungated = torch.ones_like(gate)
        video, normed = gated_norm(
            video, read, ungated, ff_scale, ff_shift, self.eps, pad=self.ff.up.pad
        )
        return self.ff(normed, video, ff_gate)

    omits_last_matmul = forward
    """A recomputation (`is_recomputing`) leaves out what only the results of this function need."""

    def _attend(
        self,
        rows: Tensor,
        rotary: Tensor,
        attention: Attention,
        exchange: TokenExchange | None,
    ) -> Tensor:
        """Attend among the video tokens; return `[B, N, d]`, before the output projection."""
        attn = self.attn1
        joint = self.qkv(rows).unflatten(2, (3, attn.heads, -1))
        query, key = (norm.weight.view(joint.shape[3:]) for norm in (attn.norm_q, attn.norm_k))
        query, key, value = norm_rotate(joint, None, query, None, key, None, rotary, self.eps)
        if exchange is not None:
            # The norms are over all heads, so they come before the exchange.
            heads = exchange.to_heads(torch.stack([query, key, value], dim=2))
            return exchange.to_tokens(attention(*heads.unbind(2))).flatten(2)
        # A checkpoint keeps neither of them anyway.
        recomputed = recomputed_in_backward(query, key)
        with contextlib.nullcontext() if is_checkpointed() else recomputed:
            return attention(query, key, value).flatten(2)

    def _read(self, rows: Tensor, text: Tensor, attention: Attention) -> Tensor:
        """Attend from the video tokens to the text; return `[B, N, d]`, before the output
        projection."""
        attn = self.attn2
        key, value = self.text_kv.unpadded(text).chunk(2, dim=-1)
        query = _rms_norm(self.text_query(rows), attn.norm_q)
        key = _rms_norm(key, attn.norm_k)
        heads = (part.unflatten(2, (attn.heads, -1)) for part in (query, key, value))
        return attention(*heads).flatten(2)


def _rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Normalise in the dtype of x, whatever that of the weights."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)
