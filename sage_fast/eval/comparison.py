"""Compare sets of scored videos: the table, notes and warnings, for a terminal, a log and a model
card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sage_fast.eval.gains import GainRow, hacking, table
from sage_fast.eval.scores import TOO_FEW, format_number
from sage_fast.eval.videoset import VideoSet
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError
from sage_fast.util.meters import JUDGE_PART
from sage_fast.util.text import counted


class Comparison(NamedTuple):
    """A comparison of sets: the table, notes on what differs between them, and warnings of reward
    hacking."""

    sets: Sequence[VideoSet]
    rows: Sequence[GainRow]
    notes: list[str]
    warnings: list[str]

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """The table, notes and warnings, as Markdown for a terminal of 80 columns."""
        lines = [format_table(self.rows)] if self.rows else []
        for line in (*self.notes, *self.warnings):
            lines.append(wrapped(line, rest=""))
        return "\n".join(lines)


def gain_line(compared: Comparison) -> str | None:
    """Say in a line what the reward of held-out prompts gained from the first set to the last; None
    where either has no reward."""
    rows = [row for row in compared.rows if row.score == "reward"]
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    if last.gain is None or math.isnan(last.gain):
        return None
    change = {"up": "rose", "down": "fell", "": "did not clearly change"}[last.direction]
    if last.gain_margin is None:
        change = f"has {TOO_FEW}"
    gain = _with_margin(last.gain, last.gain_margin, sign=True)
    # where a video has no score, the means are over other videos than the gain
    paired = first.videos == last.videos == last.pairs
    ends = f"{format_number(first.mean, 3)} to {format_number(last.mean, 3)}, " if paired else ""
    return f"the reward of held-out prompts {change}: {ends}{gain}"


def compare(sets: Sequence[VideoSet], watched: tuple[str, ...] = (JUDGE_PART,)) -> Comparison:
    """Compare sets with the first one.

    Args:
        watched: prefixes of the scores that nothing trains on.

    Raises:
        UserError: a set has no prompt in common with the first.
    """
    notes: list[str] = []
    warnings: list[str] = []
    for other in sets[1:]:
        notes += check_prompts(sets[0], other)
        found = hacking(sets[0], other, watched, pairs=len(sets) - 1)
        if found:
            warnings.append(f"{other.label}: {found}")
    return Comparison(sets, table(sets) if sets else [], notes, warnings)


def check_prompts(first: VideoSet, other: VideoSet) -> list[str]:
    """Return notes on how the prompts and seeds of two sets differ.

    Raises:
        UserError: they have no prompt in common.
    """
    ours, theirs = set(first.keys), set(other.keys)
    names = f"{first.label} and {other.label}"
    if not ours & theirs:
        raise UserError(
            f"{names} hold different prompts, such as {first.prompts[0]!r} and {other.prompts[0]!r}"
        )
    notes = []
    if ours != theirs:
        notes.append(
            f"{names} have {counted(len(ours & theirs), 'video')} of the same prompts: gains are "
            "over these."
        )
    if first.seeds and other.seeds:
        seeds = dict(zip(first.keys, first.seeds))
        if any(seeds.get(key, seed) != seed for key, seed in zip(other.keys, other.seeds)):
            notes.append(f"{names} have different seeds: pairs share only the prompt.")
    return notes


def format_table(rows: Sequence[GainRow]) -> str:
    """Format scores as aligned Markdown: a row per score and a column per set, then the same of the
    gains."""
    labels = list(dict.fromkeys(row.label for row in rows))
    scores = list(dict.fromkeys(row.score for row in rows))
    means: dict[tuple[str, str], str] = {}
    gains: dict[tuple[str, str], str] = {}
    for row in rows:
        means[row.score, row.label] = _with_margin(row.mean, row.margin)
        if row.gain is not None:
            gain = _with_margin(row.gain, row.gain_margin, sign=True)
            gains[row.score, row.label] = gain

    tables = [("mean", means, labels)]
    if gains:
        tables.append((f"gain over {labels[0]}", gains, labels[1:]))
    text = []
    for title, cells, shown in tables:
        lines = [[title, *shown]]
        for score in scores:
            lines.append([score, *(cells.get((score, label), "-") for label in shown)])
        text += [*_grid(lines), ""]
    return "\n".join([*text, summary(rows)])


def summary(rows: Sequence[GainRow]) -> str:
    """Describe the numbers of the table in one line."""
    counts = {(row.videos, row.prompts) for row in rows}
    videos, prompts = max(counts)
    fewer = "" if len(counts) < 2 else "up to "
    intervals = "± is a 95 % interval" if any(row.margin is not None for row in rows) else TOO_FEW
    counted_videos = counted(videos, "video")
    counted_prompts = counted(prompts, "prompt")
    return f"{fewer}{counted_videos} of {counted_prompts} each; {intervals}"


def _with_margin(value: float, margin: float | None, *, sign: bool = False) -> str:
    if math.isnan(value):
        return "-"
    number = format_number(value, 4, sign=sign)
    if margin is None:
        return number
    return f"{number} ± {format_number(margin, 4)}"


def _grid(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lay out cells as an aligned Markdown table; the first line is the header."""
    cells = [[_escaped(cell) for cell in line] for line in lines]
    first, *others = [max(len(cell) for cell in column) for column in zip(*cells)]
    rule = ["-" * first]
    for width in others:
        rule.append("-" * (width - 1) + ":")  # to the right
    cells.insert(1, rule)

    rows = []
    for name, *numbers in cells:
        padded = [name.ljust(first)]
        for number, width in zip(numbers, others):
            padded.append(number.rjust(width))
        rows.append(f"| {' | '.join(padded)} |")
    return rows


def _escaped(text: str) -> str:
    """Return a text on one line, without what Markdown would obey."""
    text = " ".join(text.split())
    for character in ("\\", "|", "<"):
        text = text.replace(character, f"\\{character}")
    return text
