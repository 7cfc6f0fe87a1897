"""Which videos stand for a comparison, and the scores beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from sage_fast.metrics import JUDGE_PART
from sage_fast.report.scores import as_float, composite


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
    rewards = composite(before, after.get("weights")), after.get("reward", ())
    gains = {i: as_float(y) - as_float(x) for i, (x, y) in enumerate(zip(*rewards))}
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


def scores_of(scores: Mapping[str, Any], index: int) -> list[tuple[str, float]]:
    """Composite and judge of one video of an evaluation, as far as they are known."""
    judge = {name: values for name, values in scores.get("parts", {}).items() if name.startswith(JUDGE_PART)}
    named = {"reward": scores.get("reward", ()), **judge}
    return [(name.removeprefix(JUDGE_PART), as_float(v[index])) for name, v in named.items() if index < len(v)]
