"""Compare sets of scored videos: means, paired differences to the first set, signs of reward hacking, and the text."""

from __future__ import annotations

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sage_fast.eval.scores import TOO_FEW, format_number, mean_and_margin
from sage_fast.eval.videoset import Key, VideoSet
from sage_fast.util.errors import UserError
from sage_fast.util.metrics import JUDGE_PART

# -- scores and their differences -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One score of one set.

    Attributes:
        score: name of the score; `reward` for the composite.
        label: label of the set.
        mean, margin: mean over the videos and the half-width of its 95 % interval over prompts (None with fewer than
            `MIN_PROMPTS`).
        videos, prompts: numbers of videos and prompts with this score.
        gain, gain_margin: mean paired difference to the first set and its margin; None for the first set, and where
            another reward computed the score.
        pairs: number of pairs with this score in both sets.
    """

    score: str
    label: str
    mean: float
    margin: float | None
    videos: int
    prompts: int
    gain: float | None = None
    gain_margin: float | None = None
    pairs: int = 0

    @property
    def direction(self) -> str:
        """`up` or `down` if the interval of the gain excludes 0, else an empty string."""
        if self.gain is None or self.gain_margin is None or not abs(self.gain) > self.gain_margin:
            return ""
        return "up" if self.gain > 0 else "down"


def table(sets: Sequence[VideoSet]) -> list[Row]:
    """Return all scores of all sets with their paired differences to the first set, grouped by score."""
    names = list(dict.fromkeys(name for videos in sets for name in videos.scores))
    names.sort(key=lambda name: name != "reward")  # the composite first, the others in their order
    return [_row(name, videos, sets[0]) for name in names for videos in sets if name in videos.scores]


def _row(name: str, videos: VideoSet, first: VideoSet) -> Row:
    mean, margin, prompts = _mean(values := videos.by_key(name))
    row = Row(score=name, label=videos.label, mean=mean, margin=margin, videos=len(values), prompts=prompts)
    if videos is first or not first.scored_alike(name, videos):
        return row
    gain, gain_margin, _ = _mean(gains := gains_of(name, first, videos))
    return dataclasses.replace(row, gain=gain, gain_margin=gain_margin, pairs=len(gains))


def _mean(values: Mapping[Key, float]) -> tuple[float, float | None, int]:
    """Return the mean, its margin, and the number of prompts."""
    prompts = [prompt for prompt, _ in values]
    return *mean_and_margin(prompts, list(values.values())), len(set(prompts))


def gains_of(name: str, first: VideoSet, videos: VideoSet) -> dict[Key, float]:
    """Return each video's score minus that of its pair in the first set."""
    base, values = first.by_key(name), videos.by_key(name)
    return {key: value - base[key] for key, value in values.items() if key in base}


def check_prompts(first: VideoSet, other: VideoSet) -> list[str]:
    """Return notes on how the prompts, seeds and scorers of two sets differ.

    Raises:
        UserError: they have no prompt in common.
    """
    ours, theirs, names = set(first.keys), set(other.keys), f"{first.label} and {other.label}"
    if not ours & theirs:
        raise UserError(
            f"{names} hold different prompts, such as {first.prompts[0]!r} and {other.prompts[0]!r}: there is no pair "
            "of videos to compare"
        )
    notes = []
    if ours != theirs:
        notes.append(f"{names} have {len(ours & theirs)} videos of the same prompts: gains are over these.")
    if first.seeds and other.seeds:
        seeds = dict(zip(first.keys, first.seeds))
        if any(seeds.get(key, seed) != seed for key, seed in zip(other.keys, other.seeds)):
            notes.append(f"{names} have different seeds: pairs share only the prompt.")
    if apart := [name for name in other.scores if name in first.scores and not first.scored_alike(name, other)]:
        notes.append(
            f"{other.label} and {first.label} have another reward, or other arguments or weights of it, for "
            f"{', '.join(map(shown_name, apart))}: no gain is shown. compare --scorer NAME scores the videos of both "
            "alike; sage-fast eval samples them too."
        )
    return notes


# -- reward hacking ---------------------------------------------------------------------------------------------------


def hacking(first: VideoSet, last: VideoSet, watched: tuple[str, ...] = (JUDGE_PART,)) -> str | None:
    """Return a warning if the composite rose and a score that nothing trains on fell, both beyond their intervals.

    Args:
        watched: prefixes of the scores that nothing trains on.
    """
    directions = {row.score: row.direction for row in table([first, last])}
    fallen = [name for name, way in directions.items() if name.startswith(watched) and way == "down"]
    if directions.get("reward") != "up" or not fallen:
        return None
    return f"reward rose while {', '.join(fallen)} fell: look at the videos (reward hacking)"


def hacking_in_run(evaluations: Sequence[VideoSet]) -> str | None:
    """Return a warning if a run hacks its reward: since its first evaluation, or since a part of the judge was best.

    A judge that rises first and falls later is also over-optimisation.

    Args:
        evaluations: of one run, in the order of iterations.
    """
    if len(evaluations) < 2:
        return None
    first, *_, last = evaluations
    if found := hacking(first, last):
        return found
    for part in sorted(name for name in last.scores if name.startswith(JUDGE_PART)):
        best = max(evaluations[:-1], key=lambda videos: statistics.fmean(videos.by_key(part).values() or [-math.inf]))
        if found := hacking(best, last):
            return f"since iteration {best.iteration}: {found}"
    return None


# -- text -------------------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """A comparison of sets: the table, notes on what differs between them, and warnings of reward hacking."""

    sets: Sequence[VideoSet]
    rows: Sequence[Row]
    notes: list[str]
    warnings: list[str]

    @property
    def text(self) -> str:
        """The table, notes and warnings, as Markdown for a terminal of 80 columns."""
        lines = [textwrap.fill(line, 80, break_on_hyphens=False) for line in (*self.notes, *self.warnings)]
        return "\n".join([format_table(self.rows), *lines] if self.rows else lines)


def compare(sets: Sequence[VideoSet], watched: tuple[str, ...] = (JUDGE_PART,)) -> Comparison:
    """Compare sets with the first one.

    Args:
        watched: prefixes of the scores that nothing trains on.

    Raises:
        UserError: a set has no prompt in common with the first.
    """
    notes = [note for other in sets[1:] for note in check_prompts(sets[0], other)]
    found = {other.label: hacking(sets[0], other, watched) for other in sets[1:]}
    warnings = [f"{label}: {text}" for label, text in found.items() if text]
    return Comparison(sets, table(sets) if sets else [], notes, warnings)


def format_table(rows: Sequence[Row]) -> str:
    """Format scores as aligned Markdown: a row per score and a column per set, then the same of the gains."""
    labels, scores = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("label", "score"))
    means = {(row.score, row.label): _with_margin(row.mean, row.margin) for row in rows}
    gains = {
        (row.score, row.label): _with_margin(row.gain, row.gain_margin, sign=True)
        for row in rows
        if row.gain is not None
    }
    text = []
    for title, cells, shown in (("mean", means, labels), (f"gain over {labels[0]}", gains, labels[1:])):
        if cells:
            body = [[shown_name(score), *(cells.get((score, label), "-") for label in shown)] for score in scores]
            text += [*_grid([[title, *shown], *body]), ""]
    return "\n".join([*text, summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """Describe the numbers of the table in one line."""
    counts = {(row.videos, row.prompts) for row in rows}
    videos, prompts = max(counts)
    fewer = "" if len(counts) < 2 else "up to "
    intervals = "± is a 95 % interval" if any(row.margin is not None for row in rows) else TOO_FEW
    return f"{fewer}{videos} video{'s' * (videos != 1)} of {prompts} prompt{'s' * (prompts != 1)} each; {intervals}"


def shown_name(score: str) -> str:
    """Return a score's name in tables: `overall` for the composite, as in the paper."""
    return "overall" if score == "reward" else score


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
