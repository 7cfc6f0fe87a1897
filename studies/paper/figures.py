"""The kinds of figures that most claims share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from sage_fast.report.charts import COLORS, GREY
from sage_fast.report.scores import Difference
from studies.paper.finding import LEVEL
from studies.paper.training import TrainedRun, mean_interval


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
        axes.plot([run.mean(part) for run in of], [row] * len(of), "|", color=GREY)
        axes.plot(mean, row, "o", color=COLORS[0], markersize=5)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)
