"""Scored videos of one source: a run folder, or a folder with a `videos.csv`, which any program can write.

`videos.csv` has a header with `file` and `prompt`, then one line per video; `file` is relative to the folder.
`sage-fast eval` adds `seed` and the scores. Any other purely numeric column is a score too.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.eval.scores import (
    TOO_FEW,
    Interval,
    as_float,
    columns_of,
    direction,
    format_number,
    hacking,
    mean_and_margin,
    means_by_prompt,
)
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import VIDEOS, write_atomic
from sage_fast.util.videos import numbered

SUFFIXES = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".webp", ".gif", ".png")

Key = tuple[str, int]
"""(prompt, index among the prompt's videos); videos of two sets with the same key are a pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoSet:
    """N videos of one source.

    Attributes:
        label: label of the source in tables and pages.
        prompts: one per video.
        seeds: one per video; None if unknown.
        scores: name -> N numbers, NaN if missing; `reward`, the composite, comes first.
        files: one per video; None where the file was not kept.
    """

    label: str
    prompts: list[str]
    files: list[Path | None]
    seeds: list[int] | None = None
    scores: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def keys(self) -> list[Key]:
        seen: dict[str, int] = {}
        keys = []
        for prompt in self.prompts:
            keys.append((prompt, seen.setdefault(prompt, 0)))
            seen[prompt] += 1
        return keys

    @functools.cached_property
    def shown(self) -> dict[Key, Path]:
        """The videos whose files exist."""
        return {key: file for key, file in zip(self.keys, self.files) if file is not None}

    def by_key(self, name: str) -> dict[Key, float]:
        """Return the finite values of a score by key."""
        return {k: value for k, value in zip(self.keys, self.scores.get(name, ())) if math.isfinite(value)}


def of_scores(label: str, scores: Mapping[str, Any], files: Mapping[int, Path]) -> VideoSet:
    """Build a set from an evaluation (`eval/*.json`) and its files by number."""
    return VideoSet(
        label=label,
        prompts=list(scores["prompts"]),
        seeds=list(scores["seeds"]),
        scores={name: [as_float(value) for value in values] for name, values in columns_of(scores).items()},
        files=[files.get(number) for number in range(len(scores["prompts"]))],
    )


def of_run(label: str, run: Path, evaluation: str, scores: Mapping[str, Any]) -> VideoSet:
    """Build a set from an evaluation in a run folder, with the videos the run kept."""
    return of_scores(label, scores, numbered(run / "videos" / evaluation))


# -- a folder with videos.csv -----------------------------------------------------------------------------------------


def read_folder(label: str, folder: Path) -> VideoSet:
    """Read a folder with a `videos.csv`.

    Raises:
        UserError: `videos.csv` is not UTF-8, has no rows or the wrong header, or names a missing file.
    """
    index = folder / VIDEOS
    try:
        rows = list(csv.DictReader(io.StringIO(index.read_text(encoding="utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{index}: not a CSV file in UTF-8: {error}") from error
    columns = [name for name in (rows[0] if rows else {}) if name is not None]
    if not rows:
        raise UserError(f"{index}: holds no video; expected a header with file and prompt, then a line for each video")
    for wanted in ("file", "prompt"):
        if wanted not in columns:
            raise UserError(f"{index}: column {wanted!r} is missing; found {nearest(wanted, columns)}")
    files: list[Path | None] = []
    for line, row in enumerate(rows, start=1):
        if None in row or any(value is None for value in row.values()):
            raise UserError(f"{index}, video {line}: expected {len(columns)} values; text with commas needs quotes")
        path = folder / row["file"]
        if not path.is_file():
            raise UserError(f"{index}, video {line}: {row['file']!r}: no such file in {folder}")
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{index}, video {line}: {row['file']!r}: expected a video, one of {', '.join(SUFFIXES)}")
        if not row["prompt"].strip():
            raise UserError(f"{index}, video {line}: {row['file']!r} has no prompt")
        files.append(path)
    scores = {name: _numbers([row[name] for row in rows]) for name in columns if name not in ("file", "prompt", "seed")}
    seeds = [row.get("seed", "") for row in rows]
    return VideoSet(
        label=label,
        prompts=[row["prompt"].strip() for row in rows],
        files=files,
        seeds=[int(seed) for seed in seeds] if all(seed.isdecimal() for seed in seeds) else None,
        scores={name: values for name, values in scores.items() if values is not None},
    )


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Parse a column of numbers, NaN where empty; None if a value is no number or all are empty."""
    try:
        values = [float(text) if text.strip() else math.nan for text in texts]
    except ValueError:
        return None
    return values if any(text.strip() for text in texts) else None


def write_folder(videos: VideoSet, folder: Path) -> None:
    """Write `videos.csv`; every video must have a file."""
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["file", "prompt", *(["seed"] if videos.seeds else []), *videos.scores])
    for i, (file, prompt) in enumerate(zip(videos.files, videos.prompts, strict=True)):
        assert file is not None
        numbers = [_number(values[i]) for values in videos.scores.values()]
        seed = [videos.seeds[i]] if videos.seeds else []
        writer.writerow([os.path.relpath(file, folder), prompt, *seed, *numbers])
    write_atomic(folder / VIDEOS, table.getvalue())


def _number(value: float | None) -> str:
    return repr(value) if value is not None and math.isfinite(value) else ""


def check_prompts(first: VideoSet, other: VideoSet) -> list[str]:
    """Return notes on how the prompts and seeds of two sets differ.

    Raises:
        UserError: they have no prompt in common.
    """
    ours, theirs = set(first.keys), set(other.keys)
    if not ours & theirs:
        raise UserError(
            f"{first.label} and {other.label} hold different prompts, such as {first.prompts[0]!r} and "
            f"{other.prompts[0]!r}: there is no pair of videos to compare"
        )
    notes = []
    if ours != theirs:
        both = len(ours & theirs)
        notes.append(f"{first.label} and {other.label} have {both} videos of the same prompts: gains are over these.")
    if first.seeds and other.seeds:
        seeds = dict(zip(first.keys, first.seeds))
        if any(seeds.get(key, seed) != seed for key, seed in zip(other.keys, other.seeds)):
            notes.append(f"{first.label} and {other.label} have different seeds: pairs share only the prompt.")
    return notes


# -- the table --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetRow:
    """One score of one source.

    Attributes:
        score: name of the score; `reward` for the composite.
        label: label of the source.
        mean: mean over prompts of the means over each prompt's videos.
        margin: half-width of the mean's 95 % interval; None with fewer than `MIN_PROMPTS` prompts.
        gain, gain_margin: mean paired difference to the first source and its margin; None for the first source.
        videos, prompts: numbers of videos and prompts with this score.
        pairs, pair_prompts: numbers of pairs and prompts with this score in both sources.
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
    pair_prompts: int = 0

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean."""
        return _interval(self.mean, self.margin)

    @property
    def gain_interval(self) -> Interval | None:
        """95 % interval of the gain."""
        return None if self.gain is None else _interval(self.gain, self.gain_margin)

    @property
    def direction(self) -> str:
        """`up` or `down` if the interval of the gain excludes 0, else an empty string."""
        return "" if self.gain is None else direction(self.gain, self.gain_margin)


def _interval(value: float, margin: float | None) -> Interval | None:
    return None if margin is None else (value - margin, value + margin)


def table(sets: Sequence[VideoSet]) -> list[SetRow]:
    """Return all scores of all sets with their paired differences to the first set, grouped by score."""
    names = list(dict.fromkeys(name for videos in sets for name in videos.scores))
    names.sort(key=lambda name: name != "reward")  # the composite first, the others in their order
    return [_row(name, videos, sets[0]) for name in names for videos in sets if name in videos.scores]


def _row(name: str, videos: VideoSet, first: VideoSet) -> SetRow:
    values = videos.by_key(name)
    mean, margin, prompts = _over_prompts(values)
    row = SetRow(score=name, label=videos.label, mean=mean, margin=margin, videos=len(values), prompts=prompts)
    if videos is first or name not in first.scores:
        return row
    gains = gains_of(name, first, videos)
    gain, margin, prompts = _over_prompts(gains)
    return dataclasses.replace(row, gain=gain, gain_margin=margin, pairs=len(gains), pair_prompts=prompts)


def _over_prompts(values: Mapping[Key, float]) -> tuple[float, float | None, int]:
    """Return the mean over prompts, where each counts once, its margin, and their number."""
    means = means_by_prompt([prompt for prompt, _ in values], list(values.values()))
    return *mean_and_margin(list(means), list(means.values())), len(means)


def gains_of(name: str, first: VideoSet, videos: VideoSet) -> dict[Key, float]:
    """Return each video's score minus that of its pair in the first set."""
    base, values = first.by_key(name), videos.by_key(name)
    return {key: value - base[key] for key, value in values.items() if key in base}


def hacked(rows: Sequence[SetRow], judges: Sequence[str]) -> list[str]:
    """Return a warning for each source whose composite rose while one of `judges` (scores not trained on) fell."""
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        if found := hacking({row.score: row.direction for row in rows if row.label == label}, judges):
            lines.append(f"{label}: {found}")
    return lines


def shown_name(score: str) -> str:
    """Return a score's name in tables: `overall` for the composite, as in the paper."""
    return "overall" if score == "reward" else score


def format_interval(interval: Interval | None, *, sign: bool = False) -> str:
    if interval is None:
        return ""
    return " to ".join(format_number(value, 3, sign=sign) for value in interval)


def format_table(rows: Sequence[SetRow]) -> str:
    """Format for the terminal: one block per score, one line per source."""
    width = max([12, *(len(_cut(row.label)) + 2 for row in rows), *(len(shown_name(row.score)) for row in rows)])
    lines = []
    for score in dict.fromkeys(row.score for row in rows):
        lines.append(f"{shown_name(score):<{width}}{'mean':>9}  {'95 % interval':<18}{'gain':>9}  95 % interval")
        for row in (row for row in rows if row.score == score):
            line = (
                f"  {_cut(row.label):<{width - 2}}{format_number(row.mean, 3):>9}  {format_interval(row.interval):<18}"
            )
            if row.gain is not None:
                line += f"{format_number(row.gain, 3, sign=True):>9}  {format_interval(row.gain_interval, sign=True)}"
            lines.append(line.rstrip())
    return "\n".join([*lines, textwrap.fill(summary(rows), 80, break_on_hyphens=False)])


def _cut(label: str) -> str:
    return label if len(label) <= 28 else "..." + label[-25:]


def summary(rows: Sequence[SetRow]) -> str:
    """Describe the numbers of the table in one line."""
    counts = {(row.videos, row.prompts) for row in rows}
    videos, prompts = max(counts, default=(0, 0))
    fewer = "" if len(counts) < 2 else "up to "
    first = rows[0].label if rows else ""
    gains = f"gains: paired differences to {first}; " if any(row.gain is not None for row in rows) else ""
    few = all(row.interval is None for row in rows)
    intervals = TOO_FEW if few else "95 % intervals over prompts"
    counted = f"{fewer}{videos} video{'s' * (videos != 1)} of {prompts} prompt{'s' * (prompts != 1)} each"
    return f"{counted}; {gains}{intervals}"


def markdown(rows: Sequence[SetRow]) -> str:
    """Format as in the paper: a table with one row per source and one column per score, then one of the gains."""
    scores = list(dict.fromkeys(row.score for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows))
    found = {(row.label, row.score): row for row in rows}

    def lines(cell: Any) -> list[str]:
        header = ["", *(_cell(shown_name(score)) for score in scores)]
        body = [[_cell(label), *(cell(found.get((label, score))) for score in scores)] for label in labels]
        return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]

    def mean(row: SetRow | None) -> str:
        if row is None or math.isnan(row.mean):
            return "-"
        return format_number(row.mean, 4) + (f" ({format_interval(row.interval)})" if row.interval else "")

    def gain(row: SetRow | None) -> str:
        if row is None or row.gain is None or math.isnan(row.gain):
            return "-"
        interval = f" ({format_interval(row.gain_interval, sign=True)})" if row.gain_interval else ""
        return format_number(row.gain, 4, sign=True) + interval

    text = [*lines(mean), "", summary(rows), ""]
    if any(row.gain is not None for row in rows):
        text += [f"Gain over {_cell(labels[0])}, pair by pair:", "", *lines(gain), ""]
    return "\n".join(text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "\\<")


def as_csv(rows: Sequence[SetRow]) -> str:
    """Format as CSV: one line per score and source, numbers in full precision."""
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(
        ["source", "score", "mean", "low", "high", "videos", "prompts", "gain", "gain_low", "gain_high", "pairs"]
    )
    for row in rows:
        low, high = row.interval or (None, None)
        gain_low, gain_high = row.gain_interval or (None, None)
        numbers = [_number(value) for value in (row.mean, low, high)]
        gains = [_number(value) for value in (row.gain, gain_low, gain_high)]
        writer.writerow([row.label, row.score, *numbers, row.videos, row.prompts, *gains, row.pairs or ""])
    return table.getvalue()


def as_json(row: SetRow) -> dict[str, Any]:
    """Return a row as JSON, with null for NaN."""
    fields = dataclasses.asdict(row) | {"interval": row.interval, "gain_interval": row.gain_interval}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}
