"""Generate DeepSpeed's configuration from ours and apply the user's overrides."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.config.engines import ENGINES, OFFLOADS
from sage_fast.config.schema import TrainConfig
from sage_fast.util.errors import UserError

BUCKET = 100_000_000
"""Elements reduced or gathered at once; 0.4 GB in float32."""

OURS = {
    "train_batch_size": "train.prompts_per_iteration, train.group_size and train.optimizer_steps",
    "train_micro_batch_size_per_gpu": "train.batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "managed_gradient_accumulation": "train.batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "train.optimizer",
    "scheduler": "train.schedule",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
    "bfloat16": "model.dtype",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "activation_checkpointing": "model.gradient_checkpointing",
    "zero_optimization.stage": "train.engine",
    "zero_optimization.offload_optimizer": "train.offload",
    "zero_optimization.offload_param": "train.offload",
}
"""Keys a user's file may not set -> the setting of ours that determines them."""

ALLOWED = {
    "zero_optimization.reduce_bucket_size": int,
    "zero_optimization.allgather_bucket_size": int,
    "zero_optimization.overlap_comm": bool,
    "zero_optimization.contiguous_gradients": bool,
    "zero_optimization.reduce_scatter": bool,
    "zero_optimization.allgather_partitions": bool,
}
"""Keys a user's file may set -> type. They change speed and memory, but no update.

Other keys would change updates. Half-precision gradient communication loses small values. `round_robin_gradients`
reorders the weights in DeepSpeed's rows: updates by Muon were then far from those of one process.
"""


def deepspeed_settings(config: TrainConfig, trained: int, *, bf16: bool = False) -> dict[str, Any]:
    """Build DeepSpeed's configuration: our settings, overridden by `train.deepspeed_config`.

    In bfloat16, forwards run on bfloat16 weights. The master, the sums of gradients and what crosses ranks of them stay
    float32; DeepSpeed's defaults are bfloat16. Gradient accumulation is off: each loss is already scaled to its share
    of the mean, and the engine decides when to call `step`.

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
    if OFFLOADS[config.offload]:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW needs no compiler
        "steps_per_print": None,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    return _overlaid(settings, _own(config))


def _own(config: TrainConfig) -> dict[str, Any]:
    """Read and check the user's overrides."""
    if config.deepspeed_config is None:
        return {}
    name = f"train.deepspeed_config = {config.deepspeed_config!r}"
    try:
        own = json.loads(Path(config.deepspeed_config).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{name}: not valid JSON: {error}") from error
    if not isinstance(own, dict):
        raise UserError(f'{name}: expected a JSON object, such as {{"zero_optimization": {{...}}}}')
    zero = own.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UserError(f"{name}: zero_optimization = {zero!r}: expected a JSON object")
    given = {key: value for key, value in own.items() if key != "zero_optimization"}
    given |= {f"zero_optimization.{key}": value for key, value in zero.items()}
    for key, value in given.items():
        if key in OURS:
            raise UserError(f"{name} sets {key}, which follows from {OURS[key]}; take it out of the file")
        if key not in ALLOWED:
            near = difflib.get_close_matches(key, ALLOWED, n=1)
            raise UserError(
                f"{name} sets {key}, which cannot be overridden: "
                + (f"the nearest is {near[0]}" if near else f"expected any of {', '.join(ALLOWED)}")
            )
        even = isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and value % 2 == 0
        if not (even if ALLOWED[key] is int else isinstance(value, bool)):
            expected = "an even number from 2" if ALLOWED[key] is int else "true or false"
            raise UserError(f"{name}: {key} = {json.dumps(value)}: expected {expected}")
    if "gradients" not in ENGINES[config.engine].shards and zero.get("overlap_comm"):
        raise UserError(f"{name}: zero_optimization.overlap_comm needs train.engine = zero2; take it out")
    return own


def _overlaid(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(settings)
    for key, value in own.items():
        below = joined.get(key)
        joined[key] = _overlaid(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return joined
