"""Engines: the optimizer side of training, on one process, replicated over ranks, or sharded by
DeepSpeed or FSDP2."""

from __future__ import annotations

import pkgutil

from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import TrainConfig
from sage_fast.models.policy import Policy
from sage_fast.parallel.engine import Engine
from sage_fast.util.launchers import launched

__all__ = ["Engine", "make_engine", "ranks_that_shard"]

DEFAULT_GPUS_PER_NODE = 8
"""GPUs of a node, if the launcher does not say."""


def make_engine(policy: Policy, config: TrainConfig, *, ema_warms_up: bool = True) -> Engine:
    """Build the engine that `train.engine` names; its module is imported here, since it may need
    DeepSpeed."""
    engine: Engine = pkgutil.resolve_name(ENGINES[config.engine].build)(
        policy, config, ema_warms_up=ema_warms_up
    )
    return engine


def ranks_that_shard(config: TrainConfig, ranks: int) -> int:
    """Return how many of the `ranks` share one copy of what is sharded: with `train.hybrid_shard`,
    those of a node."""
    if not (ENGINES[config.engine].gathers and config.hybrid_shard):
        return ranks
    node = launched("LOCAL_WORLD_SIZE", DEFAULT_GPUS_PER_NODE)
    has_several_nodes = 1 < node < ranks and ranks % node == 0
    return node if has_several_nodes else ranks
