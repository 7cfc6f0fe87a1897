"""Differences between variants, paired over prompts and seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from studies.paper.training import TrainedRun

SMALLEST = 0.05
"""The smallest difference of the composite that matters here: about a tenth of what the whole demo gains."""
LEVEL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Of the mean held-out score of two variants.

    Attributes:
        value: first minus second.
        low, high: 95 % interval.
        p: of no difference, two-sided, not corrected.
        corrected: p by Holm's method over the differences that a claim looks at; `p` before that.
    """

    value: float
    low: float
    high: float
    p: float
    corrected: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired(first: Sequence[TrainedRun], second: Sequence[TrainedRun], part: str = "reward") -> Difference:
    """Both have the same seeds and held-out prompts, and so the same noise in evaluation.

    Prompts and seeds are both drawn from more of their kind, and each cell is a difference: the variance is that
    clustered by seed plus that clustered by prompt minus that of the cells, and not less than either (Cameron,
    Gelbach and Miller, "Robust inference with multiway clustering", 2011). Student's t has one degree of freedom less
    than there are seeds.
    """
    cells = np.array(
        [[a[prompt] - b[prompt] for prompt in a] for a, b in zip(_scores(first, part), _scores(second, part))]
    )
    seeds, prompts = cells.shape
    residual = cells - cells.mean()
    of_seeds = residual.mean(1).var(ddof=1) / seeds
    of_prompts = residual.mean(0).var(ddof=1) / prompts
    of_cells = residual.var(ddof=1) / cells.size
    error = max(of_seeds + of_prompts - of_cells, of_seeds, of_prompts) ** 0.5
    value, half = float(cells.mean()), float(stats.t.ppf(1 - LEVEL / 2, seeds - 1) * error)
    p = float(2 * stats.t.sf(abs(value) / error, seeds - 1)) if error > 0 else float(value == 0)
    return Difference(value=value, low=value - half, high=value + half, p=p, corrected=p)


def holm(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """The same with `corrected` set (Holm, "A simple sequentially rejective multiple test procedure", 1979)."""
    corrected, largest = dict(differences), 0.0
    for rank, name in enumerate(sorted(differences, key=lambda name: differences[name].p)):
        largest = max(largest, min((len(differences) - rank) * differences[name].p, 1.0))
        corrected[name] = dataclasses.replace(differences[name], corrected=largest)
    return corrected


def mean_interval(runs: Sequence[TrainedRun], part: str = "reward") -> tuple[float, float]:
    """Mean over the seeds of the held-out score, and half the width of its 95 % interval over the seeds."""
    values = np.array([np.mean(list(of.values())) for of in _scores(runs, part)])
    return float(values.mean()), float(stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * stats.sem(values))


def _scores(runs: Sequence[TrainedRun], part: str) -> list[dict[str, float]]:
    return [run.score(part) for run in runs]
