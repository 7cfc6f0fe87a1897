"""One block of HunyuanVideo 1.5 over its stock modules, with fused element-wise work and no mask.

diffusers' block normalises, rotates and joins queries and keys in seven passes, computes AdaLN from the timestep,
and builds a [B, 1, S, S] mask. Here AdaLN comes in ready, `norm_modulate` and `norm_rotate` are one pass each, the
gated residual is `addcmul`, and a mask, needed only if lengths differ, covers only keys. The same operators run with
and without autograd, so that rollout and training round alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from sage_fast.ops import norm_modulate, norm_rotate
from sage_fast.policy.attention import Attention


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)`; a LoRA adapter is added by one matmul onto the output, in the activation type.

    peft computes a float32 adapter on a float32 copy of x and adds it in two further passes over the output.
    """
    if not isinstance(layer, LoraLinear) or not _is_plain(layer):
        return layer(x)
    name = layer.active_adapters[0]
    base: Any = layer.base_layer
    rows = x.flatten(0, -2)
    out = F.linear(rows, base.weight, base.bias)
    down = F.linear(rows, layer.lora_A[name].weight.to(out.dtype))
    out.addmm_(down, layer.lora_B[name].weight.to(out.dtype).t(), alpha=layer.scaling[name])
    return out.view(*x.shape[:-1], -1)


def _is_plain(layer: LoraLinear) -> bool:
    """One active adapter without dropout, bias or variant (DoRA), not merged and not switched off."""
    names = layer.active_adapters
    return (
        len(names) == 1
        and names[0] in layer.lora_A
        and not layer.merged
        and not layer.disable_adapters
        and names[0] not in layer.lora_variant
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and layer.lora_B[names[0]].bias is None
    )


def feed_forward(ff: Any, x: Tensor) -> Tensor:
    """diffusers' FeedForward with tanh GELU."""
    return linear(ff.net[2], F.gelu(linear(ff.net[0].proj, x), approximate="tanh"))


def block_forward(
    block: Any,
    video: Tensor,
    text: Tensor,
    modulation: Tensor,
    mask: Tensor | None,
    rotary: Tensor,
    attention: Attention,
    is_last: bool,
) -> tuple[Tensor, Tensor]:
    """A HunyuanVideo15TransformerBlock.

    Args:
        block: the stock module.
        video: `[B, N, d]` video tokens.
        text: `[B, L, d]` text tokens.
        modulation: `[1 or B, 2, 6, d]`, of video and of text: shift, scale, gate before attention, then before the
            feed-forward.
        mask: bool `[B, N + L]` over keys; None if nothing is padded.
        rotary: float32 `[N, head_dim / 2, 2]`, (cos, sin).
        attention: the kernel.
        is_last: nothing reads the text tokens of the last block: they are returned as they came.
    """
    batch, _, width = video.shape
    (shift, scale, gate, ff_shift, ff_scale, ff_gate), text_modulation = (
        stream.expand(batch, 6, width).unbind(1) for stream in modulation.unbind(1)
    )
    text_shift, text_scale, text_gate, text_ff_shift, text_ff_scale, text_ff_gate = text_modulation

    attn = block.attn
    video_out, text_out = joint_attention(
        attn, norm_modulate(video, scale, shift), norm_modulate(text, text_scale, text_shift), mask, rotary, attention
    )
    video = torch.addcmul(video, gate[:, None], linear(attn.to_out[0], video_out))
    normed = norm_modulate(video, ff_scale, ff_shift)
    video = torch.addcmul(video, ff_gate[:, None], feed_forward(block.ff, normed))
    if is_last:
        return video, text
    text = torch.addcmul(text, text_gate[:, None], linear(attn.to_add_out, text_out))
    normed = norm_modulate(text, text_ff_scale, text_ff_shift)
    return video, torch.addcmul(text, text_ff_gate[:, None], feed_forward(block.ff_context, normed))


def joint_attention(
    attn: Any, video: Tensor, text: Tensor, mask: Tensor | None, rotary: Tensor, attention: Attention
) -> tuple[Tensor, Tensor]:
    """Attention among video and text tokens before the output projections: `[B, N, d]`, `[B, L, d]`."""

    def heads(layer: nn.Module, x: Tensor) -> Tensor:
        return linear(layer, x).unflatten(2, (attn.heads, -1))

    def joint(video_layer: nn.Module, text_layer: nn.Module, video_norm: Any, text_norm: Any) -> Tensor:
        return norm_rotate(
            heads(video_layer, video), heads(text_layer, text), video_norm.weight, text_norm.weight, rotary
        )

    query = joint(attn.to_q, attn.add_q_proj, attn.norm_q, attn.norm_added_q)
    key = joint(attn.to_k, attn.add_k_proj, attn.norm_k, attn.norm_added_k)
    value = torch.cat([heads(attn.to_v, video), heads(attn.add_v_proj, text)], dim=1)
    out = attention(query, key, value, mask).flatten(2)
    return out[:, : video.shape[1]], out[:, video.shape[1] :]
