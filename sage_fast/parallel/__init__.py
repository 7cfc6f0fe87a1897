"""Engines: the optimizer side of training, on one process, replicated over ranks, or sharded by DeepSpeed or FSDP2."""

from __future__ import annotations

import importlib.util
import pkgutil

from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import TrainConfig
from sage_fast.models.policy import Policy
from sage_fast.parallel.engine import Engine
from sage_fast.util.errors import UserError
from sage_fast.util.launchers import launched

__all__ = ["Engine", "check_engine", "make_engine", "ranks_that_shard"]

NODE = 8
"""GPUs of a node, if the launcher does not say."""


def make_engine(policy: Policy, config: TrainConfig, *, ema_warms_up: bool = True) -> Engine:
    """Build the engine that `train.engine` names; its module is imported here, since it may need DeepSpeed."""
    engine: Engine = pkgutil.resolve_name(ENGINES[config.engine].build)(policy, config, ema_warms_up=ema_warms_up)
    return engine


def ranks_that_shard(config: TrainConfig, ranks: int) -> int:
    """Return how many of the `ranks` share one copy of what is sharded: with `train.hybrid_shard`, those of a node."""
    node = launched("LOCAL_WORLD_SIZE", NODE)
    hybrid = ENGINES[config.engine].gathers and config.hybrid_shard
    return node if hybrid and 1 < node < ranks and ranks % node == 0 else ranks


def check_engine(config: TrainConfig) -> None:
    """Check that the library of the engine is installed.

    Raises:
        UserError: the library of the engine is not installed.
    """
    package = ENGINES[config.engine].package
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"train.engine = {config.engine!r} needs {package}, which is not installed: pip install "
            f"'sage-fast[{package}]'; the nearest choice without it is plain"
        )
