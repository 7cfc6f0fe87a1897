"""FlashAttention 4 as an operator of PyTorch.

The package flash-attn-4 (kernels in CuTe DSL for Hopper and Blackwell, compiled at the first call) launches its kernels
past PyTorch's dispatcher. As an operator, checkpointing can keep its output and torch.compile can call it. Written
against 4.0.0b36; not run yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("sage_fast_flash4::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `[B, S, H, D]` and the log-sum-exp, float32 `[B, H, S]`, computed without gradients too."""
    from flash_attn.cute import flash_attn_func

    with torch.no_grad():
        out, log_sum_exp = flash_attn_func(query, key, value, return_lse=True)
    return out, log_sum_exp


@torch.library.custom_op("sage_fast_flash4::attention_backward", mutates_args=())
def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, gradient: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    of_query, of_key, of_value = _flash_attn_bwd(query, key, value, out, gradient, log_sum_exp)
    return of_query, of_key, of_value


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(batch, heads, tokens, dtype=torch.float32)


@_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, gradient: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, log_sum_exp = ctx.saved_tensors
    return _backward(query, key, value, out, gradient.contiguous(), log_sum_exp)


_attention.register_autograd(_differentiate, setup_context=_save)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend; all `[B, S, H, D]` in bfloat16 or float16 on a GPU."""
    return _attention(query, key, value)[0]
