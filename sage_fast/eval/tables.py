"""Scores as Markdown tables, aligned for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sage_fast.eval.hacking import judge_hacked
from sage_fast.eval.scores import TOO_FEW, PairedRow, format_number
from sage_fast.eval.videoset import SetRow, shown_name


def format_paired_table(rows: Sequence[PairedRow]) -> str:
    """Format scores before and after training: a row per score."""
    judged = any(row.margin is not None for row in rows)
    lines = [["held-out", "before", "after", "difference" + " ± 95 %" * judged]]
    for row in rows:
        difference = _with_margin(row.difference, row.margin, sign=True)
        lines.append([row.name, format_number(row.before, 4), format_number(row.after, 4), difference])
    why = "" if judged else f"; {TOO_FEW}"
    text = [*_grid(lines), "", f"{rows[0].pairs} videos of {rows[0].prompts} prompts, same seeds{why}"]
    if verdict := judge_hacked(rows):
        text.append(verdict)
    return "\n".join(text)


def format_table(rows: Sequence[SetRow]) -> str:
    """Format the scores of sources: a row per score and a column per source, then the same of the gains."""
    labels, scores = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("label", "score"))
    means = {(row.score, row.label): _with_margin(row.mean, row.margin) for row in rows}
    gains = {
        (row.score, row.label): _with_margin(row.gain, row.gain_margin, sign=True)
        for row in rows
        if row.gain is not None
    }

    def lines(title: str, cells: dict[tuple[str, str], str], labels: Sequence[str]) -> list[list[str]]:
        body = [[shown_name(score), *(cells.get((score, label), "-") for label in labels)] for score in scores]
        return [[title, *labels], *body]

    text = [*_grid(lines("mean", means, labels)), ""]
    if gains:
        text += [*_grid(lines(f"gain over {labels[0]}", gains, labels[1:])), ""]
    return "\n".join([*text, summary(rows)])


def summary(rows: Sequence[SetRow]) -> str:
    """Describe the numbers of the table in one line."""
    counts = {(row.videos, row.prompts) for row in rows}
    videos, prompts = max(counts, default=(0, 0))
    fewer = "" if len(counts) < 2 else "up to "
    intervals = "± is a 95 % interval" if any(row.margin is not None for row in rows) else TOO_FEW
    return f"{fewer}{videos} video{'s' * (videos != 1)} of {prompts} prompt{'s' * (prompts != 1)} each; {intervals}"


def _with_margin(value: float, margin: float | None, *, sign: bool = False) -> str:
    if math.isnan(value):
        return "-"
    return format_number(value, 4, sign=sign) + (f" ± {format_number(margin, 4)}" if margin is not None else "")


def _grid(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lay out cells as an aligned Markdown table; the first line is the header."""
    cells = [[_escaped(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    first, *others = widths
    cells.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return [f"| {' | '.join([line[0].ljust(first), *map(str.rjust, line[1:], others)])} |" for line in cells]


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "\\<")
