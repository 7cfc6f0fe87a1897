"""Figures that several claims share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from sage_fast.report.charts import COLORS, GREY
from studies.differences import Difference
from studies.finding import LEVEL
from studies.runs import TrainedRun, mean_interval


def draw_courses(
    axes: Axes, runs: Mapping[str, Sequence[TrainedRun]], part: str = "reward", ylabel: str = ""
) -> None:
    """Draw the held-out score by iteration, one line per label: mean over the seeds, and a band of
    its standard error.

    Args:
        runs: label -> runs of all seeds.
    """
    for color, (label, seeds) in zip(COLORS * 3, runs.items()):
        courses = [run.course(part) for run in seeds]
        x = list(courses[0])
        values = np.array([list(course.values()) for course in courses])
        mean, error = values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5
        axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
        axes.plot(x, mean, color=color, label=label, marker="o", markersize=2.5)
    axes.set_xlabel("iteration")
    axes.set_ylabel(ylabel or "held-out composite")


def draw_differences(axes: Axes, differences: Mapping[str, Difference], xlabel: str) -> None:
    """Draw one row per difference with its 95 % interval; coloured if significant after the
    correction."""
    for row, d in enumerate(differences.values()):
        sure = d.corrected < LEVEL
        axes.plot([d.low, d.high], [row, row], color=COLORS[0] if sure else GREY, linewidth=2)
        axes.plot(d.value, row, "o", color=COLORS[0] if sure else GREY, markersize=5)
    axes.axvline(0, color=GREY, linewidth=0.8)
    label_rows(axes, differences)
    axes.set_xlabel(xlabel)


def draw_intervals(
    axes: Axes, intervals: Mapping[str, tuple[float, float, float]], xlabel: str
) -> None:
    """Draw one row per (value, low, high), and a line at 0."""
    for row, (value, low, high) in enumerate(intervals.values()):
        axes.plot([low, high], [row, row], color=GREY, linewidth=2)
        axes.plot(value, row, "o", color=COLORS[0], markersize=5)
    axes.axvline(0, color=GREY, linewidth=0.8)
    label_rows(axes, intervals)
    axes.set_xlabel(xlabel)


def label_rows(axes: Axes, names: Collection[str]) -> None:
    """Name the rows, the first at the top."""
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def draw_scores(
    axes: Axes, runs: Mapping[str, Sequence[TrainedRun]], part: str, xlabel: str
) -> None:
    """Draw one row per label: mean over the seeds, its 95 % interval, and the single seeds."""
    for row, seeds in enumerate(runs.values()):
        mean, half = mean_interval(seeds, part)
        axes.plot([mean - half, mean + half], [row, row], color=COLORS[0], linewidth=2)
        axes.plot([run.mean(part) for run in seeds], [row] * len(seeds), "|", color=GREY)
        axes.plot(mean, row, "o", color=COLORS[0], markersize=5)
    label_rows(axes, runs)
    axes.set_xlabel(xlabel)
