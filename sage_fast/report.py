"""`report.html` of a run: one self-contained page with curves, warning signs and videos before and after."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from sage_fast.metrics import read_lines

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLORS = ("#3b6fb6", "#d1603d", "#3d9970", "#8e5ea2", "#b8860b", "#666666")
_REWARD_WORDS = {"mean", "std", "zero_std_groups", "dropped"}


# -- scores before and after ------------------------------------------------------------------------------------------


def paired_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Composite reward and its parts before and after, with the paired difference and its standard error.

    Args:
        before, after: evaluations of the same prompts and seeds (`Evaluation.to_json`).

    Raises:
        ValueError: they are not paired.
    """
    for key in ("prompts", "seeds"):
        if before[key] != after[key]:
            raise ValueError(f"evaluations are not paired: their {key} differ")
    names = {"composite": (before["reward"], after["reward"])}
    names |= {part: (before["parts"][part], after["parts"][part]) for part in before["parts"]}
    rows = []
    for name, (old, new) in names.items():
        difference = [b - a for a, b in zip(old, new)]
        mean, error = mean_and_error(difference)
        rows.append(
            {
                "name": name,
                "before": sum(old) / len(old),
                "after": sum(new) / len(new),
                "difference": mean,
                "standard_error": error,
                "standard_errors": mean / error if error else math.nan,
                "count": len(old),
            }
        )
    return rows


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of the mean (0 for fewer than two values)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def format_paired_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for a terminal."""
    lines = [f"held-out prompts, {rows[0]['count']} videos, same seeds", ""]
    lines.append(f"{'reward':<12}{'before':>10}{'after':>10}{'change':>10}{'std. error':>12}{'in std. errors':>16}")
    for row in rows:
        lines.append(
            f"{row['name']:<12}{row['before']:>10.4f}{row['after']:>10.4f}{row['difference']:>+10.4f}"
            f"{row['standard_error']:>12.4f}{row['standard_errors']:>+16.1f}"
        )
    return "\n".join(lines)


def format_scores(evaluation: Mapping[str, Any]) -> str:
    """Mean and standard error of one evaluation, for a terminal."""
    lines = [f"{len(evaluation['reward'])} videos", "", f"{'reward':<12}{'mean':>10}{'std. error':>12}"]
    for name, values in {"composite": evaluation["reward"], **evaluation["parts"]}.items():
        mean, error = mean_and_error(values)
        lines.append(f"{name:<12}{mean:>10.4f}{error:>12.4f}")
    return "\n".join(lines)


# -- the page ---------------------------------------------------------------------------------------------------------


def write_report(run: Path) -> Path:
    """Write `report.html` into the run folder, finished or not.

    Raises:
        ValueError: the folder holds no run.
    """
    missing = [name for name in ("config.yaml", "run.json") if not (run / name).is_file()]
    if missing:
        raise ValueError(f"{str(run)!r} is no run folder: {missing[0]} is missing")
    rows = _read_rows(run / "metrics.jsonl")
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    evaluations = {name: _read_json(run / "eval" / f"{name}.json") for name in ("before", "after")}
    table = paired_table(evaluations["before"], evaluations["after"]) if all(evaluations.values()) else None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.j2").render(
        name=run.name,
        rows=len(rows),
        table=table,
        charts=_charts(rows, facts),
        warnings=_warnings(rows),
        videos=_videos(run, evaluations),
        facts={key: value for key, value in facts.items() if not isinstance(value, list)},
        notes=facts.get("notes", []),
        config=(run / "config.yaml").read_text(encoding="utf-8"),
    )
    path = run / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
    return rows


def _warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Signs of reward hacking or of a broken run, from the last tenth against the first tenth of the iterations."""
    if len(rows) < 10:
        return []
    tenth = len(rows) // 10

    def change(key: str) -> tuple[float, float]:
        values = [row[key] for row in rows if row.get(key) is not None]
        if len(values) < 2 * tenth:
            return math.nan, math.nan
        return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth

    warnings = []
    start, end = change("reward/mean")
    if end > start:
        for part in _parts(rows):
            first, last = change(f"reward/{part}")
            if last < first - 0.1 * abs(end - start):
                warnings.append(f"{part} fell from {first:.3f} to {last:.3f} while the composite rose: reward hacking?")
    _, zero = change("reward/zero_std_groups")
    if zero > 0.3:
        warnings.append(f"{zero:.0%} of the late groups have equal rewards: little is left to learn from these prompts")
    _, clipped = change("ratio/clip_fraction")
    if clipped > 0.7:
        warnings.append(
            f"{clipped:.0%} of the late ratios are clipped: lower the learning rate or widen the clip range"
        )
    first, last = change("reward/std")
    if last < 0.3 * first:
        warnings.append(f"the spread within groups fell from {first:.3g} to {last:.3g}: exploration is collapsing")
    dropped = sum(row.get("reward/dropped") or 0 for row in rows)
    if dropped:
        warnings.append(f"{int(dropped)} sample(s) were dropped because their reward failed")
    return warnings


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = {key.removeprefix("reward/") for row in rows for key in row if key.startswith("reward/")}
    return sorted(names - _REWARD_WORDS)


def _charts(rows: Sequence[dict[str, Any]], facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, SVG) of every curve that the metrics hold."""
    if not rows:
        return []

    def lines(keys: Mapping[str, str], ylabel: str, log: bool = False) -> Callable[[Any], None] | None:
        series = {
            label: [math.nan if row.get(key) is None else row[key] for row in rows]
            for key, label in keys.items()
            if any(row.get(key) is not None for row in rows)
        }
        if not series:
            return None

        def draw(axes: Any) -> None:
            x = [row["iteration"] + 1 for row in rows]
            for (label, values), color in zip(series.items(), _COLORS):
                axes.plot(x, values, color=color, label=label, lw=1.4, marker="." if len(x) < 12 else None)
            positive = any(value > 0 for values in series.values() for value in values)
            if log and positive:
                axes.set_yscale("log")
            elif not log:
                axes.ticklabel_format(axis="y", scilimits=(-3, 4))
            axes.set(xlabel="iteration", ylabel=ylabel)
            if len(series) > 1:
                axes.legend(frameon=False, fontsize=8)

        return draw

    parts = {f"reward/{part}": part for part in _parts(rows)}
    phases = ("rollout", "decode", "reward", "anchor", "train", "optimizer")
    charts = {
        "Composite reward": lines({"reward/mean": "reward"}, "reward"),
        "Its parts": lines(parts, "reward"),
        "Spread of the reward within groups": lines({"reward/std": "std"}, "std"),
        "KL": lines({"kl/anchor": "anchor (position)", "kl/velocity": "rollout policy (velocity)"}, "KL per element"),
        "KL weight": lines({"kl/lambda": "lambda"}, "lambda"),
        "Ratio": lines({"ratio/max": "max", "ratio/mean": "mean", "ratio/min": "min"}, "ratio"),
        "Clip fraction": lines({"ratio/clip_fraction": "clipped"}, "share of transitions"),
        "Gradient norm": lines({"grad_norm": "before clipping"}, "norm", log=True),
        "Gradient norm by timestep": _by_timestep(rows, facts),
        "Time by phase": _stacked(rows, [p for p in phases if any(row.get(f"time/{p}") for row in rows)]),
        "Groups with equal rewards": lines({"reward/zero_std_groups": "share"}, "share of groups"),
    }
    return [(title, _svg(draw)) for title, draw in charts.items() if draw is not None]


def _by_timestep(rows: Sequence[dict[str, Any]], facts: Mapping[str, Any]) -> Callable[[Any], None] | None:
    norms = [row["velocity_grad_norm"] for row in rows if row.get("velocity_grad_norm")]
    sigmas = facts.get("sigmas", [])
    if not norms or len(sigmas) <= len(norms[0]):
        return None
    columns = [[value for value in column if value is not None] for column in zip(*norms)]

    def draw(axes: Any) -> None:
        picks = [(sigmas[t], column) for t, column in enumerate(columns) if column]
        x = [sigma for sigma, _ in picks]
        axes.plot(x, [sum(column) / len(column) for _, column in picks], color=_COLORS[0], marker="o", ms=3, lw=1.4)
        axes.fill_between(x, [min(c) for _, c in picks], [max(c) for _, c in picks], color=_COLORS[0], alpha=0.15, lw=0)
        axes.set(xlabel="sigma", ylabel="norm at the velocity (mean, range)")
        axes.set_ylim(bottom=0)
        axes.invert_xaxis()

    return draw


def _stacked(rows: Sequence[dict[str, Any]], phases: Sequence[str]) -> Callable[[Any], None] | None:
    if not phases:
        return None

    def draw(axes: Any) -> None:
        x = [row["iteration"] + 1 for row in rows]
        series = [[row.get(f"time/{phase}") or 0.0 for row in rows] for phase in phases]
        axes.stackplot(x, series, labels=phases, colors=_COLORS, alpha=0.85)
        axes.set(xlabel="iteration", ylabel="seconds")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, ncols=2)

    return draw


def _svg(draw: Callable[[Any], None]) -> str:
    """A chart without a background of its own, so that the page's theme shows through."""
    style = {"svg.hashsalt": "sage-fast", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    gray = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808080")
    with plt.rc_context(style | gray):
        figure, axes = plt.subplots(figsize=(4.6, 2.7), layout="constrained")
        draw(axes)
        axes.grid(alpha=0.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = buffer.getvalue()
    return "data:image/svg+xml;base64," + base64.b64encode(text[text.index("<svg") :].encode()).decode()


def _videos(run: Path, evaluations: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Prompt, and for before and after the MP4 as a data URI with its reward."""
    rows = []
    for path in sorted((run / "videos" / "before").glob("*.mp4")):
        index = int(path.name[:2])
        row: dict[str, Any] = {"prompt": evaluations["before"]["prompts"][index], "clips": []}
        for name in ("before", "after"):
            clip = run / "videos" / name / path.name
            if clip.is_file() and evaluations[name]:
                uri = "data:video/mp4;base64," + base64.b64encode(clip.read_bytes()).decode()
                row["clips"].append({"label": name, "uri": uri, "reward": evaluations[name]["reward"][index]})
        rows.append(row)
    return rows
