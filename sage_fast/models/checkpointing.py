"""Gradient checkpointing of transformer blocks: `model.gradient_checkpointing`.

`full` keeps a block's inputs and recomputes the whole block. `attention` also keeps attention's output, so the
recomputation skips attention: 73 % of its FLOPs for HunyuanVideo 1.5 at 480p, 81 frames. On the CPU both give the
gradients of `none` bit for bit. On a GPU the gradients of any mode vary in rounding from one backward to the next: the
backward of cuDNN's attention and of FlashAttention sums by atomics.
"""

from __future__ import annotations

import functools
from typing import Any, get_args

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sage_fast.config.schema import Checkpointing
from sage_fast.models.attention import is_attention

RECOMPUTED: dict[str, tuple[str, ...]] = {"none": (), "attention": ("linear",), "full": ("linear", "attention")}
"""Mode -> what the backward recomputes, from fastest to least memory."""
MODES = tuple(RECOMPUTED)
assert {"auto", *MODES} == set(get_args(Checkpointing)), "a mode is named in config.Checkpointing and in RECOMPUTED"


def set_checkpointing(transformer: Any, mode: str, *, gathered: bool = False) -> None:
    """Set one of `MODES` through diffusers' own switch.

    Args:
        gathered: whether weights are gathered for each layer and released after it (ZeRO-3). This turns off PyTorch's
            comparison of recomputed shapes, because a frozen weight is empty at that point; it is gathered when read.
    """
    if not RECOMPUTED[mode]:
        transformer.disable_gradient_checkpointing()
        return
    options: dict[str, Any] = {"use_reentrant": False, "determinism_check": "none" if gathered else "default"}
    if "attention" not in RECOMPUTED[mode]:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    transformer.enable_gradient_checkpointing(functools.partial(checkpoint, **options))


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE
