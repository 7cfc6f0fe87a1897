"""A page that compares sources: score table, curves, differing settings, and videos side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_fast.eval.tables import summary
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
    **of_runs: Any,
) -> None:
    """Write a self-contained page.

    Args:
        path: output file.
        title: title of the page.
        sets: videos of each source; gains are relative to the first.
        rows: the score table of the sets.
        count: number of rows of videos to show.
        notes, warnings: sentences.
        of_runs: what the page shows of runs: `own` ((label, score) -> a run's row against its own evaluation before
            training), `charts` (SVG), and `settings` (rows of cells, of which the first is the header).
    """
    scores = dict.fromkeys(row.score for row in rows)
    notes = list(notes)
    videos = cards(sets, count, notes)
    page = render(
        "gallery.html.j2",
        title=title,
        groups=[(shown_name(score), [row for row in rows if row.score == score]) for score in scores],
        gains=rows[0].label if any(row.gain is not None for row in rows) else None,
        summary=summary(rows) if rows else "",
        notes=notes,
        warnings=warnings,
        videos=videos,
        **({"own": {}, "charts": [], "settings": []} | of_runs),
    )
    write_atomic(path, page)
