"""Scores of evaluations: means with errors and intervals, and paired differences.

Videos share the difficulty of their prompt, votes share a pair of videos, and runs share a seed: each is a cluster.
Standard errors are clustered. Intervals are 95 % intervals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import special  # scipy.stats takes five times as long to import

from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json
from sage_fast.util.metrics import JUDGE_PART

Interval = tuple[float, float]

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
    missing = [key for key in ("iteration", "prompts", "seeds", "reward", "parts") if key not in scores]
    if missing:
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


def _standard_error(prompts: Sequence[str], values: np.ndarray) -> float | None:
    """Standard error of the mean, clustered by prompt; None with fewer than `MIN_PROMPTS`."""
    return math.sqrt(clustered_variance(values, prompts)) if len(set(prompts)) >= MIN_PROMPTS else None


def mean_and_margin(prompts: Sequence[str], values: Sequence[float | None]) -> tuple[float, float | None]:
    """Return the mean of the finite `values` and the half-width of its 95 % interval over prompts.

    The half-width is that of Student's t; None with fewer than `MIN_PROMPTS`.
    """
    kept = [(prompt, value) for prompt, value in zip(prompts, map(as_float, values)) if math.isfinite(value)]
    if not kept:
        return math.nan, None
    array, names = np.array([value for _, value in kept]), [prompt for prompt, _ in kept]
    return float(array.mean()), _margin(_standard_error(names, array), len(set(names)))


def _margin(standard_error: float | None, prompts: int) -> float | None:
    return None if standard_error is None else t_quantile(prompts) * standard_error


def means_by_prompt(prompts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return prompt -> mean of its finite values; prompts without one are skipped."""
    found: dict[str, list[float]] = {}
    for prompt, value in zip(prompts, values):
        if math.isfinite(value):
            found.setdefault(prompt, []).append(value)
    return {prompt: fmean(finite) for prompt, finite in found.items()}


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
        standard_error: standard error of the difference over prompts (seeds of a prompt are averaged first, since they
            share its difficulty); None with fewer than `MIN_PROMPTS`.
        pairs: number of pairs with finite scores; others are skipped.
        prompts: number of distinct prompts among them.
    """

    name: str
    before: float
    after: float
    difference: float
    standard_error: float | None
    pairs: int
    prompts: int

    @property
    def standard_errors(self) -> float | None:
        """The difference in units of its standard error; None if the error is unknown or zero."""
        return self.difference / self.standard_error if self.standard_error else None

    @property
    def margin(self) -> float | None:
        """Half-width of the 95 % interval of the difference (Student's t over prompts)."""
        return _margin(self.standard_error, self.prompts)

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
    return [_paired_row(name, before["prompts"], *pair) for name, pair in scores.items()]


def _paired_row(name: str, prompts: Sequence[str], before: Sequence[float], after: Sequence[float]) -> PairedRow:
    pairs = np.array([(as_float(x), as_float(y)) for x, y in zip(before, after)]).reshape(-1, 2)
    kept = np.isfinite(pairs).all(1)
    pairs = pairs[kept]
    names = [prompt for prompt, keep in zip(prompts, kept) if keep]
    if not names:
        return PairedRow(
            name=name, before=math.nan, after=math.nan, difference=math.nan, standard_error=None, pairs=0, prompts=0
        )
    difference = pairs[:, 1] - pairs[:, 0]
    return PairedRow(
        name=name,
        before=float(pairs[:, 0].mean()),
        after=float(pairs[:, 1].mean()),
        difference=float(difference.mean()),
        standard_error=_standard_error(names, difference),
        pairs=len(names),
        prompts=len(set(names)),
    )


def direction(difference: float, margin: float | None) -> str:
    """Return `up` or `down` if the interval of a difference excludes 0, else an empty string."""
    if margin is None or not abs(difference) > margin:
        return ""
    return "up" if difference > 0 else "down"


def hacking(directions: Mapping[str, str], watched: Iterable[str]) -> str | None:
    """Return a warning if the composite rose and a score that nothing trains on fell, both beyond their intervals.

    Args:
        directions: score -> its `direction`; `reward` is the composite.
        watched: names of the scores that nothing trains on.
    """
    fallen = [name for name in watched if directions.get(name) == "down"]
    if directions.get("reward") != "up" or not fallen:
        return None
    return f"reward rose while {', '.join(fallen)} fell: look at the videos (reward hacking)"


def judge_hacked(table: Sequence[PairedRow]) -> str | None:
    """Return the warning of `hacking` for the parts of `eval.judge`."""
    directions = {row.name: row.direction for row in table}
    return hacking(directions, [name for name in directions if name.startswith(JUDGE_PART)])


# -- text --------------------------------------------------------------------------------------------------------------


def format_number(value: float, digits: int, *, sign: bool = False) -> str:
    """Format with `digits` decimals, or with two significant digits if the number would round to zero."""
    kind = ".2g" if 0 < abs(value) < 10**-digits else f".{digits}f"
    return f"{value:{'+' * sign}{kind}}"
