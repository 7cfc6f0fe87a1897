"""Compare two evaluations of the same prompts and seeds pair by pair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sage_fast.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedRow:
    """One line of the before/after table.

    Attributes:
        name: `reward` (the composite) or a part.
        before: mean score before.
        after: mean score of the same prompts and seeds after.
        difference: mean of after - before.
        standard_error: of that mean, over prompts (seeds of a prompt are averaged first, since they share its
            difficulty), or over seeds where there is one prompt; None with a single pair.
        pairs: videos compared; pairs with a score that is not finite are left out.
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
        """Difference in units of its standard error; None where there is none, or it is zero."""
        return self.difference / self.standard_error if self.standard_error else None


def paired_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[PairedRow]:
    """Compare two evaluations (`eval/*.json`) of the same prompts and seeds: the composite first, then each part.

    Raises:
        UserError: prompts or seeds differ, so that there are no pairs.
    """
    for field in ("prompts", "seeds"):
        if before[field] != after[field]:
            raise UserError(f"the two evaluations have different {field}: they cannot be compared pair by pair")
    scores = {"reward": (before["reward"], after["reward"])}
    for part, values in before["parts"].items():
        if part in after["parts"]:
            scores[part] = (values, after["parts"][part])
    return [_paired_row(name, before["prompts"], *pair) for name, pair in scores.items()]


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
    """Standard error of the mean of `values`, clustered by prompt; None with fewer than two values.

    With K prompts of n_k values the cluster-robust form is sqrt(K / (K - 1) sum_k (n_k (mean_k - mean))^2) / n, which
    for equal n_k is the standard error of the prompts' means.
    """
    if len(values) < 2:
        return None
    names = sorted(set(prompts))
    if len(names) == 1:
        return float(values.std(ddof=1) / math.sqrt(len(values)))
    residual = values - values.mean()
    sums = np.array([sum(r for r, prompt in zip(residual, prompts) if prompt == name) for name in names])
    return float(math.sqrt(len(names) / (len(names) - 1) * (sums**2).sum()) / len(values))


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def format_paired_table(rows: Sequence[PairedRow]) -> str:
    """The comparison as aligned text for a terminal."""
    lines = [f"{'held-out':<12}{'before':>10}{'after':>10}{'difference':>22}{'std. errors':>13}"]
    for row in rows:
        error = f" ± {row.standard_error:.4f}" if row.standard_error is not None else " ± ?"
        ratio = f"{row.standard_errors:+.1f}" if row.standard_errors is not None else "-"
        lines.append(
            f"{row.name:<12}{row.before:>10.4f}{row.after:>10.4f}{f'{row.difference:+.4f}{error}':>22}{ratio:>13}"
        )
    if rows:
        lines.append(f"{rows[0].pairs} videos of {rows[0].prompts} prompts, same seeds")
    return "\n".join(lines)


def format_scores(scores: Mapping[str, Any]) -> str:
    """One evaluation (`eval/*.json`) as aligned text: mean and its standard error over prompts."""
    lines = []
    for name, values in {"reward": scores["reward"], **scores["parts"]}.items():
        mean, error = mean_and_error(scores["prompts"], values)
        lines.append(f"{name:<12}{mean:>10.4f}{f' ± {error:.4f}' if error is not None else ''}")
    lines.append(f"{len(scores['prompts'])} videos of {len(set(scores['prompts']))} prompts")
    return "\n".join(lines)


def mean_and_error(prompts: Sequence[str], values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of the finite `values`, and its standard error over prompts (None with fewer than two)."""
    kept = [(prompt, float(value)) for prompt, value in zip(prompts, values) if math.isfinite(_float(value))]
    if not kept:
        return math.nan, None
    array = np.array([value for _, value in kept])
    return float(array.mean()), _standard_error([prompt for prompt, _ in kept], array)
