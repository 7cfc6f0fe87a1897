"""Compare sets of scored videos: the table, notes and warnings, for a terminal, a log and a model
card."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from sage_fast.eval.gains import Row, hacking, table
from sage_fast.eval.scores import TOO_FEW, format_number
from sage_fast.eval.videoset import VideoSet
from sage_fast.util.errors import UserError
from sage_fast.util.meters import JUDGE_PART


class Comparison(NamedTuple):
    """A comparison of sets: the table, notes on what differs between them, and warnings of reward
    hacking."""

    sets: Sequence[VideoSet]
    rows: Sequence[Row]
    notes: list[str]
    warnings: list[str]

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """The table, notes and warnings, as Markdown for a terminal of 80 columns."""
        lines = [
            textwrap.fill(line, 80, break_on_hyphens=False)
            for line in (*self.notes, *self.warnings)
        ]
        return "\n".join([format_table(self.rows), *lines] if self.rows else lines)


def compare(sets: Sequence[VideoSet], watched: tuple[str, ...] = (JUDGE_PART,)) -> Comparison:
    """Compare sets with the first one.

    Args:
        watched: prefixes of the scores that nothing trains on.

    Raises:
        UserError: a set has no prompt in common with the first.
    """
    notes = [note for other in sets[1:] for note in check_prompts(sets[0], other)]
    found = {
        other.label: hacking(sets[0], other, watched, pairs=len(sets) - 1) for other in sets[1:]
    }
    warnings = [f"{label}: {text}" for label, text in found.items() if text]
    return Comparison(sets, table(sets) if sets else [], notes, warnings)


def check_prompts(first: VideoSet, other: VideoSet) -> list[str]:
    """Return notes on how the prompts and seeds of two sets differ.

    Raises:
        UserError: they have no prompt in common.
    """
    ours, theirs, names = set(first.keys), set(other.keys), f"{first.label} and {other.label}"
    if not ours & theirs:
        raise UserError(
            f"{names} hold different prompts, such as {first.prompts[0]!r} and {other.prompts[0]!r}"
        )
    notes = []
    if ours != theirs:
        notes.append(
            f"{names} have {len(ours & theirs)} videos of the same prompts: gains are over these."
        )
    if first.seeds and other.seeds:
        seeds = dict(zip(first.keys, first.seeds))
        if any(seeds.get(key, seed) != seed for key, seed in zip(other.keys, other.seeds)):
            notes.append(f"{names} have different seeds: pairs share only the prompt.")
    return notes


def format_table(rows: Sequence[Row]) -> str:
    """Format scores as aligned Markdown: a row per score and a column per set, then the same of the
    gains."""
    labels, scores = (
        list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("label", "score")
    )
    means = {(row.score, row.label): _with_margin(row.mean, row.margin) for row in rows}
    gains = {
        (r.score, r.label): _with_margin(r.gain, r.gain_margin, sign=True)
        for r in rows
        if r.gain is not None
    }
    text = []
    for title, cells, shown in (
        ("mean", means, labels),
        (f"gain over {labels[0]}", gains, labels[1:]),
    ):
        if cells:
            body = [
                [score, *(cells.get((score, label), "-") for label in shown)] for score in scores
            ]
            text += [*_grid([[title, *shown], *body]), ""]
    return "\n".join([*text, summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """Describe the numbers of the table in one line."""
    counts = {(row.videos, row.prompts) for row in rows}
    videos, prompts = max(counts)
    fewer = "" if len(counts) < 2 else "up to "
    intervals = "± is a 95 % interval" if any(row.margin is not None for row in rows) else TOO_FEW
    return (
        f"{fewer}{videos} video{'s' * (videos != 1)} of {prompts} prompt{'s' * (prompts != 1)} "
        f"each; {intervals}"
    )


def _with_margin(value: float, margin: float | None, *, sign: bool = False) -> str:
    if math.isnan(value):
        return "-"
    return format_number(value, 4, sign=sign) + (
        f" ± {format_number(margin, 4)}" if margin is not None else ""
    )


def _grid(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lay out cells as an aligned Markdown table; the first line is the header."""
    cells = [[_escaped(cell) for cell in line] for line in lines]
    first, *others = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return [
        f"| {' | '.join([line[0].ljust(first), *map(str.rjust, line[1:], others)])} |"
        for line in cells
    ]


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "\\<")
