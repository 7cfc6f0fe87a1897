"""EMA: the exponential moving average of the trained weights, for evaluation and export or as the
rollout policy."""

import torch

from sage_fast.config.schema import TrainConfig
from sage_fast.models.policy import State


def ema_decay(config: TrainConfig, updates: int, *, warms_up: bool) -> float:
    """Return the decay with which the averaged weights take in update number `updates`, counted
    from 1.

    With a warm-up it rises as (1 + t) / (10 + t), as for the exported average in the code of
    DiffusionNFT and Flow-GRPO, so that the average soon forgets the weights at the start.
    """
    return min(config.ema_decay, (1 + updates) / (10 + updates)) if warms_up else config.ema_decay


@torch.no_grad()
def update_ema(ema: State, weights: State, decay: float) -> None:
    """Move the average, in place, towards the weights of the latest update."""
    torch._foreach_lerp_([ema[name] for name in weights], list(weights.values()), 1 - decay)
