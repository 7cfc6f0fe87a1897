"""Engines: the optimizer side of training, in one process, on ranks that hold everything, or sharded by DeepSpeed."""

from __future__ import annotations

from sage_fast.config.schema import TrainConfig
from sage_fast.console import Say, say_nothing
from sage_fast.engine.plain import Engine
from sage_fast.engine.settings import check_engine
from sage_fast.models.policy import Policy

__all__ = ["Engine", "check_engine", "make_engine"]


def make_engine(policy: Policy, config: TrainConfig, tell: Say = say_nothing) -> Engine:
    """The engine of `train.engine`."""
    if config.engine == "plain":
        return Engine(policy, config, tell)
    from sage_fast.engine.zero import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(policy, config, tell)
