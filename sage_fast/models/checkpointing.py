"""What a transformer block keeps for its backward: `model.gradient_checkpointing`, and how many bytes that is.

`full` keeps a block's inputs and runs the whole block again. `attention` keeps what attention gave as well, so that the
second forward has no attention in it: at 480p that is 73 % of its FLOPs. Both give the gradients of `none` to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from diffusers import HunyuanVideo15Transformer3DModel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MODES = ("none", "attention", "full")
"""From the fastest to the one that needs the least memory."""

ATTENTION_OPERATORS = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "flash_fwd")
"""Parts of the names of attention's operators: PyTorch's, those of flash-attn 2 and 3, and those of xformers."""

# What autograd keeps, for mlp ratio 4 and the default LoRA targets, in float32 and bfloat16 alike: units of d a token,
# and of the adapter's rank a token. tests/test_plan.py counts each; whoever changes the block changes them here.
KEPT_BY_BLOCK, KEPT_BY_TRAINED_BLOCK, KEPT_RANKS = 17, 18, 6
"""From the forward of a video token in one block to its backward, beside the block's input and what attention gave: the
normed rows of both matmuls and video after attention (3), q, k, v, and q and k after rotation (5), attention's output
as a matmul's input (1), the feed-forward before and after GELU (8). The normed and the two other inputs of matmuls have
room for the adapters: 3 r, r, r and r. Where all weights are trained, attention's output is no copy, and what both
gates multiply is kept (-1, +2). Text tokens keep less, and are few."""
GRADIENTS, GRADIENT_RANKS = 5, 1
"""At work at the peak of the backward of one block, beside what is kept: the gradient of the stream (1) and that of the
feed-forward's inner rows (4 d + r)."""


def set_checkpointing(transformer: HunyuanVideo15Transformer3DModel, mode: str, *, gathered: bool = False) -> None:
    """Give the transformer one of `MODES`, by diffusers' own switch.

    Args:
        gathered: whether weights are gathered for each layer and released after it (ZeRO-3). A frozen one is then empty
            when PyTorch compares the shapes of what was computed again, and gathered when it is read.
    """
    if mode == "none":
        transformer.disable_gradient_checkpointing()
        return
    options: dict[str, Any] = {"use_reentrant": False, "determinism_check": "none" if gathered else "default"}
    if mode == "attention":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    transformer.enable_gradient_checkpointing(functools.partial(checkpoint, **options))


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def is_attention(operator: Any) -> bool:
    """Whether an operator is the forward of an attention kernel."""
    name = str(operator)
    return any(part in name for part in ATTENTION_OPERATORS) and "backward" not in name and "bwd" not in name


def activation_bytes(
    mode: str,
    architecture: Mapping[str, Any],
    tokens: int,
    bytes_per_value: int,
    *,
    rank: int,
    batch_size: int = 1,
    passes: int = 1,
) -> float:
    """Most bytes of a micro-batch's activations and their gradients, which is at the start of the backward.

    Args:
        mode: one of `MODES`.
        architecture: the transformer's config.
        tokens: of video and text.
        bytes_per_value: of an activation.
        rank: of the adapter; 0 where all weights are trained.
        batch_size: transitions of a micro-batch.
        passes: 2 with guidance, whose passes are kept both and go backward one after the other.
    """
    d = architecture["num_attention_heads"] * architecture["attention_head_dim"]
    stream = bytes_per_value * d  # a block's input, and its output, which is computed again too
    of_attention = attention_output_bytes(architecture, bytes_per_value)
    inner = bytes_per_value * ((KEPT_BY_BLOCK if rank else KEPT_BY_TRAINED_BLOCK) * d + KEPT_RANKS * rank)
    kept, again = {
        "none": (stream + of_attention + inner, 0),
        "attention": (stream + of_attention, inner + stream),
        "full": (stream, of_attention + inner + stream),
    }[mode]
    gradients = bytes_per_value * (GRADIENTS * d + GRADIENT_RANKS * rank)
    return float(batch_size * tokens * (passes * architecture["num_layers"] * kept + again + gradients))


def attention_output_bytes(architecture: Mapping[str, Any], bytes_per_value: int) -> int:
    """What attention gives for a token in one block: the output, and a float32 log-sum-exp of each head."""
    heads = architecture["num_attention_heads"]
    return heads * (architecture["attention_head_dim"] * bytes_per_value + 4)
