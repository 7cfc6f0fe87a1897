"""All uses of DeepSpeed's private API.

Written for the minor version `TESTED`. Another version warns once, and fails only where something is missing.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys

import torch.distributed as dist

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
