"""A page that compares sources: score table, curves, differing settings, and videos side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_fast.eval.scores import PairedRow
from sage_fast.eval.text import summary
from sage_fast.eval.videoset import SetRow, VideoSet, shown_name
from sage_fast.report.html import render
from sage_fast.report.shown import cards
from sage_fast.util.files import write_atomic


def write_gallery(
    path: Path,
    *,
    title: str,
    sets: Sequence[VideoSet],
    rows: Sequence[SetRow],
    count: int,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    own: Mapping[tuple[str, str], PairedRow] | None = None,
    drawn: Sequence[str] = (),
    settings: Sequence[tuple[str, Sequence[str]]] = (),
    labels: Sequence[str] = (),
) -> None:
    """Write a self-contained page.

    Args:
        path: output file.
        title: title of the page.
        sets: videos of each source; gains are relative to the first.
        rows: the score table of the sets.
        count: number of rows of videos to show.
        notes, warnings: sentences.
        own: (label, score) -> a run's row against its own evaluation before training.
        drawn: charts, SVG.
        settings: (name, values for `labels`) pairs.
        labels: labels of the runs.
    """
    scores = dict.fromkeys(row.score for row in rows)
    notes = list(notes)
    videos = cards(sets, count, notes)
    page = render(
        "gallery.html.j2",
        title=title,
        groups=[(shown_name(score), [row for row in rows if row.score == score]) for score in scores],
        gains=rows[0].label if any(row.gain is not None for row in rows) else None,
        own=own or {},
        summary=summary(rows) if rows else "",
        notes=notes,
        warnings=warnings,
        charts=drawn,
        settings=settings,
        labels=labels,
        videos=videos,
    )
    write_atomic(path, page)
