"""What a transformer block keeps for its backward: `model.gradient_checkpointing`.

`full` keeps a block's inputs and runs the whole block again. `attention` keeps what attention gave as well, so that the
second forward has no attention in it: at 480p that is 73 % of its FLOPs. Both give the gradients of `none` to the bit.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MODES = ("none", "attention", "full")
"""From the fastest to the one that needs the least memory."""

ATTENTION_OPERATORS = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "flash_fwd")
"""Parts of the names of attention's operators: PyTorch's, those of flash-attn 2 and 3, and those of xformers."""


def set_checkpointing(transformer: Any, mode: str, *, gathered: bool = False) -> None:
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
