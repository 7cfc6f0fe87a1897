"""Render a figure by matplotlib: as a file on white, or in the colours of the page that holds
it."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from sage_fast.report.charts import STYLE, themed_svg

Draw = Callable[[Figure], None]

_ON_WHITE: Any = {
    key: "#22252a" if "color" in key.lower() and "grid" not in key else value
    for key, value in STYLE.items()
} | {
    "grid.color": "#b9bcc0",
    "axes.edgecolor": "#8a8f98",
    "xtick.color": "#8a8f98",
    "ytick.color": "#8a8f98",
}


def picture(draw: Draw, size: tuple[float, float], kind: str, name: str) -> bytes:
    """Render a figure on white as `svg` or `png`. Deterministic.

    Args:
        draw: draws into an empty figure whose colours and fonts are set.
        size: in inches.
        kind: `svg` or `png`.
        name: salt for the SVG's ids.
    """
    buffer = io.BytesIO()
    with matplotlib.rc_context({**_ON_WHITE, "svg.hashsalt": name, "savefig.facecolor": "white"}):
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        _drawn(draw, size).savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def inline_picture(draw: Draw, size: tuple[float, float], name: str, title: str) -> str:
    """Render the same figure as an `<svg>` element in the colours of its page."""
    with matplotlib.rc_context(STYLE):
        return themed_svg(_drawn(draw, size), name, html.escape(title))


def _drawn(draw: Draw, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    return figure
