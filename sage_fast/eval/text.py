"""Scores of evaluations as aligned text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sage_fast.eval.scores import (
    TOO_FEW,
    PairedRow,
    as_float,
    columns_of,
    format_number,
    judge_hacked,
    mean_and_margin,
)


def _name_width(names: Iterable[str]) -> int:
    return max([12, *(len(name) + 2 for name in names)])


def cells_of(row: PairedRow) -> tuple[str, str, str]:
    """Format the score before, the score after, and the difference with its margin if there is one."""
    difference = format_number(row.difference, 4, sign=True)
    if row.margin is not None:
        difference += f" ± {format_number(row.margin, 4)}"
    return format_number(row.before, 4), format_number(row.after, 4), difference


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
        before, after, difference = cells_of(row)
        line = f"{row.name:<{left}}{before:>10}{after:>10}{difference:>{width}}"
        ratio = f"{row.standard_errors:+.1f}" if row.standard_errors is not None else "-"
        lines.append(line + f"{ratio:>13}" * judged)
    if rows:
        why = "" if judged else f"; {TOO_FEW}"
        lines.append(f"{rows[0].pairs} videos of {rows[0].prompts} prompts, same seeds{why}")
    if verdict := judge_hacked(rows):
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
