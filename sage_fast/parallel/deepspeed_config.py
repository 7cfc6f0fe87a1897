"""DeepSpeed's configuration, which follows from the settings."""

from __future__ import annotations

from typing import Any

from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import TrainConfig

BUCKET = 100_000_000
"""Elements reduced or gathered at once; 0.4 GB in float32."""


def deepspeed_settings(config: TrainConfig, trained: int, *, bf16: bool = False) -> dict[str, Any]:
    """Build DeepSpeed's configuration.

    In bfloat16, forwards run on bfloat16 weights. The master, the sums of gradients and what
    crosses ranks of them stay float32; DeepSpeed's defaults are bfloat16. Gradient accumulation is
    off: each loss is already scaled to its share of the mean, and the engine decides when to call
    `step`.

    Args:
        trained: number of trained elements.
        bf16: whether activations are bfloat16.
    """
    bucket = min(BUCKET, trained + trained % 2)  # DeepSpeed requires an even number
    zero: dict[str, Any] = {
        "stage": ENGINES[config.engine].stage,
        "overlap_comm": "gradients" in ENGINES[config.engine].shards,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "use_multi_rank_bucket_allreduce": False,  # reduce to the rank that updates: half the bytes
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
