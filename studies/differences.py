"""Differences of groups of runs, over their seeds and prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean

import numpy as np
from scipy import special

from sage_fast.eval.scores import clustered_variance, t_quantile


def widening(count: int, comparisons: int) -> float:
    """Factor on the half-width of an interval over `count` clusters: Bonferroni's correction for
    `comparisons`."""
    return t_quantile(count, comparisons) / t_quantile(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between the mean scores of two groups of runs.

    Attributes:
        value: first minus second.
        low, high: 95 % interval.
        p: two-sided p-value of no difference, uncorrected.
        corrected: p-value after Holm's correction for multiple differences; equals `p` until `holm`
            sets it.
    """

    value: float
    low: float
    high: float
    p: float
    corrected: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def interval(self) -> tuple[float, float, float]:
        """Value, low and high, for `draw_intervals`."""
        return self.value, self.low, self.high

    def widened(self, count: int, comparisons: int) -> Difference:
        """Return it with its interval, over `count` seeds, corrected by Bonferroni's method for
        `comparisons`."""
        half = widening(count, comparisons) * (self.high - self.value)
        return dataclasses.replace(self, low=self.value - half, high=self.value + half)


def two_way_variance(
    values: Sequence[float] | np.ndarray, first: Sequence[Hashable], second: Sequence[Hashable]
) -> float:
    """Variance of the mean of values that share two kinds of clusters, such as seeds and prompts.

    It is the variance clustered by the first, plus that by the second, minus that by both, but at
    least either of the first two (Cameron, Gelbach and Miller, "Robust inference with multiway
    clustering", 2011).

    Args:
        values: a value each.
        first, second: label of the cluster of each value; at least two of each.
    """
    by_first, by_second = clustered_variance(values, first), clustered_variance(values, second)
    by_both = clustered_variance(values, list(zip(first, second, strict=True)))
    return max(by_first + by_second - by_both, by_first, by_second)


def difference_of_runs(
    first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]
) -> Difference:
    """Compare runs with the same seeds and held-out prompts, hence the same evaluation noise.

    Both prompts and seeds are random samples, so errors are clustered by both, as
    `two_way_variance` does. Student's t has seeds - 1 degrees of freedom.

    Args:
        first, second: prompt -> score, for each seed.
    """
    cells = {
        (seed, prompt): score - theirs[prompt]
        for seed, (ours, theirs) in enumerate(zip(first, second, strict=True))
        for prompt, score in ours.items()
    }
    values = np.array(list(cells.values()))
    error = math.sqrt(
        two_way_variance(values, [seed for seed, _ in cells], [prompt for _, prompt in cells])
    )
    value, half = float(values.mean()), t_quantile(len(first)) * error
    p = (
        2 * float(special.stdtr(len(first) - 1, -abs(value) / error))
        if error > 0
        else float(value == 0)
    )
    return Difference(value=value, low=value - half, high=value + half, p=p, corrected=p)


def holm(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """Set `corrected` (Holm, "A simple sequentially rejective multiple test procedure", 1979)."""
    corrected, largest = dict(differences), 0.0
    for rank, name in enumerate(sorted(differences, key=lambda name: differences[name].p)):
        largest = max(largest, min((len(differences) - rank) * differences[name].p, 1.0))
        corrected[name] = dataclasses.replace(differences[name], corrected=largest)
    return corrected


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values and the half-width of its interval by Student's t."""
    return fmean(values), t_quantile(len(values)) * math.sqrt(
        clustered_variance(values, range(len(values)))
    )


def means_by_prompt(prompts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return prompt -> mean of its finite values; prompts without one are skipped."""
    found: dict[str, list[float]] = {}
    for prompt, value in zip(prompts, values):
        if math.isfinite(value):
            found.setdefault(prompt, []).append(value)
    return {prompt: fmean(finite) for prompt, finite in found.items()}
