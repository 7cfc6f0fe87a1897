"""The watch for reward hacking: the composite against the judge, which nothing is trained on, in every evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sage_fast.metrics import JUDGE_PART
from sage_fast.report.scores import PairedRow, as_float, columns_of, hacking, mean_and_error, paired_table

Evaluations = Mapping[str, Mapping[str, Any]]
"""Name (`before`, `iteration-000010`, `after`) -> scores."""


def in_order(evaluations: Evaluations) -> list[Mapping[str, Any]]:
    """From the first evaluation to the last, one for each iteration, those that are pairs of the last one."""
    by_iteration = {scores["iteration"]: scores for _, scores in sorted(evaluations.items(), reverse=True)}
    ordered = [by_iteration[iteration] for iteration in sorted(by_iteration)]
    return [s for s in ordered if all(s[field] == ordered[-1][field] for field in ("prompts", "seeds"))]


def verdict(evaluations: Evaluations) -> str | None:
    """What the last evaluation says: that the composite rose and a part of the judge fell, both by more than 2 standard
    errors, since training began, or since that part was at its best; None if neither is so.

    A judge that rises first and falls later is over-optimisation too, which a look at the start alone does not show.
    """
    ordered = in_order(evaluations)
    if len(ordered) < 2:
        return None
    first, *_, last = ordered
    found = hacking(paired_table(first, last))
    if found:
        return found
    for part in judge_parts(evaluations):
        means = [mean_and_error(s["prompts"], s["parts"].get(part, []))[0] for s in ordered[:-1]]
        if np.isnan(means).all():
            continue
        best = ordered[int(np.nanargmax(means))]
        rows = [row for row in paired_table(best, last) if row.name in ("reward", part)]
        if found := hacking(rows):
            return f"since iteration {best['iteration']}: {found}"
    return None


def judge_parts(evaluations: Evaluations) -> list[str]:
    return sorted({part for scores in evaluations.values() for part in scores["parts"] if part.startswith(JUDGE_PART)})


def changes(evaluations: Evaluations) -> dict[str, dict[int, tuple[float, float]]]:
    """Composite and parts of the judge -> iteration -> paired change since the first evaluation and its standard error,
    in units of the score's standard deviation over the first evaluation's videos, so that one axis serves all.

    Empty without a judge. A score that is the same for all of those videos has no unit, and is skipped.
    """
    ordered = in_order(evaluations)
    judges = judge_parts(evaluations)
    if not ordered or not judges:
        return {}
    first = ordered[0]
    tables: dict[int, list[PairedRow]] = {scores["iteration"]: paired_table(first, scores) for scores in ordered}
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name in ("reward", *judges):
        finite = [value for value in map(as_float, columns_of(first).get(name, [])) if math.isfinite(value)]
        unit = float(np.std(finite)) if finite else 0.0
        rows = {i: row for i, table in tables.items() for row in table if row.name == name}
        points = {
            i: (row.difference / unit, (math.nan if row.standard_error is None else row.standard_error) / unit)
            for i, row in rows.items()
            if unit > 0 and math.isfinite(row.difference)
        }
        if points:
            found[name.replace(JUDGE_PART, "judge: ")] = points
    return found
