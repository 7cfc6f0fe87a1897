"""What a transformer block keeps for its backward: `model.gradient_checkpointing`.

`full` keeps a block's inputs and runs the whole block again. `attention` keeps what attention gave as well, so that the
second forward has no attention in it: at 480p that is 73 % of its FLOPs. Both give the gradients of `none` to the bit.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sage_fast.models.attention import is_attention

MODES = ("none", "attention", "full")
"""From the fastest to the one that needs the least memory."""


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
