"""What a transformer block keeps for its backward: `model.gradient_checkpointing`, and how many bytes that is.

`full` keeps a block's inputs and runs the whole block again. `attention` keeps what attention gave as well, so that the
second forward has no attention in it: at 480p that is 73 % of its FLOPs. Both give the gradients of `none` to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sage_fast.policy.block import TextToVideoBlock

MODES = ("none", "attention", "full")
"""From the fastest to the one that needs the least memory."""

ATTENTION_OPERATORS = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "flash_fwd")
"""Parts of the names of attention's operators: PyTorch's, those of flash-attn 2 and 3, and those of xformers."""

SAVED_VALUES = {"lora": 17, "full": 17}
"""tuning -> values that autograd keeps of one block, in units of d a token; counted for mlp ratio 4 and the default
LoRA targets, in float32 and bfloat16 alike."""


def set_checkpointing(transformer: HunyuanVideo15Transformer3DModel, mode: str) -> None:
    """Give the transformer one of `MODES`, by diffusers' own switch."""
    if mode == "none":
        transformer.disable_gradient_checkpointing()
    elif mode == "full":
        transformer.enable_gradient_checkpointing()
    else:
        transformer.enable_gradient_checkpointing(_keep_attention)


def _keep_attention(block: TextToVideoBlock, *arguments: Any) -> tuple[Tensor, Tensor]:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts)


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def is_attention(operator: Any) -> bool:
    """Whether an operator is the forward of an attention kernel."""
    name = str(operator)
    return any(part in name for part in ATTENTION_OPERATORS) and "backward" not in name and "bwd" not in name


def activation_bytes(
    mode: str,
    architecture: Mapping[str, Any],
    joint_tokens: int,
    bytes_per_value: int,
    tuning: str,
    *,
    batch_size: int,
    passes: int,
) -> float:
    """Kept for the backward of a micro-batch, and at work in one block.

    Args:
        mode: one of `MODES`.
        architecture: the transformer's config.
        joint_tokens: of video and text.
        bytes_per_value: of an activation.
        tuning: `lora` or `full`.
        batch_size: transitions of a micro-batch.
        passes: forwards whose graphs are held together, 2 with guidance.
    """
    block = block_activation_bytes(architecture, joint_tokens, bytes_per_value, tuning)
    if mode == "none":
        return float(batch_size * passes * architecture["num_layers"] * block)
    kept = checkpointed_activation_bytes(architecture, joint_tokens, bytes_per_value)
    if mode == "attention":
        kept += attention_output_bytes(architecture, joint_tokens, bytes_per_value)
    return float(batch_size * (passes * kept + block))


def checkpointed_activation_bytes(architecture: Mapping[str, Any], joint_tokens: int, bytes_per_value: int) -> int:
    """Saved by block-wise checkpointing: the inputs of every block."""
    d = architecture["num_attention_heads"] * architecture["attention_head_dim"]
    return architecture["num_layers"] * joint_tokens * d * bytes_per_value


def attention_output_bytes(architecture: Mapping[str, Any], joint_tokens: int, bytes_per_value: int) -> int:
    """What attention gives in every block: the output, and a float32 log-sum-exp of each head."""
    heads = architecture["num_attention_heads"]
    values = heads * architecture["attention_head_dim"] * bytes_per_value + 4 * heads
    return architecture["num_layers"] * joint_tokens * values


def block_activation_bytes(
    architecture: Mapping[str, Any], joint_tokens: int, bytes_per_value: int, tuning: str
) -> int:
    """Saved by one block without checkpointing, and at work in one block with it: SAVED_VALUES S d values."""
    d = architecture["num_attention_heads"] * architecture["attention_head_dim"]
    return bytes_per_value * (SAVED_VALUES[tuning] * joint_tokens * d)
