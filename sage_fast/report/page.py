"""The report: a self-contained HTML page for a run folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_fast.config.loader import leaves, read_yaml
from sage_fast.eval.hacking import judge_hacked, verdict
from sage_fast.eval.scores import (
    TOO_FEW,
    PairedRow,
    columns_of,
    format_number,
    mean_and_margin,
    paired_table,
    read_evaluations,
)
from sage_fast.eval.videoset import VideoSet, of_run
from sage_fast.report import charts
from sage_fast.report.charts import MetricsRow, column
from sage_fast.report.html import render
from sage_fast.report.shown import cards
from sage_fast.util.environment import PACKAGES
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics, write_atomic
from sage_fast.util.metrics import JUDGE_PART, REWARD_PART

STEPS = ("sigmas", "transition_std", "equalizer")
"""Lists of `run.json` with a value for each step of a rollout."""

# -- the run folder ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The content of a run folder.

    Attributes:
        folder: its path.
        config: resolved settings as YAML text.
        settings: the same as dotted name -> value.
        facts: `run.json`: command, commit, versions, device, sampler notes; empty if the file is missing.
        rows: iterations, from `metrics.jsonl`.
        evaluations: file stem (`before`, `iteration-000010`, `after`) -> scores.
        left_out: a note on each damaged file.
    """

    folder: Path
    config: str
    settings: dict[str, Any]
    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    evaluations: dict[str, dict[str, Any]]
    left_out: list[str]

    @property
    def last(self) -> str | None:
        """The newest evaluation, to compare with `before`; a continued run may be past its `after`."""
        later = [(scores["iteration"], name) for name, scores in self.evaluations.items() if name != "before"]
        return max(later, key=lambda found: (found[0], found[1] == "after"), default=(0, None))[1]


def read_run(folder: Path) -> RunFiles:
    """Read a run folder, finished or not. Damaged evaluations are left out.

    Raises:
        UserError: the folder is missing, holds no run (names what is missing), or its settings, facts or metrics are
            damaged (names file and line).
    """
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r}: no such folder")
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{str(folder)!r} is no run folder: config.yaml is missing")
    if not (folder / "metrics.jsonl").is_file() and not (folder / "run.json").is_file():
        raise UserError(f"{str(folder)!r} holds a run that has not begun: run.json and metrics.jsonl are missing")
    evaluations, left_out = read_evaluations(folder)
    facts = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    _check_facts(facts, folder / "run.json")
    return RunFiles(
        folder=folder,
        config=(folder / "config.yaml").read_text(encoding="utf-8"),
        settings=leaves(read_yaml(folder / "config.yaml")),
        facts=facts,
        rows=read_metrics(folder / "metrics.jsonl"),
        evaluations=evaluations,
        left_out=left_out,
    )


def _check_facts(facts: Mapping[str, Any], file: Path) -> None:
    """Check the types of what the page reads from `run.json`.

    Raises:
        UserError: a field does not hold what a run writes.
    """
    kinds: dict[str, Any] = {"notes": str, "resumed": dict} | dict.fromkeys(STEPS, int | float)
    for name, kind in kinds.items():
        values = facts.get(name) or []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise UserError(f"{file}: {name!r} does not hold what it should")
    for start in (facts, *(facts.get("resumed") or [])):
        for name in ("date", "commit", "command", "method"):
            if not isinstance(start.get(name), str | None):
                raise UserError(f"{file}: {name!r} does not hold what it should")


# -- warning signs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A check for reward hacking or a broken run: its name, its result, and whether that is a warning."""

    name: str
    found: str
    warning: bool


def checks(rows: Sequence[MetricsRow], table: Sequence[PairedRow], since: str | None = None) -> list[Check]:
    """Return the checks to read before believing a rising reward; checks without data are skipped.

    Shares are means over the last quarter of the run. A part has risen or fallen if the interval of its change excludes
    0; without an interval it is not judged.

    Args:
        rows: iterations.
        table: the first evaluation against the last.
        since: `hacking.verdict` over all evaluations.
    """
    found: list[Check] = []

    def look(name: str, text: str, warning: bool) -> None:
        found.append(Check(name=name, found=text, warning=warning))

    quarter = max(1, len(rows) // 4)
    early, late = (lambda key: _mean(rows[:quarter], key)), (lambda key: _mean(rows[-quarter:], key))
    long_enough = len(rows) >= 8

    share = late("reward/zero_std_groups")
    if share is not None:
        text = f"{_percent(share)} (warns above 25%): they teach nothing"
        look("Groups whose rewards are all equal", text, share > 0.25)
    clipped = late("ratio/clip_fraction")
    if clipped is not None and charts.is_on(rows, "ratio/clip_fraction"):
        look("Clipped ratios", f"{_percent(clipped)} (warns above 30%): a high share wastes updates", clipped > 0.3)
    acting = late("kl/gradient_share")
    if acting:
        text = _percent(acting) if acting >= 0.01 else f"{acting:.0e}"
        look("The KL's share of the gradient", f"{text} (below 1e-3 the KL does nothing)", False)
    first, last = early("reward/std"), late("reward/std")
    if long_enough and first and last is not None:
        text = f"{_percent(last / first)} of its first quarter (warns below 30%, where samples look alike)"
        look("Reward spread within a group", text, last < 0.3 * first)
    if any("reward/dropped" in row for row in rows):
        dropped = float(np.nansum(column(rows, "reward/dropped")))
        look("Samples dropped for a failed reward", f"{dropped:.0f}", dropped > 0)
    parts = [row for row in table[1:] if row.margin is not None and not row.name.startswith(JUDGE_PART)]
    if len(parts) > 1:
        risen, fallen = ([row.name for row in parts if row.direction == way] for way in ("up", "down"))
        text = f"risen: {', '.join(risen) or 'none'}; fallen: {', '.join(fallen) or 'none'}"
        look("One part bought with another (held-out)", text, bool(risen and fallen))
    judged = [row for row in table if row.margin is not None and row.name.startswith(JUDGE_PART)]
    if judged:
        hacked = judge_hacked(table) or since
        change = [
            f"{row.name.removeprefix(JUDGE_PART)} {format_number(row.difference, 3, sign=True)}" for row in judged
        ]
        look("Held-out reward against the judge", hacked or f"judge: {', '.join(change)}", hacked is not None)
    start, end = early("reward/mean"), late("reward/mean")
    if long_enough and table and table[0].margin is not None and start is not None and end is not None:
        rise, fall = (format_number(change, 3, sign=True) for change in (end - start, table[0].difference))
        text = f"training {rise} from first to last quarter, held-out {fall}"
        look("Training reward against held-out reward", text, end > start and table[0].direction == "down")
    if rows:
        gaps = sum(1 for row in rows if any(_is_gap(value) for value in row.values()))
        look("Iterations with a value that is not finite", str(gaps), gaps > 0)
    return found


def _mean(rows: Sequence[MetricsRow], key: str) -> float | None:
    values = column(rows, key)
    return float(np.nanmean(values)) if not np.isnan(values).all() else None


def _percent(share: float) -> str:
    return f"{format_number(100 * share, 0)}%"


def _is_gap(value: object) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


# -- the page ---------------------------------------------------------------------------------------------------------


def write_report(run: Path) -> Path:
    """Write `report.html`, a self-contained page, into the run folder.

    Returns:
        The path of the page.

    Raises:
        UserError: as `read_run`.
    """
    data = read_run(run)
    count = data.settings.get("eval.num_videos")
    videos = cards(_sides(data), count if isinstance(count, int) and count > 0 else 6, data.left_out)
    before, last = data.evaluations.get("before"), data.evaluations.get(data.last or "")
    table = paired_table(before, last) if before and last else []
    page = render(
        "report.html.j2",
        name=data.folder.resolve().name,
        status=_status(data),
        method=data.facts.get("method"),
        table=table,
        last=_label(data, data.last),
        checks=checks(data.rows, table, verdict(data.evaluations)),
        charts=_charts(data),
        steps=_steps(data.facts),
        videos=videos,
        left_out=data.left_out,
        environment=_environment(data.facts),
        too_few=TOO_FEW,
        notes=data.facts.get("notes") or [],
        config=data.config,
    )
    path = data.folder / "report.html"
    write_atomic(path, page)
    return path


def _status(data: RunFiles) -> str:
    planned, done = data.settings.get("train.iterations"), len(data.rows)
    if not done:
        return "No iteration has been completed yet."
    if isinstance(planned, int) and done < planned:
        return f"Stopped early, or still running: {done} of {planned} iterations."
    seconds = float(np.nansum(column(data.rows, "time/total")))
    return f"{done} iterations" + (f" in {_duration(seconds)} of training." if seconds else ".")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _steps(facts: Mapping[str, Any]) -> list[tuple[float, float, float | None]]:
    """Return (sigma, std of the noise, S_t if there is an equalizer) for each step, if the sampler adds noise."""
    sigmas, noise, equalizer = (facts.get(name) or [] for name in STEPS)
    return list(zip(sigmas, noise, equalizer or [None] * len(noise))) if any(noise) else []


def _environment(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, text, command) for each start of the run, then for its environment; lists are not shown."""
    found = []
    starts = [("started", facts), *(("resumed", start) for start in facts.get("resumed") or [])]
    for label, start in starts:
        after = f"after {start.get('iteration')} iterations" if label == "resumed" else None
        commit = f"commit {start['commit']}" if start.get("commit") else None
        text = ", ".join(part for part in (after, start.get("date"), commit) if part)
        found += [(label, text, start.get("command", ""))] if text else []
    versions = [name for name in ("sage_fast", "python", *PACKAGES) if name in facts]
    for key, value in facts.items():
        if key in ("date", "commit", "command", "method", *versions) or value is None or isinstance(value, list | dict):
            continue
        number = isinstance(value, int) and not isinstance(value, bool)
        found.append((key.replace("_", " "), f"{value:,}" if number else str(value), ""))
    if versions:
        found.append(("versions", ", ".join(f"{name.replace('_', '-')} {facts[name]}" for name in versions), ""))
    return found


def _label(data: RunFiles, name: str | None) -> str:
    return "after" if name in ("after", None) else f"iteration {data.evaluations[str(name)]['iteration']}"


def _charts(data: RunFiles) -> list[str]:
    """Return the SVG charts in reading order, with all text escaped."""
    rows = data.rows
    parts = {key: key.removeprefix(REWARD_PART) for row in rows for key in row if key.startswith(REWARD_PART)}
    drawn = [charts.held_out({"reward": points_of(data, "reward")})]
    for part in sorted({part for scores in data.evaluations.values() for part in scores["parts"]}):
        if part.startswith(JUDGE_PART):
            title = f"Held-out judge: {part.removeprefix(JUDGE_PART)}"
            drawn.append(charts.held_out({part: points_of(data, part)}, title, "mean score"))

    def metric(key: str) -> str | None:
        title, ylabel, options = charts.METRICS[key]
        if not charts.is_on(rows, key):
            return None
        return charts.lines({title: (rows, column(rows, key))}, name=key, title=title, ylabel=ylabel, **options)

    part_lines = {label: (rows, column(rows, key)) for key, label in parts.items()}
    drawn += [
        metric("reward/mean"),
        charts.lines(part_lines, name="parts", title="Its parts", ylabel="mean over the batch"),
        *map(metric, ("reward/std", "kl/anchor", "kl/velocity", "kl/gradient_share", "kl/lambda")),
        charts.ratio(rows),
        *map(metric, ("ratio/clip_fraction", "log_prob/max_delta", "grad_norm")),
        charts.gradient_by_sigma(rows, data.facts.get("sigmas")),
        charts.phases(rows),
    ]
    return [chart for chart in drawn if chart is not None]


def points_of(data: RunFiles, name: str) -> dict[int, tuple[float, float]]:
    """Return iteration -> mean of a score and the half-width of its 95 % interval (NaN if unknown)."""
    points = {}
    for scores in data.evaluations.values():
        mean, margin = mean_and_margin(scores["prompts"], columns_of(scores).get(name, []))
        if math.isfinite(mean):
            points[int(scores["iteration"])] = (mean, math.nan if margin is None else margin)
    return points


def _sides(data: RunFiles) -> list[VideoSet]:
    """Return the videos before training and of the last evaluation, of those that exist.

    Only finished evaluations are used: the files of one in progress may be incomplete.
    """
    labels = {"before": "before"} if "before" in data.evaluations else {}
    labels |= {data.last: _label(data, data.last)} if data.last else {}
    return of_run(data.folder, data.evaluations, labels)
