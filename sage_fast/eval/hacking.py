"""Detect reward hacking: the composite rises while a score on which nothing trains falls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sage_fast.eval.scores import PairedRow, mean_and_margin, paired_table
from sage_fast.util.metrics import JUDGE_PART

Evaluations = Mapping[str, Mapping[str, Any]]
"""Name (`before`, `iteration-000010`, `after`) -> scores."""


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


def _in_order(evaluations: Evaluations) -> list[Mapping[str, Any]]:
    """Return one evaluation per iteration, in order, keeping only those with the prompts and seeds of the last."""
    by_iteration = {scores["iteration"]: scores for _, scores in sorted(evaluations.items(), reverse=True)}
    ordered = [by_iteration[iteration] for iteration in sorted(by_iteration)]
    return [s for s in ordered if all(s[field] == ordered[-1][field] for field in ("prompts", "seeds"))]


def verdict(evaluations: Evaluations) -> str | None:
    """Return a warning if the composite rose and a part of the judge fell, both beyond their intervals.

    The last evaluation is compared with the first, then with the one where that part peaked: a judge that rises first
    and falls later is also over-optimisation. None if neither comparison shows it.
    """
    ordered = _in_order(evaluations)
    if len(ordered) < 2:
        return None
    first, *_, last = ordered
    if found := judge_hacked(paired_table(first, last)):
        return found
    for part in sorted({part for s in ordered for part in s["parts"] if part.startswith(JUDGE_PART)}):
        means = [mean_and_margin(s["prompts"], s["parts"].get(part, []))[0] for s in ordered[:-1]]
        if np.isnan(means).all():
            continue
        best = ordered[int(np.nanargmax(means))]
        rows = [row for row in paired_table(best, last) if row.name in ("reward", part)]
        if found := judge_hacked(rows):
            return f"since iteration {best['iteration']}: {found}"
    return None
