"""DeepSpeed's configuration, which follows from the settings, with `train.deepspeed_config` merged
over it."""

from __future__ import annotations

from typing import Any

from sage_fast.config.deepspeed import deepspeed_overrides, merged
from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import TrainConfig
from sage_fast.util.errors import UserError, in_one_line, nearest

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

    Raises:
        UserError: as `deepspeed_overrides`.
    """
    bucket = min(BUCKET, trained + trained % 2)  # DeepSpeed requires an even number
    zero: dict[str, Any] = {
        "stage": ENGINES[config.engine].stage,
        "overlap_comm": "gradients" in ENGINES[config.engine].shards,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "use_multi_rank_bucket_allreduce": False,  # reduce to the rank that updates: half the bytes
    }
    settings = {
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
    return merged(settings, deepspeed_overrides(config))


def check_deepspeed_settings(config: TrainConfig) -> None:
    """Check what `train.deepspeed_config` sets under `zero_optimization` as DeepSpeed will.

    Raises:
        UserError: DeepSpeed does not know a key, or refuses a value.
    """
    overrides = deepspeed_overrides(config).get("zero_optimization", {})
    if not overrides:
        return
    # imports DeepSpeed, which other engines do not need
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    setting = f"train.deepspeed_config = {config.deepspeed_config!r}: zero_optimization"
    for key in overrides:
        if key not in DeepSpeedZeroConfig.model_fields:
            raise UserError(f"{setting}.{key}: {nearest(key, DeepSpeedZeroConfig.model_fields)}")
    try:
        DeepSpeedZeroConfig(**deepspeed_settings(config, 2)["zero_optimization"])
    except ValueError as error:  # of pydantic, in several lines
        raise UserError(f"{setting}: DeepSpeed refuses it: {in_one_line(error)}") from error
