"""What an iteration records of its rewards and its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_fast.algorithm.objective import Loss
from sage_fast.util.errors import NonFiniteError
from sage_fast.util.metrics import REWARD_PART, Metrics


def record_rewards(
    metrics: Metrics,
    rewards: Tensor,
    parts: Mapping[str, Tensor],
    advantages: Tensor,
    valid: Tensor,
    equal: Tensor,
    retried: int = 0,
) -> None:
    """Record statistics of the composite as `reward/<statistic>` and means of its parts as `reward_part/<part>`.

    Args:
        metrics: receives them.
        rewards, advantages: `[P, G]`, of all ranks.
        parts: part -> `[P G]`.
        valid: bool `[P, G]`, False for a failed reward.
        equal: bool `[P]`, True for a group without advantages.
        retried: number of samples whose reward was retried.

    Raises:
        NonFiniteError: every reward failed.
    """
    counted = rewards[valid]
    if not counted.numel():
        raise NonFiniteError("every reward of this iteration failed; nothing can be learned from it")
    spread = torch.stack([r[v].std(correction=0) for r, v in zip(rewards, valid) if v.any()])
    metrics.set("reward/mean", float(counted.mean()))
    metrics.set("reward/std", float(spread.mean()))
    metrics.set("reward/zero_std_groups", float(equal.float().mean()))
    metrics.set("reward/dropped", int((~valid).sum()))
    metrics.set("reward/dropped_groups", int((valid.sum(1) < 2).sum()))
    metrics.set("reward/retried", retried)
    metrics.set("advantage/abs_mean", float(advantages[valid].abs().mean()))
    for part, values in parts.items():
        metrics.set(REWARD_PART + part, float(values[values.isfinite()].mean()))


def record_losses(metrics: Metrics, losses: Sequence[Loss]) -> None:
    """Record the loss, the KLs and the ratio of an update."""
    for loss in losses:
        metrics.add("loss", loss.total)
        metrics.add("loss/policy", loss.policy)
        metrics.add("kl/anchor", loss.kl_anchor)
        metrics.add("kl/velocity", loss.kl_velocity)
        metrics.add("ratio/mean", loss.ratio)
        metrics.add("ratio/min", loss.ratio, "min")
        metrics.add("ratio/max", loss.ratio, "max")
        metrics.add("ratio/clip_fraction", loss.clipped)
        metrics.add("log_prob/max_delta", loss.ratio.log().abs(), "max")
