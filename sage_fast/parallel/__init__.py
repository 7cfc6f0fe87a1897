"""Engines: the optimizer side of training, on one process, replicated over ranks, or sharded by DeepSpeed."""

from __future__ import annotations

import importlib
from typing import get_args

from sage_fast.config.schema import EngineName, TrainConfig
from sage_fast.models.policy import Policy
from sage_fast.parallel.plain import Engine
from sage_fast.util.console import Say, say_nothing

__all__ = ["ENGINES", "Engine", "make_engine"]

ZERO = "sage_fast.parallel.zero:ZeroEngine"
ENGINES = {"plain": "sage_fast.parallel.plain:Engine", "zero1": ZERO, "zero2": ZERO, "zero3": ZERO}
"""`train.engine` -> its class, imported when it is made: DeepSpeed takes seconds."""
assert tuple(ENGINES) == get_args(EngineName), "an engine is named in config.EngineName and has its class in ENGINES"


def make_engine(policy: Policy, config: TrainConfig, tell: Say = say_nothing) -> Engine:
    """Build the engine that `train.engine` names."""
    module, _, name = ENGINES[config.engine].partition(":")
    return getattr(importlib.import_module(module), name)(policy, config, tell)
