"""Scores of evaluations: means with errors and intervals.

Videos share the difficulty of their prompt, votes share a pair of videos, and runs share a seed:
each is a cluster. Standard errors are clustered. Intervals are 95 % intervals.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special  # scipy.stats takes five times as long to import

MIN_PROMPTS = 5
"""Fewest prompts for a standard error. Estimated from two prompts it is itself off by more than
half, so "2 standard errors" would mean nothing."""

TOO_FEW = f"no interval from fewer than {MIN_PROMPTS} prompts"

UPPER = 0.975
"""Upper quantile of a 95 % interval."""


def columns_of(scores: Mapping[str, Any]) -> dict[str, Sequence[float | None]]:
    """Return name -> one score per video: `reward` (the composite), then its parts and the
    judge's."""
    return {"reward": scores["reward"], **scores["parts"]}


def as_float(value: object) -> float:
    """Return a score as a float; NaN if it is null."""
    return float(value) if isinstance(value, int | float) else math.nan


def composite(scores: Mapping[str, Any], weights: Mapping[str, float]) -> Sequence[float]:
    """Return the composite under `weights`, recomputed from the parts if these are others; NaN if a
    part is missing."""
    if not weights or (scores["weights"] or weights) == weights:
        return scores["reward"]
    count = len(scores["reward"])
    unknown = [math.nan for _ in range(count)]
    totals = [0.0 for _ in range(count)]
    for part, weight in weights.items():
        if weight == 0:  # a part without a weight may be missing
            continue
        for i, value in enumerate(scores["parts"].get(part, unknown)):
            totals[i] += weight * as_float(value)
    return totals


# -- means, errors, intervals ----------------------------------------------------------------------


def clustered_variance(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]) -> float:
    """Cluster-robust variance of the mean of `values`, given one cluster label per value; at least
    two clusters.

    With K clusters of n_k values it is K / (K - 1) sum_k (n_k (mean_k - mean))^2 / n^2. For equal
    n_k this is the squared standard error of the cluster means.
    """
    array = np.asarray(values, dtype=np.float64)
    sums: dict[Hashable, float] = {}
    for cluster, residual in zip(clusters, array - array.mean(), strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + residual
    count = len(sums)
    squares = np.square(list(sums.values())).sum()
    return float(count / (count - 1) * squares / len(array) ** 2)


def mean_and_margin(
    prompts: Sequence[str], values: Sequence[float | None], comparisons: int = 1
) -> tuple[float, float | None]:
    """Return the mean of the finite `values` and the half-width of its 95 % interval over prompts.

    The half-width is that of Student's t; None with fewer than `MIN_PROMPTS`. `comparisons` widens
    it as `t_quantile` does.
    """
    names: list[str] = []
    finite: list[float] = []
    for prompt, value in zip(prompts, values):
        number = as_float(value)
        if math.isfinite(number):
            names.append(prompt)
            finite.append(number)
    if not finite:
        return math.nan, None

    array = np.array(finite)
    mean = float(array.mean())
    count = len(set(names))
    if count < MIN_PROMPTS:
        return mean, None
    error = math.sqrt(clustered_variance(array, names))
    return mean, t_quantile(count, comparisons) * error


def t_quantile(count: int, comparisons: int = 1) -> float:
    """Upper 97.5 % quantile of Student's t for a mean over `count` clusters.

    With several `comparisons` the level is Bonferroni's: all their intervals hold together in 95 %
    of cases.
    """
    upper = UPPER if comparisons == 1 else 1 - (1 - UPPER) / comparisons
    return float(special.stdtrit(count - 1, upper))


def format_number(value: float, digits: int, *, sign: bool = False) -> str:
    """Format with `digits` decimals, or with two significant digits if the number would round to
    zero."""
    kind = ".2g" if 0 < abs(value) < 10**-digits else f".{digits}f"
    plus = "+" if sign else ""
    return f"{value:{plus}{kind}}"
