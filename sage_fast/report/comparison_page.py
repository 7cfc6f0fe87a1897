"""The pages that compare sources: of `sage-fast eval`, and of `sage-fast compare`, with the course
of each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.eval.comparison import Comparison, compare, summary
from sage_fast.eval.gains import table
from sage_fast.eval.video_folder import read_folder
from sage_fast.eval.videoset import VideoSet
from sage_fast.report import charts
from sage_fast.report.html import cards, render
from sage_fast.report.page import RunReport, read_run
from sage_fast.util.errors import printable
from sage_fast.util.files import VIDEOS, json_value, write_atomic, write_json
from sage_fast.util.meters import REWARD_PART


def write_evaluation(
    found: Comparison, count: int, *, folder: Path | None, json: Path | None
) -> None:
    """Write the requested files of an evaluation.

    Args:
        count: rows of videos on the page.
        folder: where to write `evaluation.md` and `evaluation.html`.
        json: file for all scores.
    """
    if json is not None:
        if len(found.sets) > 1:
            lines = []
            for row in found.rows:
                cells = dataclasses.asdict(row)
                lines.append({name: json_value(value) for name, value in cells.items()})
            sources = {side.label: side.evaluation for side in found.sets}
            write_json({"sources": sources, "table": lines}, json)
        else:
            write_json(found.sets[0].evaluation, json)
    if folder is not None:
        write_atomic(folder / "evaluation.md", f"{found.text}\n")
        _write_page(folder / "evaluation.html", found, count)


SCORED_BY = ("eval.judge", *(f"reward.{name}" for name in ("name", "args", "weights", "several")))
"""Settings that decide what a score is."""
ROWS = 6
"""Rows of videos on the page of `sage-fast compare`."""

# -- runs ------------------------------------------------------------------------------------------


def read_sets(
    sources: Mapping[str, Path],
) -> tuple[dict[str, RunReport], list[VideoSet], list[str]]:
    """Read run folders and folders of videos.

    Args:
        sources: label -> folder.

    Returns:
        The runs by label, the newest evaluation of each source that has one, and notes.

    Raises:
        UserError: a folder is neither.
    """
    runs, sets, notes = {}, [], []
    for label, path in sources.items():
        if (path / VIDEOS).is_file():
            sets.append(read_folder(label, path))
            continue
        runs[label] = run = read_run(path)
        notes += [f"{label}: {note}" for note in run.folder.evaluations[1]]
        if not run.ends:
            notes.append(f"{label} has no evaluation yet.")
            continue
        newest = run.ends[-1].label
        sets.append(dataclasses.replace(run.ends[-1], label=label))
        if newest == "before":
            notes.append(f"{label} is shown before training.")
        elif newest != "after":
            notes.append(f"{label} is shown at {newest}.")
    return runs, sets, notes


def write_comparison(sources: Mapping[str, Path], folder: Path) -> None:
    """Print the table of runs, finished or not, and of folders of videos; write it as
    `comparison.md`, and with videos and curves as `comparison.html`.

    Args:
        sources: label -> run folder or folder of videos.
        folder: created if missing.

    Raises:
        UserError: as `read_sets`, or a source has no prompt in common with the first.
    """
    runs, sets, notes = read_sets(sources)
    found = compare(sets)
    own = {}
    for label, run in runs.items():
        if run.hacking:
            found.warnings.append(f"{label}: {run.hacking}")
        for row in table(run.ends):
            if row.pairs:
                own[label, row.score] = row

    settings = _differing(runs)
    apart = [name for name, *_ in settings if name in SCORED_BY]
    if apart:
        notes.append(
            f"The runs are scored in different ways ({', '.join(apart)}): gains of one over "
            "another may mean nothing. sage-fast eval scores them alike."
        )
    found.notes[:0] = notes
    in_common = set.intersection(*(set(videos.shown) for videos in sets)) if sets else set()
    if sets and not in_common:
        found.notes.append(
            "No videos are shown: no prompt has one of every source. sage-fast eval samples them "
            "alike."
        )
    folder.mkdir(parents=True, exist_ok=True)
    print(printable(found.text))
    write_atomic(folder / "comparison.md", f"{found.text}\n")
    page = folder / "comparison.html"
    _write_page(
        page,
        found,
        ROWS if in_common else 0,
        " · ".join(sources),
        own=own,
        charts=_charts(runs),
        settings=settings,
    )
    print(printable(str(page)))


def _write_page(path: Path, found: Comparison, count: int, title: str = "", **of_runs: Any) -> None:
    """Write a self-contained page.

    Args:
        count: number of rows of videos to show.
        of_runs: `own` ((label, score) -> a run's gain over its own evaluation before training),
            `charts` (SVG), and `settings` (rows of cells, of which the first is the header).
    """
    rows = found.rows
    by_score: dict[str, list[Any]] = {}
    for row in rows:
        by_score.setdefault(row.score, []).append(row)
    has_gains = any(row.gain is not None for row in rows)
    notes = list(found.notes)
    videos = cards(found.sets, count, notes)  # may add notes
    no_runs: dict[str, Any] = {"own": {}, "charts": [], "settings": []}
    page = render(
        "gallery.html.j2",
        title=title or " · ".join(videos.label for videos in found.sets),
        groups=list(by_score.items()),
        gains=rows[0].label if has_gains else None,
        summary=summary(rows) if rows else "",
        videos=videos,
        notes=notes,
        warnings=found.warnings,
        **(no_runs | of_runs),
    )
    write_atomic(path, page)


def _differing(runs: Mapping[str, RunReport]) -> list[list[str]]:
    """Return a header and the settings that differ between runs, with a dash for a default; [] if
    none do.

    Files and code are compared by what they hold where all runs know it, and shown by it if their
    names are the same.
    """
    found = []
    contents = [run.folder.facts.get("contents", {}) for run in runs.values()]
    names = {name for run in runs.values() for name in run.settings}
    for name in sorted(names - {"output"}):
        values = [str(run.settings.get(name, "\N{EN DASH}")) for run in runs.values()]
        digests = [str(of_run.get(name, "")) for of_run in contents]
        compared = digests if all(digests) else values
        if len(set(compared)) > 1:
            shown = values if len(set(values)) > 1 else digests
            found.append([name, *shown])
    if not found:
        return []
    return [["setting", *runs], *found]


def _charts(runs: Mapping[str, RunReport]) -> list[str]:
    """Draw every score and metric, with a line for each run."""
    drawn = []
    scores = {name for run in runs.values() for name in run.points}
    for score in sorted(scores, key=lambda name: (name != "reward", name)):
        shown = {label: run.points.get(score, {}) for label, run in runs.items()}
        drawn.append(charts.held_out(shown, f"Held-out {score}", least=1))
    rows = {label: run.folder.rows for label, run in runs.items() if run.folder.rows}
    parts: set[str] = set()
    for of_run in rows.values():
        for row in of_run:
            parts.update(key for key in row if key.startswith(REWARD_PART))
    for key in dict.fromkeys(["reward/mean", *sorted(parts), *charts.METRICS]):
        drawn.append(charts.metric(key, rows))
    return [chart for chart in drawn if chart is not None]
