"""One block of HunyuanVideo 1.5 over its stock modules, with fused element-wise work and no mask.

diffusers' block normalises, rotates and joins queries and keys in seven passes, computes AdaLN from
the timestep, and builds a [B, 1, S, S] mask. Here:

- AdaLN is precomputed;
- `norm_rotate` is one pass, and so is a gated residual with the norm after it;
- the projection of the video tokens leaves rows for the text tokens, so attention reads the values
  where they were written.

The same operators run with and without autograd, so rollout and training round alike.
benchmarks/passes.py counts the bytes they move.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from sage_fast.models.attention.backends import Attention
from sage_fast.models.attention.sequence import TokenExchange
from sage_fast.models.checkpointing import is_checkpointed
from sage_fast.models.lora.linear import FeedForward, FusedLinear, project_streams
from sage_fast.ops.gated_norm import gated_norm
from sage_fast.ops.norm_modulate import residual_norm
from sage_fast.ops.norm_rotate import norm_rotate, recomputed_in_backward
from sage_fast.util.profiling import annotate_block


class TextToVideoBlock(nn.Module):
    """A stock HunyuanVideo15TransformerBlock with its linear layers fused.

    It is a module so that hooks (FSDP2, profilers) can attach to it. AdaLN's layers are not in it.

    Args:
        block: the stock block; its weights are shared.
        index: its number in the transformer, which a profiler shows.
    """

    def __init__(self, block: Any, index: int) -> None:
        super().__init__()
        self.index = index
        self.attn: Any = block.attn
        self.video_qkv = FusedLinear(self.attn, "to_q", "to_k", "to_v")
        self.text_qkv = FusedLinear(self.attn, "add_q_proj", "add_k_proj", "add_v_proj")
        self.video_out = FusedLinear(self.attn.to_out, "0")
        self.text_out = FusedLinear(self.attn, "to_add_out")
        self.video_ff = _feed_forward(block.ff)
        self.text_ff = _feed_forward(block.ff_context)

    @annotate_block
    def forward(
        self,
        video: Tensor,
        text: Tensor,
        modulation: Tensor,
        rotary: Tensor,
        attention: Attention,
        is_last: bool,
        exchange: TokenExchange | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one block; return the video and text tokens.

        Args:
            video: `[B, N, d]` video tokens; where ranks share samples, those of this rank.
            text: `[B, L, d]` text tokens, likewise.
            modulation: `[1 or B, 2, 6, d]`, for video and text: shift, scale and gate of attention,
                then of the feed-forward.
            rotary: float32 `[all N, head_dim / 2, 2]`, (cos, sin) of the video tokens of all ranks.
            attention: the attention kernel.
            is_last: whether this is the last block. Nothing reads its text tokens, so it returns
                None for them.
            exchange: exchange of tokens for heads among ranks that share samples; None if they do
                not.
        """
        batch, _, width = video.shape
        (shift, scale, gate, ff_shift, ff_scale, ff_gate), text_modulation = (
            stream.expand(batch, 6, width).unbind(1) for stream in modulation.unbind(1)
        )
        text_shift, text_scale, text_gate, text_ff_shift, text_ff_scale, text_ff_gate = (
            text_modulation
        )

        # The exchange joins the streams; without it, the text is written after the video tokens.
        pad_rows = text.shape[1] if exchange is None else 0
        video, video_in = residual_norm(
            video, scale, shift, pad=self.video_qkv.pad, pad_rows=pad_rows
        )
        text, text_in = residual_norm(text, text_scale, text_shift, pad=self.text_qkv.pad)
        out = self._attend(video_in, text_in, rotary, attention, exchange)
        video_out, text_out = project_streams(
            out,
            (video.shape[1], text.shape[1]),
            (self.video_out, None if is_last else self.text_out),
        )
        video, normed = gated_norm(
            video, video_out, gate, ff_scale, ff_shift, pad=self.video_ff.up.pad
        )
        video = self.video_ff(normed, video, ff_gate)
        if is_last:
            return video, None
        text, normed = gated_norm(
            text, text_out, text_gate, text_ff_scale, text_ff_shift, pad=self.text_ff.up.pad
        )
        return video, self.text_ff(normed, text, text_ff_gate)

    omits_last_matmul = forward
    """A recomputation (`is_recomputing`) leaves out what only the results of this function need."""

    def _attend(
        self,
        video: Tensor,
        text: Tensor,
        rotary: Tensor,
        attention: Attention,
        exchange: TokenExchange | None,
    ) -> Tensor:
        """Attend among video and text tokens; return `[B, N + L, d]`, before the output
        projections.

        Without an exchange, `video` has L padding rows after its N tokens, for the text.
        """
        attn = self.attn
        joint = self.video_qkv(video).unflatten(2, (3, attn.heads, -1))
        text_heads = self.text_qkv(text).unflatten(2, (3, attn.heads, -1))
        if exchange is not None:
            joint = exchange.to_heads(joint, text_heads)
            text_heads = None
        queries, keys = (
            (attn.norm_q.weight, attn.norm_added_q.weight),
            (attn.norm_k.weight, attn.norm_added_k.weight),
        )
        query, key, value = norm_rotate(joint, text_heads, *queries, *keys, rotary)
        # A checkpoint keeps neither of them anyway.
        recomputed = recomputed_in_backward(query, key)
        with contextlib.nullcontext() if is_checkpointed() else recomputed:
            out = attention(query, key, value)
        if exchange is not None:
            out = exchange.to_tokens(out)
        return out.flatten(2)


def _feed_forward(ff: Any) -> FeedForward:
    return FeedForward(FusedLinear(ff.net[0], "proj"), FusedLinear(ff.net, "2"))
