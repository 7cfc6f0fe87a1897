"""A page that compares sources: score table, curves, differing settings, and videos side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.eval.scores import PairedRow
from sage_fast.eval.text import summary
from sage_fast.eval.videoset import Key, SetRow, VideoSet, gains_of, shown_name
from sage_fast.report.html import cell_of, render
from sage_fast.report.shown import extremes
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
        count: number of video pairs to show.
        notes, warnings: sentences.
        own: (label, score) -> a run's row against its own evaluation before training.
        drawn: charts, SVG.
        settings: (name, values for `labels`) pairs.
        labels: labels of the runs.
    """
    scores = list(dict.fromkeys(row.score for row in rows))
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
        **_videos(sets, scores, count),
    )
    write_atomic(path, page)


def _videos(sets: Sequence[VideoSet], scores: Sequence[str], count: int) -> dict[str, Any]:
    """Return the video cards, from the largest gain to the largest loss, and the orders offered for sorting."""
    if not sets:
        return {"cards": [], "orders": []}
    orders: dict[str, dict[Key, float]] = {}
    for score in scores:
        if len(sets) == 1:
            orders[shown_name(score)] = sets[0].by_key(score)
        for videos in reversed(sets[1:]):  # the last source comes first: its gain is the default order
            orders[f"{shown_name(score)}: gain of {videos.label}"] = gains_of(score, sets[0], videos)
    orders = {name: values for name, values in orders.items() if values}
    leading = next(iter(orders.values()), {})
    kept = [set(videos.shown) for videos in sets]
    why = extremes(leading, set.intersection(*kept) or set.union(*kept), count)
    cards = []
    for key in sorted(why, key=lambda key: (-leading.get(key, -math.inf), key)):
        cells = []
        for videos in sets:
            values = [(shown_name(score), videos.by_key(score).get(key)) for score in scores]
            known = [(name, value) for name, value in values if value is not None]
            cells.append({"label": videos.label, "scores": known} | cell_of(videos.shown.get(key)))
        order = ",".join(repr(values[key]) if key in values else "" for values in orders.values())
        cards.append({"prompt": key[0], "why": why[key] if len(sets) > 1 else "", "cells": cells, "order": order})
    return {"cards": cards, "orders": list(orders)}
