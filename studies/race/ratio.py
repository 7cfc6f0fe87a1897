"""Ratio of what two groups of runs gain for their compute, with an interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from studies.differences import Difference, difference_of_runs, widening
from studies.runs import TrainedRun

Scores = Sequence[Mapping[str, float]]
"""Prompt -> value, for each seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of means, and the ends of its interval: infinite where the denominator may be 0."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def gains(runs: Sequence[TrainedRun], part: str = "reward") -> list[dict[str, float]]:
    """Return prompt -> score at the end less score before training, for each run."""
    return [{prompt: score - run.before(part)[prompt] for prompt, score in run.score(part).items()} for run in runs]


def scaled(scores: Scores, factor: float) -> list[dict[str, float]]:
    return [{prompt: factor * value for prompt, value in seed.items()} for seed in scores]


def mean_of(scores: Scores) -> Difference:
    """Return the mean and its interval, as a difference from 0."""
    return difference_of_runs(scores, scaled(scores, 0.0))


def ratio(first: Scores, second: Scores, *, comparisons: int = 1) -> Ratio:
    """Return mean(first) / mean(second) with the interval of Fieller ("Some problems in interval estimation", 1954).

    A ratio rho is in the interval if `first - rho second` may have mean 0: by `difference_of_runs`, so clustered by
    seed and by prompt, and with Student's t of seeds - 1 degrees of freedom.

    Args:
        first, second: the same prompts; the seeds are the same, or independent draws in the same order.
        comparisons: number of ratios that are looked at; the level is corrected by Bonferroni's method.
    """
    wider = widening(len(first), comparisons)

    def excess(rho: float) -> float:
        """How far `first - rho second` is from 0, in half-widths of its interval."""
        d = difference_of_runs(first, scaled(second, rho))
        half = wider * (d.high - d.value)
        return d.value / half if half > 0 else math.copysign(math.inf, d.value)

    value = mean_of(first).value / mean_of(second).value
    low = _crossing(lambda step: excess(value - step) - 1)
    high = _crossing(lambda step: -excess(value + step) - 1)
    return Ratio(value=value, low=value - low, high=value + high)


def _crossing(function: Callable[[float], float]) -> float:
    """Return the step above 0 at which a function that begins below 0 crosses it; infinity if it does not by 1e3."""
    step = 1e-3
    while function(step) < 0:
        step *= 1.1
        if step > 1e3:
            return math.inf
    low, high = step / 1.1, step
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return high
