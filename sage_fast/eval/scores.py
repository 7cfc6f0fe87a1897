"""Scores of evaluations: means with errors and intervals, and paired differences.

Videos share the difficulty of their prompt, votes share a pair of videos, and runs share a seed: each is a cluster.
Standard errors are clustered. Intervals are 95 % intervals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special  # scipy.stats takes five times as long to import

from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json

MIN_PROMPTS = 5
"""Fewest prompts for a standard error. Estimated from two prompts it is itself off by more than half, so "2 standard
errors" would mean nothing."""

TOO_FEW = f"no interval from fewer than {MIN_PROMPTS} prompts"

LARGEST = float(np.finfo(np.float32).max)
"""Largest score: scores are float32."""

UPPER = 0.975
"""Upper quantile of a 95 % interval."""


def read_scores(file: Path) -> dict[str, Any]:
    """Read an evaluation, `eval/*.json`.

    Raises:
        UserError: the file is cut off or is no evaluation.
    """
    scores = read_json(file)
    if missing := [key for key in ("iteration", "prompts", "seeds", "reward", "parts") if key not in scores]:
        raise UserError(f"{file}: {missing[0]!r} is missing")
    parts, weights = scores["parts"], scores.get("weights", {})
    if not isinstance(parts, dict) or not isinstance(weights, dict) or not isinstance(scores["prompts"], list):
        raise UserError(f"{file}: expected lists of prompts, seeds and rewards, and objects of parts and weights")
    kinds: dict[str, tuple[Any, Any]] = {
        "iteration": ([scores["iteration"]], int),
        "prompts": (scores["prompts"], str),
        "seeds": (scores["seeds"], int),
        "reward": (scores["reward"], float | int | None),
        **{part: (values, float | int | None) for part, values in parts.items()},
        "weights": (list(weights.values()), float | int),
    }
    for name, (values, kind) in kinds.items():
        sound = isinstance(values, list) and all(isinstance(value, kind) for value in values)
        if sound and name not in ("prompts", "seeds"):  # within float32
            sound = not any(value is not None and LARGEST < abs(value) < math.inf for value in values)
        if not sound:
            raise UserError(f"{file}: {name!r} does not hold what it should")
        if name not in ("iteration", "weights") and len(values) != len(scores["prompts"]):
            raise UserError(f"{file}: {name!r} has {len(values)} values for {len(scores['prompts'])} videos")
    return scores


def read_evaluations(run: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Read all evaluations of a run folder.

    Returns:
        Name (`before`, `iteration-000010`, `after`) -> scores, and a note on each file that is damaged and left out.
    """
    found, notes = {}, []
    for file in sorted((run / "eval").glob("*.json")):
        try:
            found[file.stem] = read_scores(file)
        except UserError as error:
            notes.append(f"left out, since it is damaged: {error}")
    return found, notes


def columns_of(scores: Mapping[str, Any]) -> dict[str, Sequence[float | None]]:
    """Return name -> one score per video: `reward` (the composite), then its parts and the judge's."""
    return {"reward": scores["reward"], **scores["parts"]}


def as_float(value: object) -> float:
    """Return a score as a float; NaN if it is null."""
    return float(value) if isinstance(value, int | float) else math.nan


def composite(scores: Mapping[str, Any], weights: Mapping[str, float] | None) -> Sequence[float]:
    """Return the composite under `weights`, recomputed from the parts if needed; NaN if a part is missing."""
    if weights is None or scores.get("weights", weights) == weights:
        return scores.get("reward", ())
    parts = [(weight, scores["parts"].get(part)) for part, weight in weights.items() if weight != 0]
    return [
        sum(weight * as_float(values[i]) if values is not None else math.nan for weight, values in parts)
        for i in range(len(scores["reward"]))
    ]


# -- means, errors, intervals ------------------------------------------------------------------------------------------


def clustered_variance(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]) -> float:
    """Cluster-robust variance of the mean of `values`, given one cluster label per value; at least two clusters.

    With K clusters of n_k values it is K / (K - 1) sum_k (n_k (mean_k - mean))^2 / n^2. For equal n_k this is the
    squared standard error of the cluster means.
    """
    array = np.asarray(values, dtype=np.float64)
    sums: dict[Hashable, float] = {}
    for cluster, residual in zip(clusters, array - array.mean(), strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + residual
    count = len(sums)
    return float(count / (count - 1) * np.square(list(sums.values())).sum() / len(array) ** 2)


def mean_and_margin(prompts: Sequence[str], values: Sequence[float | None]) -> tuple[float, float | None]:
    """Return the mean of the finite `values` and the half-width of its 95 % interval over prompts.

    The half-width is that of Student's t; None with fewer than `MIN_PROMPTS`.
    """
    kept = [(prompt, value) for prompt, value in zip(prompts, map(as_float, values)) if math.isfinite(value)]
    if not kept:
        return math.nan, None
    array, names = np.array([value for _, value in kept]), [prompt for prompt, _ in kept]
    count = len(set(names))
    margin = t_quantile(count) * math.sqrt(clustered_variance(array, names)) if count >= MIN_PROMPTS else None
    return float(array.mean()), margin


def t_quantile(count: int) -> float:
    """Upper 97.5 % quantile of Student's t for a mean over `count` clusters."""
    return float(special.stdtrit(count - 1, UPPER))


# -- paired differences of two evaluations -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedRow:
    """One line of the before/after table.

    Attributes:
        name: `reward` (the composite) or a part.
        before: mean score before.
        after: mean score after, on the same prompts and seeds.
        difference: mean of after - before.
        margin: half-width of the 95 % interval of the difference over prompts; None with fewer than `MIN_PROMPTS`.
        pairs: number of pairs with finite scores; others are skipped.
        prompts: number of distinct prompts among them.
    """

    name: str
    before: float
    after: float
    difference: float
    margin: float | None
    pairs: int
    prompts: int

    @property
    def direction(self) -> str:
        """`up` or `down` if the interval excludes 0, else an empty string."""
        return direction(self.difference, self.margin)


def paired_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[PairedRow]:
    """Compare two evaluations (`eval/*.json`) of the same prompts and seeds: the composite first, then each part.

    Both composites use the weights of `after`, since a resume may have changed the weights.

    Raises:
        UserError: the prompts or seeds differ.
    """
    for field in ("prompts", "seeds"):
        if before[field] != after[field]:
            raise UserError(f"the two evaluations have different {field}: they cannot be compared pair by pair")
    scores = {"reward": (composite(before, after.get("weights")), after["reward"])}
    for part, values in before["parts"].items():
        if part in after["parts"]:
            scores[part] = (values, after["parts"][part])
    return [paired_row(name, before["prompts"], *pair) for name, pair in scores.items()]


def paired_row(
    name: str, prompts: Sequence[str], before: Sequence[float | None], after: Sequence[float | None]
) -> PairedRow:
    """Compare the scores of pairs of videos; a pair without both scores does not count."""
    scores = zip(prompts, map(as_float, before), map(as_float, after), strict=True)
    kept = [(prompt, x, y, y - x) for prompt, x, y in scores if math.isfinite(y - x)]
    names, *columns = zip(*kept) if kept else ((), (), (), ())
    (x, _), (y, _), (difference, margin) = (mean_and_margin(names, column) for column in columns)
    return PairedRow(
        name=name, before=x, after=y, difference=difference, margin=margin, pairs=len(kept), prompts=len(set(names))
    )


def direction(difference: float, margin: float | None) -> str:
    """Return `up` or `down` if the interval of a difference excludes 0, else an empty string."""
    if margin is None or not abs(difference) > margin:
        return ""
    return "up" if difference > 0 else "down"


# -- text --------------------------------------------------------------------------------------------------------------


def format_number(value: float, digits: int, *, sign: bool = False) -> str:
    """Format with `digits` decimals, or with two significant digits if the number would round to zero."""
    kind = ".2g" if 0 < abs(value) < 10**-digits else f".{digits}f"
    return f"{value:{'+' * sign}{kind}}"
