"""Choose the videos that represent a comparison, and the scores shown with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from sage_fast.eval.scores import as_float, composite
from sage_fast.util.metrics import JUDGE_PART


def shown_pairs(
    before: Mapping[str, Any], after: Mapping[str, Any], available: Iterable[int], count: int
) -> dict[int, str]:
    """Choose videos for a comparison: a third each of largest gains, medians and largest losses of the composite.

    This way a good run cannot hide what got worse. Of three videos, one is of each kind; a single one is the median.

    Args:
        before, after: two evaluations; missing scores count as unknown.
        available: numbers of the videos that exist on both sides.
        count: number of videos to choose.

    Returns:
        Number -> reason, from the largest gain to the largest loss. The reason is only the gain if some videos have
        been deleted (the run had finished before). If no gain is known: the first `count` videos, with empty reasons.
    """
    rewards = composite(before, after.get("weights")), after.get("reward", ())
    gains = {i: as_float(y) - as_float(x) for i, (x, y) in enumerate(zip(*rewards))}
    return extremes(gains, available, count)


def extremes(gains: Mapping[Any, float], available: Iterable[Any], count: int) -> dict[Any, str]:
    """Choose as `shown_pairs` does, from gains by video key; the keys must be sortable."""
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
    none_deleted = available >= gains.keys()
    return {i: f"{why} {gains[i]:+.2f}" if none_deleted else f"{gains[i]:+.2f}" for i, why in shown.items()}


def scores_of(scores: Mapping[str, Any], index: int) -> list[tuple[str, float]]:
    """Return the known composite and judge scores of one video of an evaluation."""
    judge = {name: values for name, values in scores.get("parts", {}).items() if name.startswith(JUDGE_PART)}
    named = {"reward": scores.get("reward", ()), **judge}
    return [(name.removeprefix(JUDGE_PART), as_float(v[index])) for name, v in named.items() if index < len(v)]
