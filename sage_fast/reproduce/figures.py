"""The look of the figures, and the two kinds that most claims share."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_fast.report.charts import COLORS, GREY, STYLE, themed_svg
from sage_fast.reproduce.statistics import LEVEL, Difference, mean_interval
from sage_fast.reproduce.training import TrainedRun

Draw = Callable[[Figure], None]
_INK: Any = {
    key: "#22252a" if "color" in key.lower() and "grid" not in key else value for key, value in STYLE.items()
} | {"grid.color": "#b9bcc0", "axes.edgecolor": "#8a8f98", "xtick.color": "#8a8f98", "ytick.color": "#8a8f98"}


def inline_svg(draw: Draw, size: tuple[float, float], name: str, title: str) -> str:
    """For the page, whose colours it follows."""
    with matplotlib.rc_context(STYLE):
        return themed_svg(_drawn(draw, size), name, html.escape(title))


def picture(draw: Draw, size: tuple[float, float], kind: str, name: str) -> bytes:
    """The figure on white as `svg` or `png`; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({**_INK, "svg.hashsalt": name, "savefig.facecolor": "white"}):
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        _drawn(draw, size).savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _drawn(draw: Draw, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    return figure


def draw_courses(axes: Axes, runs: Mapping[str, Sequence[TrainedRun]], part: str = "reward", ylabel: str = "") -> None:
    """Held-out score by iteration, label -> runs: mean over the seeds and, if there are several, its standard error."""
    for color, (label, of) in zip(COLORS * 3, runs.items()):
        courses = [run.course(part) for run in of]
        x = list(courses[0])
        values = np.array([list(course.values()) for course in courses])
        mean, error = values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5
        axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
        axes.plot(x, mean, color=color, label=label, marker="o", markersize=2.5)
    axes.set_xlabel("iteration")
    axes.set_ylabel(ylabel or "held-out composite")


def draw_differences(axes: Axes, differences: Mapping[str, Difference], xlabel: str) -> None:
    """One row each: difference and 95 % interval; filled if it stands after the correction."""
    for row, of in enumerate(differences.values()):
        sure = of.corrected < LEVEL
        axes.plot([of.low, of.high], [row, row], color=COLORS[0] if sure else GREY, linewidth=2)
        axes.plot(of.value, row, "o", color=COLORS[0] if sure else GREY, markersize=5)
    axes.set_yticks(range(len(differences)), list(differences))
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_ylim(len(differences) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)


def draw_scores(axes: Axes, runs: Mapping[str, Sequence[TrainedRun]], part: str, xlabel: str) -> None:
    """One row each: mean over the seeds with its 95 % interval, and the seeds."""
    for row, of in enumerate(runs.values()):
        mean, half = mean_interval(of, part)
        axes.plot([mean - half, mean + half], [row, row], color=COLORS[0], linewidth=2)
        axes.plot([np.mean(list(run.score(part).values())) for run in of], [row] * len(of), "|", color=GREY)
        axes.plot(mean, row, "o", color=COLORS[0], markersize=5)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)
