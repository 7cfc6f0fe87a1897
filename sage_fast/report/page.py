"""The report: a self-contained HTML page for a run folder."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sage_fast.config.loader import leaves, read_yaml
from sage_fast.eval.comparison import compare, gain_line
from sage_fast.eval.gains import GainRow, hacking_in_run, table
from sage_fast.eval.scores import TOO_FEW, format_number
from sage_fast.eval.training_samples import shown_iterations
from sage_fast.eval.video_folder import read_folder, write_folder
from sage_fast.eval.videoset import VideoSet
from sage_fast.report import charts
from sage_fast.report.charts import MetricsRow, column
from sage_fast.report.html import cards, render, training_cards
from sage_fast.run_folder import STEPS, RunFolder
from sage_fast.util.console import wrapped
from sage_fast.util.environment import PACKAGES
from sage_fast.util.errors import UserError
from sage_fast.util.files import VIDEOS, json_value, write_atomic
from sage_fast.util.meters import JUDGE_PART, REWARD_PART
from sage_fast.util.text import counted

log = logging.getLogger(__name__)

# -- the run folder --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run, finished or not.

    Attributes:
        folder: its folder.
        settings: dotted name -> value.
        evaluations: name -> videos of each, as `RunFolder.video_sets` returns them.
    """

    folder: RunFolder
    settings: dict[str, Any]
    evaluations: dict[str, VideoSet]

    @property
    def ends(self) -> list[VideoSet]:
        """The evaluation before training and the last one, of those that exist."""
        names = dict.fromkeys(["before", *[*self.evaluations][-1:]])
        return [self.evaluations[name] for name in names if name in self.evaluations]

    @property
    def hacking(self) -> str | None:
        return hacking_in_run([*self.evaluations.values()])

    @functools.cached_property
    def points(self) -> dict[str, dict[int, tuple[float, float]]]:
        """Score -> iteration -> its mean and the half-width of its 95 % interval (NaN if
        unknown)."""
        found: dict[str, dict[int, tuple[float, float]]] = {}
        for videos in self.evaluations.values():
            for row in table([videos]):
                if math.isfinite(row.mean):
                    margin = math.nan if row.margin is None else row.margin
                    found.setdefault(row.score, {})[videos.iteration] = (row.mean, margin)
        return found


def read_run(path: Path) -> RunReport:
    """Read a run folder.

    Raises:
        UserError: the folder holds no run (names what is missing), or its settings, facts or
            metrics are damaged (names file and line).
    """
    folder = RunFolder(path)
    folder.check()
    if not folder.metrics_file.is_file() and not folder.facts_file.is_file():
        raise UserError(
            f"{str(path)!r} holds a run that has not begun: run.json and metrics.jsonl are missing"
        )
    return RunReport(
        folder=folder,
        settings=leaves(read_yaml(folder.config_file)),
        evaluations=folder.video_sets(),
    )


# -- warning signs ---------------------------------------------------------------------------------


class WarningSign(NamedTuple):
    """A check for reward hacking or a broken run: its name, its result, and whether that is a
    warning."""

    name: str
    found: str
    warning: bool


def checks(
    rows: Sequence[MetricsRow], gains: Sequence[GainRow], hacking: str | None = None
) -> Iterator[WarningSign]:
    """Yield the checks to read before believing a rising reward; checks without data are skipped.

    Shares are means over the last quarter of the run. A part has risen or fallen if the interval of
    its change excludes 0; without an interval it is not judged.

    Args:
        rows: iterations.
        gains: of the last evaluation over the first, the composite first.
        hacking: `hacking_in_run` of the evaluations.
    """
    quarter = max(1, len(rows) // 4)
    long_enough = len(rows) >= 8

    def early(key: str) -> float | None:
        return _mean(rows[:quarter], key)

    def late(key: str) -> float | None:
        return _mean(rows[-quarter:], key)

    share = late("reward/zero_std_groups")
    if share is not None:
        text = f"{share:.0%} (warns above 25%): they teach nothing"
        yield WarningSign("Groups whose rewards are all equal", text, share > 0.25)
    clipped = late("ratio/clip_fraction")
    if clipped is not None and charts.is_on(rows, "ratio/clip_fraction"):
        yield WarningSign(
            "Clipped ratios",
            f"{clipped:.0%} (warns above 30%): a high share wastes updates",
            clipped > 0.3,
        )
    acting = late("kl/gradient_share")
    if acting:
        text = f"{acting:.1g} (warns below 1e-3: it does nothing)"
        yield WarningSign("The KL's share of the gradient", text, acting < 1e-3)
    first, last = early("reward/std"), late("reward/std")
    if long_enough and first and last is not None:
        text = (
            f"{last / first:.0%} of its first quarter (warns below 30%, where samples look alike)"
        )
        yield WarningSign("Reward spread within a group", text, last < 0.3 * first)
    if any("reward/dropped" in row for row in rows):
        dropped = float(np.nansum(column(rows, "reward/dropped")))
        yield WarningSign("Samples dropped for a failed reward", f"{dropped:.0f}", dropped > 0)
    judged = [row for row in gains if row.gain_margin is not None]
    yield from _checks_of_evaluations(judged, hacking)
    start, end = early("reward/mean"), late("reward/mean")
    if long_enough and judged and start is not None and end is not None:
        training = format_number(end - start, 3, sign=True)
        heldout = format_number(judged[0].gain or 0, 3, sign=True)
        text = f"training {training} from first to last quarter, held-out {heldout}"
        yield WarningSign(
            "Training reward against held-out reward",
            text,
            end > start and judged[0].direction == "down",
        )
    if rows:
        gaps = 0
        for row in rows:
            if any(json_value(value) is None for value in row.values()):
                gaps += 1
        yield WarningSign("Iterations with a value that is not finite", str(gaps), gaps > 0)


def _checks_of_evaluations(judged: Sequence[GainRow], hacking: str | None) -> Iterator[WarningSign]:
    """Yield the checks that evaluations alone decide; arguments as of `checks`, gains with an
    interval."""
    parts = [row for row in judged[1:] if not row.score.startswith(JUDGE_PART)]
    if len(parts) > 1:
        risen = [row.score for row in parts if row.direction == "up"]
        fallen = [row.score for row in parts if row.direction == "down"]
        text = f"risen: {', '.join(risen) or 'none'}; fallen: {', '.join(fallen) or 'none'}"
        yield WarningSign("One part bought with another (held-out)", text, bool(risen and fallen))
    watched = {
        row.score.removeprefix(JUDGE_PART): row.gain
        for row in judged
        if row.score.startswith(JUDGE_PART)
    }
    if watched:
        change = ", ".join(
            f"{part} {format_number(gain or 0, 3, sign=True)}" for part, gain in watched.items()
        )
        yield WarningSign(
            "Held-out reward against the judge", hacking or f"judge: {change}", hacking is not None
        )


def _mean(rows: Sequence[MetricsRow], key: str) -> float | None:
    values = column(rows, key)
    if np.isnan(values).all():
        return None
    return float(np.nanmean(values))


# -- the page --------------------------------------------------------------------------------------


def write_report(folder: Path, running: bool = False) -> Path:
    """Write `report.html`, a self-contained page, into the run folder; of a running run it reloads
    itself.

    Returns:
        The path of the page.

    Raises:
        UserError: as `read_run`.
    """
    report = read_run(folder)
    run, settings = report.folder, report.settings
    sides = report.ends
    scores = table(sides) if len(sides) == 2 else []
    # the score before training, and then
    pairs = [(before, last) for before, last in itertools.pairwise(scores) if last.gain is not None]
    gains = [row for row in scores if row.gain is not None]

    count = settings.get("eval.num_videos")
    if not isinstance(count, int) or count < 1:
        count = 6
    left_out = list(run.evaluations[1])
    videos = cards(sides, count, left_out)
    training = _training_samples(run, left_out)

    page = render(
        "report.html.j2",
        name=folder.resolve().name,
        running=running,
        status=_status(
            run.rows, settings.get("train.iterations"), running, run.facts.get("stopped")
        ),
        method=run.facts.get("method"),
        table=pairs,
        last=sides[-1].label if sides else "",
        checks=list(checks(run.rows, gains, report.hacking)),
        charts=_charts(report),
        steps=_steps(run.facts),
        videos=videos,
        training=training,
        left_out=left_out,
        environment=_environment(run.facts),
        too_few=TOO_FEW,
        notes=run.facts.get("notes") or [],
        config=run.config_file.read_text(encoding="utf-8"),
    )
    write_atomic(run.report_file, page)
    return run.report_file


def report_run(folder: Path, complete: bool, running: bool = False) -> None:
    """Write `report.html`; of a complete run also log the table of its gains.

    A damaged evaluation or video is left out, with a note.

    Args:
        folder: the run folder.
        complete: whether the run has come to its end.
        running: whether it goes on.
    """
    gain = None
    if complete:
        run = RunFolder(folder)
        for note in run.evaluations[1]:
            log.warning(wrapped(f"note: {note}"))
        evaluations = run.video_sets()
        for name, videos in evaluations.items():  # so that other rewards can score the videos later
            kept = [i for i, file in enumerate(videos.files) if file is not None]
            if kept:
                write_folder(videos.only(kept), run.videos(name))
        if evaluations.keys() >= {"before", "after"}:
            ends = evaluations["before"], evaluations["after"]
            compared = compare(ends)
            log.info(compared.text)
            gain = gain_line(compared)
    page = write_report(folder, running)
    if complete:
        if gain is not None:
            log.info(gain)
        log.info(f"report: {page}")


def _training_samples(run: RunFolder, notes: list[str]) -> dict[str, Any] | None:
    """Return the newest iteration whose samples are shown, and their cards; None without any.

    Args:
        notes: receives a line for what is damaged and left out.
    """
    # A folder without its table is being written, or was left by a run that was killed there.
    complete = {
        iteration: folder
        for iteration, folder in shown_iterations(run.videos_folder).items()
        if (folder / VIDEOS).is_file()
    }
    if not complete:
        return None
    iteration, folder = list(complete.items())[-1]
    try:
        videos = read_folder("training", folder)
    except UserError as error:
        notes.append(f"left out, since it is damaged: {error}")
        return None
    return {"iteration": iteration, "cards": training_cards(videos, notes)}


def _status(
    rows: Sequence[MetricsRow], planned: object, running: bool, stopped: object = None
) -> str:
    done = len(rows)
    if not done:
        return "No iteration has been completed yet."
    if isinstance(planned, int) and done < planned:
        if stopped and not running:  # by a callback
            return f"Ended after {done} of {counted(planned, 'iteration')}: {stopped}"
        state = "Running" if running else "Stopped early, or still running"
        return f"{state}: {done} of {counted(planned, 'iteration')}."
    seconds = float(np.nansum(column(rows, "time/total")))
    if not seconds:
        return f"{counted(done, 'iteration')}."
    return f"{counted(done, 'iteration')} in {seconds / 60:.3g} min of training."


def _steps(facts: Mapping[str, Any]) -> list[tuple[float, float, float | None]]:
    """Return (sigma, std of the noise, S_t if there is an equalizer) for each step, if the sampler
    adds noise."""
    sigmas, noise, equalizer = (facts.get(name) or [] for name in STEPS)
    if not any(noise):
        return []
    weights = equalizer if equalizer else [None for _ in noise]
    return list(zip(sigmas, noise, weights))


def _environment(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, text, command) for each start of the run, then for its environment; lists are
    not shown."""
    found: list[tuple[str, str, str]] = []

    starts = [("started", facts)]
    for start in facts.get("resumed") or []:
        starts.append(("resumed", start))
    for label, start in starts:
        parts = []
        done = start.get("iteration")
        if label == "resumed" and isinstance(done, int):
            parts.append(f"after {counted(done, 'iteration')}")
        if start.get("date"):
            parts.append(start["date"])
        if start.get("commit"):
            parts.append(f"commit {start['commit']}")
        if parts:
            found.append((label, ", ".join(parts), start.get("command", "")))

    versions = [name for name in ("sage_fast", "python", *PACKAGES) if name in facts]
    shown_elsewhere = {"date", "commit", "command", "method", *versions}
    for key, value in facts.items():
        if key in shown_elsewhere or value is None or isinstance(value, list | dict):
            continue
        is_number = isinstance(value, int) and not isinstance(value, bool)
        text = f"{value:,}" if is_number else str(value)
        found.append((key.replace("_", " "), text, ""))

    if versions:
        named = [f"{name.replace('_', '-')} {facts[name]}" for name in versions]
        found.append(("versions", ", ".join(named), ""))
    return found


def _charts(run: RunReport) -> list[str]:
    """Return the SVG charts in reading order, with all text escaped."""
    rows, points = run.folder.rows, run.points
    drawn: list[str | None] = []

    scores = ["reward", *sorted(part for part in points if part.startswith(JUDGE_PART))]
    for name in scores:
        drawn.append(charts.held_out({name: points.get(name, {})}, f"Held-out {name}"))
    for key in charts.METRICS:
        drawn.append(charts.metric(key, {key: rows}))

    keys = {key: None for row in rows for key in row if key.startswith(REWARD_PART)}
    parts = {key.removeprefix(REWARD_PART): (rows, column(rows, key)) for key in keys}
    drawn.append(
        charts.lines(parts, name="parts", title="Parts of the reward", ylabel="mean over the batch")
    )

    drawn.append(charts.ratio(rows))
    drawn.append(charts.gradient_by_noise(rows, run.folder.facts.get("sigmas") or []))
    drawn.append(charts.phases(rows))
    return [chart for chart in drawn if chart is not None]
