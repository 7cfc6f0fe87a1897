"""Engines: the optimizer side of training, on one process, replicated over ranks, or sharded by DeepSpeed."""

from __future__ import annotations

from sage_fast.config.schema import TrainConfig
from sage_fast.console import Say, say_nothing
from sage_fast.engine.plain import Engine
from sage_fast.engine.settings import check_engine
from sage_fast.policy.hunyuan import HunyuanVideo15Policy

__all__ = ["Engine", "check_engine", "make_engine"]


def make_engine(policy: HunyuanVideo15Policy, config: TrainConfig, tell: Say = say_nothing) -> Engine:
    """Build the engine that `train.engine` names."""
    if config.engine == "plain":
        return Engine(policy, config, tell)
    from sage_fast.engine.zero import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(policy, config, tell)
