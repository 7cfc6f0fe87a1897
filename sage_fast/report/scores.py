"""Scores of evaluations: means with errors and intervals, and paired differences.

Videos share the difficulty of their prompt, votes share a pair of videos, and runs share a seed: each is a cluster.
Standard errors are clustered; the bootstrap resamples prompts. Intervals are 95 % intervals.
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

RESAMPLES = 10_000
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


def widening(count: int, comparisons: int) -> float:
    """Factor on the half-width of an interval over `count` clusters: Bonferroni's correction for `comparisons`."""
    return float(special.stdtrit(count - 1, 1 - (1 - UPPER) / comparisons)) / t_quantile(count)


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """Bootstrap interval of the mean of K values, one per prompt; None for fewer than `MIN_PROMPTS`.

    The expanded percentile interval of Hesterberg, "What teachers should know about the bootstrap", 2015, section 3.2,
    from 10,000 resamples with a fixed seed. With few values the 2.5 and 97.5 percentiles cover too little, so wider
    ones are used. They are chosen such that a normal distribution of the bootstrap's width, sqrt((K - 1) / K) of the
    standard error, gives the interval of Student's t. With many prompts they approach 2.5 and 97.5.
    """
    count = len(values)
    if count < MIN_PROMPTS:
        return None
    array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    shares = np.full(count, 1 / count)
    blocks = [generator.multinomial(count, shares, size=500) @ array for _ in range(RESAMPLES // 500)]
    tail = special.ndtr(-math.sqrt(count / (count - 1)) * t_quantile(count))
    low, high = np.quantile(np.concatenate(blocks) / count, (tail, 1 - tail))
    return float(low), float(high)


def share_interval(prompts: Sequence[str], votes: Sequence[float]) -> Interval | None:
    """Wilson interval of the mean of `votes`, each 0, 1 or 1/2 (no preference).

    Votes on one prompt agree more than votes on different prompts, so they count for less. The effective number of
    votes is n divided by the design effect: the variance clustered by prompt over the binomial variance, at least 1.
    The degrees of freedom are those of the prompts (Korn and Graubard, "Confidence intervals for proportions with small
    expected number of positive counts estimated from survey data", 1998). If all votes are equal, each prompt counts
    as one vote. With one vote per prompt it is the plain Wilson interval. None if a prompt has several votes and there
    are fewer than `MIN_PROMPTS` prompts.
    """
    n, clusters = len(votes), len(set(prompts))
    share = sum(votes) / n
    effective, quantile = float(n), special.ndtri(UPPER)
    if n > clusters:
        if clusters < MIN_PROMPTS:
            return None
        binomial = share * (1 - share) / n
        effective = n / max(1.0, clustered_variance(votes, prompts) / binomial) if binomial else float(clusters)
        quantile = t_quantile(clusters)
    z2 = float(quantile) ** 2
    middle = (share + z2 / (2 * effective)) / (1 + z2 / effective)
    half = math.sqrt(share * (1 - share) * z2 / effective + (z2 / (2 * effective)) ** 2) / (1 + z2 / effective)
    return max(0.0, middle - half), min(1.0, middle + half)


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
        if self.margin is None or abs(self.difference) <= self.margin:
            return ""
        return "up" if self.difference > 0 else "down"


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


def hacking(table: Sequence[PairedRow]) -> str | None:
    """Return a warning if the composite rose and a part of `eval.judge` fell, both by more than 2 standard errors."""
    fallen = [row.name for row in table if row.name.startswith(JUDGE_PART) and (row.standard_errors or 0) < -2]
    if not fallen or (table[0].standard_errors or 0) <= 2:
        return None
    return f"reward rose while the judge fell ({', '.join(fallen)}): look at the videos (reward hacking)"


# -- differences of runs over seeds and prompts ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between the mean scores of two groups of runs.

    Attributes:
        value: first minus second.
        low, high: 95 % interval.
        p: two-sided p-value of no difference, uncorrected.
        corrected: p-value after Holm's correction for multiple differences; equals `p` until `holm` sets it.
    """

    value: float
    low: float
    high: float
    p: float
    corrected: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference_of_runs(first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]) -> Difference:
    """Compare runs with the same seeds and held-out prompts, hence the same evaluation noise.

    Both prompts and seeds are random samples, so errors are clustered two ways: the variance clustered by seed, plus
    that clustered by prompt, minus that of the (seed, prompt) cells, but at least either of the first two (Cameron,
    Gelbach and Miller, "Robust inference with multiway clustering", 2011). Student's t has seeds - 1 degrees of
    freedom.

    Args:
        first, second: prompt -> score, for each seed.
    """
    cells = {
        (seed, prompt): score - theirs[prompt]
        for seed, (ours, theirs) in enumerate(zip(first, second, strict=True))
        for prompt, score in ours.items()
    }
    values = np.array(list(cells.values()))
    by_seed = clustered_variance(values, [seed for seed, _ in cells])
    by_prompt = clustered_variance(values, [prompt for _, prompt in cells])
    by_cell = clustered_variance(values, [*cells])
    error = math.sqrt(max(by_seed + by_prompt - by_cell, by_seed, by_prompt))
    value, half = float(values.mean()), t_quantile(len(first)) * error
    p = 2 * float(special.stdtr(len(first) - 1, -abs(value) / error)) if error > 0 else float(value == 0)
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
    return fmean(values), t_quantile(len(values)) * math.sqrt(clustered_variance(values, range(len(values))))


# -- text --------------------------------------------------------------------------------------------------------------


def format_number(value: float, digits: int, *, sign: bool = False) -> str:
    """Format with `digits` decimals, or with two significant digits if the number would round to zero."""
    kind = ".2g" if 0 < abs(value) < 10**-digits else f".{digits}f"
    return f"{value:{'+' * sign}{kind}}"


def _name_width(names: Iterable[str]) -> int:
    return max([12, *(len(name) + 2 for name in names)])


def format_paired_table(rows: Sequence[PairedRow]) -> str:
    """Format the comparison as aligned text for a terminal."""
    judged = any(row.standard_error is not None for row in rows)
    width = 22 if judged else 12
    left = _name_width(row.name for row in rows)
    lines = [
        f"{'held-out':<{left}}{'before':>10}{'after':>10}{'difference ± 95 %' if judged else 'difference':>{width}}"
        + f"{'std. errors':>13}" * judged
    ]
    for row in rows:
        difference = format_number(row.difference, 4, sign=True)
        if row.margin is not None:
            difference += f" ± {format_number(row.margin, 4)}"
        before, after = format_number(row.before, 4), format_number(row.after, 4)
        line = f"{row.name:<{left}}{before:>10}{after:>10}{difference:>{width}}"
        ratio = f"{row.standard_errors:+.1f}" if row.standard_errors is not None else "-"
        lines.append(line + f"{ratio:>13}" * judged)
    if rows:
        why = "" if judged else f"; {TOO_FEW}"
        lines.append(f"{rows[0].pairs} videos of {rows[0].prompts} prompts, same seeds{why}")
    if verdict := hacking(rows):
        lines.append(verdict)
    return "\n".join(lines)


def format_scores(scores: Mapping[str, Any]) -> str:
    """Format one evaluation (`eval/*.json`) as aligned text: means with 95 % intervals over prompts."""
    lines, judged = [], False
    left = _name_width(scores["parts"])
    for name, values in columns_of(scores).items():
        mean, margin = mean_and_margin(scores["prompts"], values)
        judged = judged or margin is not None
        width = f" ± {format_number(margin, 4)}" if margin is not None else ""
        lines.append(f"{name:<{left}}{format_number(mean, 4):>10}{width}")
    why = "; ± is a 95 % interval" if judged else f"; {TOO_FEW}"
    count, scored = len(scores["prompts"]), sum(math.isfinite(as_float(value)) for value in scores["reward"])
    counted = f"{scored} of {count}" if scored < count else f"{count}"
    lines.append(f"{counted} videos of {len(set(scores['prompts']))} prompts{why}")
    return "\n".join(lines)
