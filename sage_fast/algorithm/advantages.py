"""Advantages of the samples of a group, from their rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sage_fast.algorithm.rows import of_table
from sage_fast.config.schema import AdvantageStd

ROUNDING = 8
"""Rewards of a group that differ by less than so many roundings of their size, in their dtype, are
equal."""
EPS = 1e-6
"""Epsilon of Eq. 10."""
STD_OVER_BATCH = {"group": False, "batch": True}
"""Choice of `objective.advantage_std` -> whether one deviation serves all groups."""
SMALL_STD = 100 * EPS
"""Standard deviation of rewards below which `EPS` takes a percent or more of the advantages."""


def group_advantages(
    rewards: Tensor,
    valid: Tensor,
    *,
    std: AdvantageStd = "group",
    clamp: float = 5.0,
    eps: float = EPS,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return A_i = (R_i - group mean) / (std + eps), clamped (Eq. 10).

    Args:
        rewards: float32 or float64 `[P, G]`, one row per group.
        valid: bool `[P, G]`; False excludes a sample from all statistics and gives it advantage 0.
        std: population std of each `group`, or over the `batch` of all unequal groups about their
            means.
        clamp: bound on |A|.
        eps: epsilon of Eq. 10.
        dtype: of the scores that `rewards` come from, whose rounding makes rewards equal; by
            default that of `rewards`.

    Returns:
        Advantages, float64 `[P, G]`, and bool `[P]`, True for groups whose valid rewards are equal
        up to rounding (or fewer than two).

    Raises:
        UserError: `std` is no choice of `objective.advantage_std`.
    """
    over_batch = of_table(STD_OVER_BATCH, std, "objective.advantage_std")
    rounding = _rounding_of(dtype or rewards.dtype)
    rewards = rewards.double()  # rewards of a group may differ by a small part of their size
    count = valid.sum(1, keepdim=True)
    filled = torch.where(valid, rewards, 0.0)
    largest = filled.abs().amax(1)
    differs_by_rounding = _spread(rewards, valid) <= rounding * largest
    equal = (count[:, 0] < 2) | differs_by_rounding

    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(valid & ~equal[:, None], rewards - mean, 0.0)
    squares = centred.square().sum(1, keepdim=True)
    size = count
    if over_batch:
        squares = squares.sum()
        size = count[~equal].sum()
    deviation = (squares / size.clamp(min=1)).sqrt()
    advantages = torch.where(equal[:, None], 0.0, centred / (deviation + eps))
    return advantages.clamp(-clamp, clamp), equal


def small_groups(rewards: Tensor, valid: Tensor, equal: Tensor) -> int:
    """Return the number of groups whose rewards differ, by so little that the epsilon of Eq. 10
    shrinks advantages.

    Args:
        rewards: as for `group_advantages`.
        valid: as for `group_advantages`.
        equal: bool `[P]`, as it returns.
    """
    values = torch.where(valid, rewards.double(), 0.0)
    count = valid.sum(1).clamp(min=1)
    mean = values.sum(1) / count
    squares = torch.where(valid, values - mean[:, None], 0.0).square().sum(1)
    deviation = (squares / count).sqrt()
    is_small = (deviation < SMALL_STD) & ~equal
    return int(is_small.sum())


def _rounding_of(dtype: torch.dtype) -> float:
    """Return the share of their size by which equal values of a dtype may differ."""
    return ROUNDING * torch.finfo(dtype).eps


def _spread(values: Tensor, valid: Tensor) -> Tensor:
    """Return largest - smallest valid value of each group, `[P]`; -inf without one."""
    largest = torch.where(valid, values, -torch.inf).amax(1)
    smallest = torch.where(valid, values, torch.inf).amin(1)
    return largest - smallest


def balanced_rewards(
    parts: Mapping[str, Tensor], weights: Mapping[str, float], valid: Tensor
) -> Tensor:
    """Return sum of weight x part normalised by its group, float64 `[P, G]`; 0 for a failed sample.

    It is 0 for a whole group where the parts cancel up to rounding. GDPO (arXiv 2601.05242) divides
    the sum by its deviation over the batch: `group_advantages` with `std="batch"`, which leaves
    equal groups out of the deviation.

    Args:
        parts: part -> float32 or float64 `[P G]`; a part without a weight is left out.
        weights: weight of each part.
        valid: bool `[P, G]`, as for `group_advantages`.
    """
    total = torch.zeros(valid.shape, dtype=torch.float64)
    rounding = total[:, 0]
    for name, flat in parts.items():
        weight = weights.get(name, 0.0)
        if weight == 0:
            continue
        part = flat.view_as(valid)
        values = part.double()
        # Without an eps, which would keep parts from cancelling.
        normalised, equal = group_advantages(part, valid, clamp=math.inf, eps=0.0)
        total = total + weight * normalised

        # what rounding of the part's values becomes after they are normalised and weighted
        scale = _spread(normalised, valid) / _spread(values, valid)
        largest = torch.where(valid, values, 0.0).abs().amax(1)
        of_part = _rounding_of(part.dtype) * abs(weight) * scale * largest
        rounding = rounding + torch.where(equal, 0.0, of_part)
    cancels = _spread(total, valid) <= rounding
    return torch.where(cancels[:, None], 0.0, total)
