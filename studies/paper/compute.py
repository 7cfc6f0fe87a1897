"""Reward for compute: the cost of a variant's run on the 8.3 B model against its gain in the
world of shapes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from sage_fast.report.charts import BLUE, GREY, ORANGE
from studies.differences import holm
from studies.finding import LEVEL, Claim, Finding, Material, Verdict
from studies.paper.comparisons import margin_of
from studies.paper.training import config_of, protocol
from studies.runs import difference, exaflops, mean_interval

DEFAULT = "dual"
"""The variant with the settings of configs/recipes/paper.yaml."""


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names on the Pareto front of (cost, gain), by rising cost."""
    found: list[str] = []
    for name, (_, gain) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if not found or gain > points[found[-1]][1]:
            found.append(name)
    return found


def _find(material: Material) -> Finding:
    cost = {name: sum(exaflops(config_of(name, 0)).values()) for name in material.runs}
    # Each evaluation is a point.
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    for name, seeds in material.runs.items():
        start, *later = zip(*(run.course().items() for run in seeds))
        base = np.mean([score for _, score in start])
        curves[name] = {
            point[0][0]: (
                point[0][0] * cost[name],
                float(np.mean([score for _, score in point]) - base),
            )
            for point in later
        }
    last = max(i for curve in curves.values() for i in curve)
    points = {f"{name}, {i}": point for name, curve in curves.items() for i, point in curve.items()}
    rows = [
        {"variant": name, "iterations": i, "exaflops": flops, "gain": gain}
        for name, curve in curves.items()
        for i, (flops, gain) in curve.items()
    ]
    on_front = front(points)
    ends = {name: mean_interval(seeds) for name, seeds in material.runs.items()}
    cheaper = [name for name in material.runs if cost[name] <= cost[DEFAULT] and name != DEFAULT]
    ahead = holm(
        {name: difference(material.runs[name], material.runs[DEFAULT]) for name in cheaper}
    )
    better = [name for name, d in ahead.items() if d.value > 0 and d.corrected < LEVEL]
    best = max(cheaper, key=lambda name: ends[name][0])
    named = f": {', '.join(better)}" if better else ""
    text = (
        f"Of {len(cheaper)} variants that cost no more, {len(better)} end higher after the "
        "correction"
        f"{named}; {best} has the highest mean, {ahead[best]} (p "
        f"{ahead[best].corrected:.2g}). The front of gain for cost, the best of {len(points)} "
        "means, flatters; "
        f"before iteration {last} the learning rate had not fallen to 0."
    )
    table = [["variant, iterations", "exaFLOPs", "gain"]]
    table += [[name, f"{points[name][0]:.1f}", f"{points[name][1]:+.3f}"] for name in on_front]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot(
                *zip(*curve.values()),
                color=ORANGE if name == DEFAULT else GREY,
                alpha=1 if name == DEFAULT else 0.35,
            )
        axes.step(*zip(*(points[name] for name in on_front)), where="post", color=BLUE, linewidth=2)
        for name in on_front:
            axes.annotate(
                name, points[name], fontsize=7.5, xytext=(4, -9), textcoords="offset points"
            )
        axes.set_xscale("log")
        for kind in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            kind("{x:g}")
        axes.set_xlabel("exaFLOPs of the run with the 8.3 B model (sage-fast train --dry-run)")
        axes.set_ylabel("gain of the held-out composite, mean of the seeds")

    margin = margin_of(material.runs)
    excluded = all(d.high < margin for d in ahead.values())
    verdict: Verdict = "not held" if better else "held" if excluded else "not decidable"
    return Finding(verdict=verdict, text=text, draw=draw, rows=rows, table=table)


CLAIMS = (
    Claim(
        name="compute",
        title="Reward for compute",
        kind="beyond",
        source="",
        says="No variant that costs no more than recipes/paper.yaml ends higher.",
        find=_find,
        variants=tuple(protocol()),
        size=(10.0, 5.0),
    ),
)
