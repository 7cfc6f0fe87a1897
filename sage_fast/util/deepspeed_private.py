"""All uses of DeepSpeed's private API.

Written for the minor version `TESTED`. Another version warns once, and fails only where something is missing.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sage_fast.util.console import wrapped

log = logging.getLogger(__name__)

TESTED = "0.19"


def _version() -> str:
    return importlib.metadata.version("deepspeed")


@functools.cache
def check_version() -> None:
    """Warn, once in a process, if the installed minor version is not the tested one."""
    if _version().split(".")[:2] != TESTED.split("."):
        warning = (
            f"warning: DeepSpeed {_version()} is not tested with sage-fast, which uses some of its insides; tested is "
            f"{TESTED}: pip install 'deepspeed=={TESTED}.*'"
        )
        log.warning(wrapped(warning))


def join_deepspeed() -> None:
    """Make DeepSpeed use the existing process group and its timeout.

    It would create a group of its own, whose timeout no argument sets.
    """
    import deepspeed  # optional, and takes seconds
    from deepspeed.utils import groups

    # An inference operator that is never called here. On a CPU, DeepSpeed would compile it at start and print so.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(verbose=False)
    groups._WORLD_GROUP = dist.group.WORLD


def leave_deepspeed() -> None:
    """Make DeepSpeed forget the process group."""
    if (groups := sys.modules.get("deepspeed.utils.groups")) is not None:
        vars(groups)["_WORLD_GROUP"] = None


def is_gathered(p: Any) -> bool:
    """Return whether ZeRO-3 spreads a weight over the ranks and gathers it for a forward."""
    return hasattr(p, "ds_id")


def part_of_master(optimizer: Any, p: Any) -> Tensor | None:
    """Return this rank's part of the float32 weights that DeepSpeed updates, sharing its memory; None if it has none.

    The documented `safe_get_local_fp32_param` copies what is offloaded, and knows ZeRO-3 only.
    """
    if is_gathered(p):
        part: Tensor = optimizer._get_fp32_opt_state_partition(p, release_swap_buffers=False)[0]
        return part
    return None if p._hp_mapping is None else p._hp_mapping.get_hp_fragment()


def refresh_master(optimizer: Any) -> None:
    """Copy the weights into the float32 ones that DeepSpeed updates.

    The documented `safe_set_full_fp32_param` would gather every weight of ZeRO-3.
    """
    optimizer.refresh_fp32_params()


def whole_shape(p: Any) -> Any:
    """Return the shape of a weight; one that ZeRO-3 spreads over the ranks is empty in between."""
    return p.ds_shape if is_gathered(p) else p.shape


def shard(p: Any) -> Tensor:
    """Return this rank's shard of a ZeRO-3 weight, sharing its memory.

    The documented calls give the float32 master, which the forward does not read.
    """
    tensor: Tensor = p.ds_tensor
    return tensor


def forget_order(optimizer: Any) -> None:
    """Stop ZeRO-3 from recording the order of the layers, which would have to be the same on all ranks."""
    optimizer.parameter_offload.fwd_pre_hook.remove()


def keep_whole(optimizer: Any, weights: Sequence[Any]) -> None:
    """Make ZeRO-3 gather these weights now and after every update. Its setting chooses them by size alone."""
    optimizer.parameter_offload.persistent_parameters += weights
    gather(weights)


def gather(weights: Sequence[Any]) -> None:
    """Gather weights of `keep_whole` from the shards of all ranks.

    The documented `GatheredParameters` releases them at its end.
    """
    weights[0].all_gather(weights)


def release_gathered(optimizer: Any) -> None:
    """Release weights that ZeRO-3 has gathered for a forward. The engine's own method also empties CUDA's cache."""
    optimizer.empty_partition_cache()
