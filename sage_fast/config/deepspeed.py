"""`train.deepspeed_config`: what a user adds to the configuration that we make for DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.config.loader import parse_yaml
from sage_fast.config.schema import TrainConfig
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_text

_SAMPLES = "set train.prompts_per_iteration, train.group_size or train.batch_size"
_PRECISION = "set model.dtype; gradients are summed and cross ranks in float32"
_OPTIMIZER = "set train.optimizer and train.learning_rate"
_SCHEDULE = "set train.schedule and train.warmup_steps"
_HOST = "set train.engine = zero3 and train.offload_shards = true"
REFUSED = {
    "train_batch_size": _SAMPLES,
    "train_micro_batch_size_per_gpu": _SAMPLES,
    "gradient_accumulation_steps": _SAMPLES,
    "managed_gradient_accumulation": _SAMPLES,
    "gradient_clipping": "set train.max_grad_norm",
    "optimizer": _OPTIMIZER,
    "zero_allow_untested_optimizer": _OPTIMIZER,
    "zero_force_ds_cpu_optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULE,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "data_types": _PRECISION,
    "communication_data_type": _PRECISION,
    "prescale_gradients": "gradients are averaged over the ranks",
    "gradient_predivide_factor": "gradients are averaged over the ranks",
    "zero_optimization.stage": "set train.engine",
    "zero_optimization.cpu_offload": _HOST,
    "zero_optimization.offload_optimizer": _HOST,
    "zero_optimization.offload_param": _HOST,
    "zero_optimization.round_robin_gradients": "each rank updates a row of neighbouring weights",
}
"""Keys that follow from the settings, or on which checkpoints and updates depend -> what to do
instead."""


def deepspeed_overrides(config: TrainConfig) -> dict[str, Any]:
    """Return what `train.deepspeed_config` holds, itself or in its file; nothing if it is not set.

    Raises:
        UserError: the file is missing or holds no mapping, or a key is one of `REFUSED`.
    """
    given = config.deepspeed_config
    if given is None:
        return {}
    setting = f"train.deepspeed_config = {given!r}"
    found = _read(setting, given) if isinstance(given, str) else given
    for key in keys_in(found):
        if key in REFUSED:
            raise UserError(f"{setting}: {key} follows from the settings; {REFUSED[key]}")
    zero = found.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise UserError(f"{setting}: zero_optimization = {zero!r}: expected a mapping of keys")
    return dict(found)


def keys_in(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of a mapping and of the mappings in it."""
    found = []
    for key, value in tree.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found += keys_in(value, f"{prefix}{key}.")
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` in it, mapping by mapping."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            found[key] = merged(old, value)
        else:
            found[key] = value
    return found


def _read(setting: str, path: str) -> dict[str, Any]:
    """Read a mapping from a JSON or YAML file."""
    if not Path(path).is_file():
        raise UserError(f"{setting}: no such file; expected a JSON or YAML file for DeepSpeed")
    try:
        found = parse_yaml(read_text(Path(path)))  # JSON is YAML
    except (OSError, ValueError) as error:
        raise UserError(f"{setting}: cannot be read as JSON or YAML: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{setting}: holds {type(found).__name__}; expected a mapping of keys")
    odd = [key for key in found if not isinstance(key, str)]
    if odd:
        raise UserError(f"{setting}: the key {odd[0]!r} is no text; expected DeepSpeed's keys")
    return found
