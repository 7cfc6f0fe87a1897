"""Charts of a run as inline SVG that follows the page's light or dark theme.

Chart functions take rows of `metrics.jsonl` and return an `<svg>` element, or None if there is
nothing to draw. The output is deterministic: the same rows give the same bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from sage_fast.run_folder import FLOAT32_MAX
from sage_fast.util.meters import REWARD_PART
from sage_fast.util.profiling import PHASES, WAIT

MetricsRow = Mapping[str, Any]
Lines = Mapping[str, tuple[Sequence[MetricsRow], np.ndarray]]
"""Label -> rows, and one value per row."""

BLUE, ORANGE, GREEN, PURPLE = "#3f83e0", "#e0803a", "#35a06a", "#9567d8"
TEAL, RED, GREY = "#2aa3ad", "#dc5252", "#8a8f98"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, GREY)
# Placeholders that `themed_svg` replaces with the colours of the page's style sheet.
_TEXT, _LINE = "#010203", "#040506"

STYLE: Any = matplotlib.rc_params_from_file(
    Path(__file__).parent / "chart.mplstyle", use_default_template=False
)

_CHART: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.formatter.limits": (-3, 4),
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "text.parse_math": False,  # a reward's part may hold a "$"
}

METRICS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "reward/mean": ("Training reward", "mean over the batch", {}),
    "loss": ("Loss", "policy term + lambda x KL", {}),
    "reward/std": ("Reward spread within a group", "standard deviation", {}),
    "kl/anchor": ("KL to the anchor", "nats per element", {}),
    "kl/velocity": ("KL to the rollout policy", "nats per element", {}),
    "kl/gradient_share": ("The KL's share of the gradient", "share on the velocity", {"log": True}),
    "kl/lambda": ("KL weight", "lambda", {"log": True, "smoothed": False}),
    "ratio/clip_fraction": ("Clipped ratios", "share of transitions", {}),
    "log_prob/max_delta": ("Largest log-prob change", "|log ratio|", {"log": True}),
    "grad_norm": ("Gradient norm (before clipping)", "norm", {"log": True}),
    "time/total": ("Time of an iteration", "seconds", {}),
}
"""Metric -> title, axis label and options of `lines`."""


def column(rows: Sequence[MetricsRow], key: str) -> np.ndarray:
    """Return the values of `key` as float64 `[rows]`; NaN if missing, null or out of range for
    float32 (so invalid)."""
    return np.array([_number(row.get(key)) for row in rows], dtype=np.float64)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= FLOAT32_MAX else math.nan


def is_on(rows: Sequence[MetricsRow], key: str) -> bool:
    """Whether what a metric measures acts in a run: a KL or a limit that is off is logged as 0,
    beside a KL weight."""
    if not key.startswith(("kl/", "ratio/clip")):
        return True
    values = column(rows, "kl/gradient_share" if key == "kl/lambda" else key)
    return bool(np.isnan(values).all() or np.nanmax(np.abs(values)) > 0)


def themed_svg(figure: Figure, name: str, description: str) -> str:
    """Render the figure as an `<svg>` element without group ids or metadata; `name` makes its clip
    paths unique."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = (
        text.replace(_TEXT, "var(--ink)")
        .replace(_LINE, "var(--rule)")
        .replace("'DejaVu Sans', ", "")
    )
    for side in ("width", "height"):
        text = re.sub(rf'<svg ([^>]*?){side}="[^"]*" ', r"<svg \1", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)


def _chart(
    draw: Callable[[Axes], object], name: str, title: str, ylabel: str, xlabel: str = "iteration"
) -> str:
    """Render what `draw` puts on the axes, with a legend if it labels several things; `name` is
    unique on the page."""
    with matplotlib.rc_context({**STYLE, **_CHART}):
        figure = Figure(figsize=(4.3, 2.8), layout="constrained")
        axes = figure.add_subplot(title=title, xlabel=xlabel, ylabel=ylabel)
        axes.xaxis.set_major_locator(
            MaxNLocator(nbins=7, integer=xlabel == "iteration", min_n_ticks=1)
        )
        draw(axes)
        if axes.get_yscale() == "log":
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter())
        if len(labels := axes.get_legend_handles_labels()[1]) > 1:
            # about 64 characters in a row
            columns = max(1, min(len(labels), 4, 64 // (max(map(len, labels)) + 6)))
            figure.legend(
                loc="outside lower left", ncols=columns, handlelength=1.2, columnspacing=1.4
            )
        return themed_svg(figure, name, html.escape(title))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Running mean over `window` rows (no more than there are) that ignores NaN; a NaN input stays
    NaN."""
    present = ~np.isnan(values)
    sums, counts = (
        np.convolve(x, np.ones(window), "same") for x in (np.where(present, values, 0), present)
    )
    return np.where(present, sums / np.maximum(counts, 1), np.nan)


def lines(
    data: Lines, *, name: str, title: str, ylabel: str, log: bool = False, smoothed: bool = True
) -> str | None:
    """Draw lines over iterations, with a running mean over a fifteenth of the run on top.

    Args:
        data: labels without any value are skipped.
        name: unique on the page.
        title: heading.
        ylabel: axis label with the unit.
        log: use a logarithmic axis if positive values differ by more than a factor of 20; others
            become gaps.
        smoothed: add the running mean (from 30 rows on).
    """
    data = {
        label: (rows, values)
        for label, (rows, values) in data.items()
        if not np.isnan(values).all()
    }
    if not data:
        return None
    positive = np.concatenate([values[values > 0] for _, values in data.values()])
    log = log and len(positive) > 0 and positive.max() > 20 * positive.min()

    def draw(axes: Axes) -> None:
        if log:
            axes.set_yscale("log", nonpositive="mask")
        for color, (label, (rows, values)) in zip(COLORS * 3, data.items()):
            x, window = (
                column(rows, "iteration") + 1,
                len(rows) // 15 if smoothed and len(rows) >= 30 else 1,
            )
            if window > 1:
                axes.plot(x, values, color=color, alpha=0.3, linewidth=0.9)
            dots: dict[str, Any] = {"marker": "o", "markersize": 3} if len(rows) <= 40 else {}
            # a point between gaps has no line
            axes.plot(x, smooth(values, window), color=color, label=label, **dots)

    return _chart(draw, name, title, ylabel)


def metric(key: str, runs: Mapping[str, Sequence[MetricsRow]]) -> str | None:
    """Draw one of `METRICS` or a part of the reward, of the runs in which it acts; `runs` are rows
    by label."""
    title, ylabel, options = METRICS.get(
        key, (key.removeprefix(REWARD_PART), "mean over the batch", {})
    )
    data = {label: (rows, column(rows, key)) for label, rows in runs.items() if is_on(rows, key)}
    return lines(data, name=key, title=title, ylabel=ylabel, **options)


def ratio(rows: Sequence[MetricsRow]) -> str | None:
    """Draw the importance ratio minus 1: its largest, mean and smallest value."""
    data = {key: (rows, column(rows, f"ratio/{key}") - 1) for key in ("max", "mean", "min")}
    return lines(data, name="ratio", title="Importance ratio", ylabel="ratio - 1", smoothed=False)


def phases(rows: Sequence[MetricsRow]) -> str | None:
    """Draw seconds per iteration by phase."""
    known = {key: (rows, column(rows, f"time/{key}")) for key in (*PHASES, WAIT)}
    # a phase that is off takes microseconds
    least = 1e-3 * sum(np.nansum(values) for _, values in known.values())
    data = {key: line for key, line in known.items() if np.nansum(line[1]) > least}
    return lines(data, name="phases", title="Time by phase", ylabel="seconds per iteration")


Points = Mapping[int, tuple[float, float]]
"""Iteration -> score and the half-width of its 95 % interval (NaN if unknown)."""


def held_out(
    points: Mapping[str, Points], title: str = "Held-out reward", least: int = 3
) -> str | None:
    """Draw scores of evaluations by iteration, with 95 % intervals and one line per label.

    Returns None if no line has `least` points.
    """
    if max(map(len, points.values()), default=0) < least:
        return None
    known = any(math.isfinite(margin) for line in points.values() for _, margin in line.values())

    def draw(axes: Axes) -> None:
        for color, (label, line) in zip(
            COLORS * 3, ((label, line) for label, line in points.items() if line)
        ):
            x = sorted(line)
            means, errors = zip(*(line[i] for i in x))
            axes.errorbar(
                x, means, yerr=errors, color=color, marker="o", markersize=4, capsize=3, label=label
            )

    name = re.sub(r"\W+", "-", title.lower())
    return _chart(draw, name, title, "mean reward ± 95 %" if known else "mean reward")
