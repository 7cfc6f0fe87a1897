"""FLOPs of an iteration, two per multiply-add."""

from __future__ import annotations

from collections.abc import Mapping

from sage_fast.algorithm.rows import of_table
from sage_fast.models.checkpointing import MODES, RECOMPUTED, CheckpointPlan
from sage_fast.models.cost import Cost


def flops(
    cost: Cost,
    counts: Mapping[str, int],
    videos: int,
    *,
    checkpointing: CheckpointPlan | None,
    trains_adapter: bool,
) -> dict[str, float]:
    """Return part -> FLOPs of an iteration, all ranks together.

    Args:
        cost: cost of one sample.
        counts: part -> forwards, as `IterationPlan.forwards` returns them.
        videos: decoded videos.
        checkpointing: what the backward recomputes; None: model FLOPs.
        trains_adapter: as for `training_flops`.
    """

    def of_transition(mode: str | None) -> float:
        return training_flops(
            cost.forward,
            cost.attention,
            cost.block_ends,
            checkpointing=mode,
            trains_adapter=trains_adapter,
        )

    if checkpointing is None:
        transition = of_transition(None)
    else:
        transition = checkpointing.mean({mode: of_transition(mode) for mode in MODES})

    parts = {}
    for part, count in counts.items():
        each = transition if part == "training" else cost.forward
        parts[part] = count * each
    parts["decode"] = videos * cost.decode
    return parts


def training_flops(
    forward: float,
    attention: float,
    block_ends: float = 0.0,
    *,
    checkpointing: str | None,
    trains_adapter: bool,
) -> float:
    """Return the FLOPs of a forward, its recomputation with checkpointing, and a backward.

        linear x (1 + [recomputed] + (1 if trains_adapter else 2))
        + attention x (1 + [recomputed] + 2.5)

    Checkpointing `full` recomputes both, `attention` the linear layers, `none` neither. With a
    frozen base the last matmuls of the blocks, of `block_ends` FLOPs, are not recomputed.
    `checkpointing=None` gives model FLOPs, as in model FLOPs utilization: no recomputation, and a
    backward of attention of two forwards, not 2.5.

    A linear layer's backward is one product for the gradient in its input and, unless the base is
    frozen (LoRA), one for that in its weight. Attention's backward takes five products to the
    forward's two, since fused kernels recompute the scores. The adapter's own products are not
    counted: about r / d of the linear part.

    Raises:
        UserError: `checkpointing` is no mode.
    """
    recomputed: tuple[str, ...] = ()
    if checkpointing is not None:
        recomputed = of_table(RECOMPUTED, checkpointing, "checkpointing")

    linear = forward - attention
    linear_passes = 2 if trains_adapter else 3
    again = 0.0
    if "linear" in recomputed:
        again = linear - block_ends if trains_adapter else linear

    attention_passes = 2 if "attention" in recomputed else 1
    attention_backward = 2.0 if checkpointing is None else 2.5
    return linear * linear_passes + again + attention * (attention_passes + attention_backward)
