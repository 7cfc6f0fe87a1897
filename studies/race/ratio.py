"""What runs gain, and the ratio of two gains, with intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from scipy.optimize import brentq

from studies.differences import Difference, difference_of_runs
from studies.runs import TrainedRun

Scores = Sequence[Mapping[str, float]]
"""Prompt -> value, for each seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of means, and the ends of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def gains(runs: Sequence[TrainedRun], part: str = "reward") -> list[dict[str, float]]:
    """Return prompt -> score at the end less score before training, for each run."""
    return [
        {prompt: score - run.before(part)[prompt] for prompt, score in run.score(part).items()}
        for run in runs
    ]


def scaled(scores: Scores, factor: float) -> list[dict[str, float]]:
    return [{prompt: factor * value for prompt, value in seed.items()} for seed in scores]


def mean_of(scores: Scores) -> Difference:
    """Return the mean and its interval, as a difference from 0."""
    return difference_of_runs(scores, scaled(scores, 0.0))


def ratio(first: Scores, second: Scores, *, comparisons: int = 1) -> Ratio | None:
    """Return mean(first) / mean(second) with the interval of Fieller ("Some problems in interval
    estimation", 1954).

    A ratio rho is in the interval if `first - rho second` may have mean 0: by `difference_of_runs`,
    so clustered by seed and by prompt, and with Student's t of seeds - 1 degrees of freedom. None
    where the interval of `second` holds 0: these ratios then have no end.

    Args:
        first, second: the same prompts; the seeds are the same, or independent draws in the same
            order.
        comparisons: number of ratios that are looked at; the level is corrected by Bonferroni's
            method.
    """

    def excess(rho: float) -> float:
        """How far `first - rho second` is from 0, in half-widths of its interval."""
        difference = difference_of_runs(first, scaled(second, rho)).widened(len(first), comparisons)
        return difference.value / max(difference.high - difference.value, 1e-12)

    divisor = mean_of(second)
    if divisor.widened(len(second), comparisons).low <= 0:
        return None
    value = mean_of(first).value / divisor.value
    low = _crossing(lambda step: excess(value - step) - 1)
    high = _crossing(lambda step: -excess(value + step) - 1)
    return Ratio(value=value, low=value - low, high=value + high)


def _crossing(function: Callable[[float], float]) -> float:
    """Return the step above 0 at which a function that begins below 0 crosses it."""
    step = 1.0
    while function(step) < 0:
        step *= 2
    return float(brentq(function, 0, step))
