"""Compare two evaluations of the same prompts and seeds pair by pair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_fast.errors import UserError
from sage_fast.files import read_json
from sage_fast.metrics import JUDGE_PART

MIN_PROMPTS = 5
"""A standard error needs that many prompts: one from two of them is itself wrong by more than half, and "2 standard
errors" means nothing then."""

LARGEST = float(np.finfo(np.float32).max)
"""Of a score, which is a float32."""

TOO_FEW = f"no standard error from fewer than {MIN_PROMPTS} prompts"


def read_scores(file: Path) -> dict[str, Any]:
    """An evaluation, `eval/*.json`.

    Raises:
        UserError: it is cut off, or holds something else.
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
        if sound and name not in ("prompts", "seeds"):  # float32 each
            sound = not any(value is not None and LARGEST < abs(value) < math.inf for value in values)
        if not sound:
            raise UserError(f"{file}: {name!r} does not hold what it should")
        if name not in ("iteration", "weights") and len(values) != len(scores["prompts"]):
            raise UserError(f"{file}: {name!r} has {len(values)} values for {len(scores['prompts'])} videos")
    return scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedRow:
    """One line of the before/after table.

    Attributes:
        name: `reward` (the composite) or a part.
        before: mean score before.
        after: mean score of the same prompts and seeds after.
        difference: mean of after - before.
        standard_error: of that mean, over prompts (seeds of a prompt are averaged first, since they share its
            difficulty); None with fewer than `MIN_PROMPTS`.
        pairs: videos compared; pairs with a score that is not finite are skipped.
        prompts: distinct prompts among them.
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
        """Difference in units of its standard error; None without one, or if it is zero."""
        return self.difference / self.standard_error if self.standard_error else None


def paired_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[PairedRow]:
    """Compare two evaluations (`eval/*.json`) of the same prompts and seeds: the composite first, then each part.

    Both composites have the weights of `after`, which a resume may have changed.

    Raises:
        UserError: prompts or seeds differ, so that there are no pairs.
    """
    for field in ("prompts", "seeds"):
        if before[field] != after[field]:
            raise UserError(f"the two evaluations have different {field}: they cannot be compared pair by pair")
    scores = {"reward": (_composite(before, after.get("weights")), after["reward"])}
    for part, values in before["parts"].items():
        if part in after["parts"]:
            scores[part] = (values, after["parts"][part])
    return [_paired_row(name, before["prompts"], *pair) for name, pair in scores.items()]


def shown_pairs(
    before: Mapping[str, Any], after: Mapping[str, Any], available: Iterable[int], count: int
) -> dict[int, str]:
    """Which videos stand for a comparison: the largest gains of the composite, the medians, and the largest losses.

    A third each (one of each of three, the median of one), so that a good run cannot hide what it made worse.

    Args:
        before, after: two evaluations; one without scores counts as unknown.
        available: numbers of the videos that exist on both sides.
        count: videos to choose.

    Returns:
        Number -> why, from the largest gain to the largest loss; only the gain if some videos are not there any more
        (of a run that was finished before), and the first `count`, without why, if no gain is known.
    """
    rewards = _composite(before, after.get("weights")), after.get("reward", ())
    gains = {i: _float(y) - _float(x) for i, (x, y) in enumerate(zip(*rewards))}
    return extremes(gains, available, count)


def extremes(gains: Mapping[Any, float], available: Iterable[Any], count: int) -> dict[Any, str]:
    """`shown_pairs` by the gains themselves; the keys of the videos can be sorted."""
    available = set(available)
    ordered = sorted((i for i in available if math.isfinite(gains.get(i, math.nan))), key=lambda i: (-gains[i], i))
    if not ordered:
        return dict.fromkeys(sorted(available)[:count], "")
    count = min(count, len(ordered))
    ends = (count + 1) // 3
    first = (len(ordered) - count) // 2 + ends
    shown = {i: "largest gain" if gains[i] > 0 else "smallest loss" for i in ordered[:ends]}
    shown |= dict.fromkeys(ordered[first : first + count - 2 * ends], "median")
    shown |= {i: "largest loss" if gains[i] < 0 else "smallest gain" for i in ordered[len(ordered) - ends :]}
    of_all = available >= gains.keys()
    return {i: f"{why} {gains[i]:+.2f}" if of_all else f"{gains[i]:+.2f}" for i, why in shown.items()}


def _composite(scores: Mapping[str, Any], weights: Mapping[str, float] | None) -> Sequence[float]:
    """The composite reward under `weights`, from the parts if they were others; NaN if a part is missing."""
    if weights is None or scores.get("weights", weights) == weights:
        return scores.get("reward", ())
    parts = [(weight, scores["parts"].get(part)) for part, weight in weights.items() if weight != 0]
    return [
        sum(weight * _float(values[i]) if values is not None else math.nan for weight, values in parts)
        for i in range(len(scores["reward"]))
    ]


def scores_of(scores: Mapping[str, Any], index: int) -> list[tuple[str, float]]:
    """Composite and judge of one video of an evaluation, as far as they are known."""
    judge = {name: values for name, values in scores.get("parts", {}).items() if name.startswith(JUDGE_PART)}
    named = {"reward": scores.get("reward", ()), **judge}
    return [(name.removeprefix(JUDGE_PART), _float(v[index])) for name, v in named.items() if index < len(v)]


def hacking(table: Sequence[PairedRow]) -> str | None:
    """A verdict if the composite rose and a part of `eval.judge` fell, both by more than 2 standard errors."""
    fallen = [row.name for row in table if row.name.startswith(JUDGE_PART) and (row.standard_errors or 0) < -2]
    if not fallen or (table[0].standard_errors or 0) <= 2:
        return None
    return f"reward rose while the judge fell ({', '.join(fallen)}): look at the videos (reward hacking)"


def _paired_row(name: str, prompts: Sequence[str], before: Sequence[float], after: Sequence[float]) -> PairedRow:
    pairs = np.array([(_float(x), _float(y)) for x, y in zip(before, after)]).reshape(-1, 2)
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


def _standard_error(prompts: Sequence[str], values: np.ndarray) -> float | None:
    """Standard error of the mean of `values`, clustered by prompt; None with fewer than `MIN_PROMPTS`.

    With K prompts of n_k values the cluster-robust form is sqrt(K / (K - 1) sum_k (n_k (mean_k - mean))^2) / n, which
    for equal n_k is the standard error of the prompts' means.
    """
    names = sorted(set(prompts))
    if len(names) < MIN_PROMPTS:
        return None
    residual = values - values.mean()
    sums = np.array([sum(r for r, prompt in zip(residual, prompts) if prompt == name) for name in names])
    return float(math.sqrt(len(names) / (len(names) - 1) * (sums**2).sum()) / len(values))


def format_number(value: float, digits: int, *, sign: bool = False) -> str:
    """`digits` decimals, or two significant digits of a number below the last of them, which would read as zero."""
    kind = ".2g" if 0 < abs(value) < 10**-digits else f".{digits}f"
    return f"{value:{'+' * sign}{kind}}"


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _name_width(names: Iterable[str]) -> int:
    return max([12, *(len(name) + 2 for name in names)])


def format_paired_table(rows: Sequence[PairedRow]) -> str:
    """The comparison as aligned text for a terminal."""
    judged = any(row.standard_error is not None for row in rows)
    width = 22 if judged else 12
    left = _name_width(row.name for row in rows)
    lines = [
        f"{'held-out':<{left}}{'before':>10}{'after':>10}{'difference':>{width}}" + f"{'std. errors':>13}" * judged
    ]
    for row in rows:
        difference = format_number(row.difference, 4, sign=True)
        if row.standard_error is not None:
            difference += f" ± {format_number(row.standard_error, 4)}"
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
    """One evaluation (`eval/*.json`) as aligned text: mean and its standard error over prompts."""
    lines, judged = [], False
    left = _name_width(scores["parts"])
    for name, values in {"reward": scores["reward"], **scores["parts"]}.items():
        mean, error = mean_and_error(scores["prompts"], values)
        judged = judged or error is not None
        lines.append(
            f"{name:<{left}}{format_number(mean, 4):>10}{f' ± {format_number(error, 4)}' if error is not None else ''}"
        )
    why = "" if judged else f"; {TOO_FEW}"
    count, scored = len(scores["prompts"]), sum(math.isfinite(_float(value)) for value in scores["reward"])
    counted = f"{scored} of {count}" if scored < count else f"{count}"
    lines.append(f"{counted} videos of {len(set(scores['prompts']))} prompts{why}")
    return "\n".join(lines)


def mean_and_error(prompts: Sequence[str], values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of the finite `values`, and its standard error over prompts (None with fewer than `MIN_PROMPTS`)."""
    kept = [(prompt, float(value)) for prompt, value in zip(prompts, values) if math.isfinite(_float(value))]
    if not kept:
        return math.nan, None
    array = np.array([value for _, value in kept])
    return float(array.mean()), _standard_error([prompt for prompt, _ in kept], array)
