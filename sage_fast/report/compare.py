"""`sage-fast compare`: compare runs, finished or not, on one page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sage_fast.config.schema import ODE_SAMPLERS
from sage_fast.eval.hacking import verdict
from sage_fast.eval.scores import columns_of, paired_table
from sage_fast.eval.videoset import VideoSet, check_prompts, of_run, read_folder, scorers_of, shown_name, table
from sage_fast.report import charts
from sage_fast.report.gallery import write_gallery
from sage_fast.report.page import RunFiles, points_of, read_run
from sage_fast.util.files import VIDEOS
from sage_fast.util.metrics import JUDGE_PART, REWARD_PART

PAGE = "comparison.html"


def read_sets(sources: Mapping[str, Path]) -> tuple[dict[str, RunFiles], list[VideoSet], list[str]]:
    """Read run folders and folders of videos.

    Args:
        sources: label -> folder.

    Returns:
        The runs by label, the newest evaluation of each source that has one, and notes.

    Raises:
        UserError: a folder is neither, or two sources have no evaluated prompt in common.
    """
    runs, sets, notes = {}, [], []
    for label, path in sources.items():
        if (path / VIDEOS).is_file():
            sets.append(read_folder(label, path))
            continue
        runs[label] = run = read_run(path)
        notes += [f"{label}: {note}" for note in run.left_out]
        newest = run.last or ("before" if "before" in run.evaluations else None)
        if newest is None:
            notes.append(f"{label} has no evaluation yet.")
            continue
        (found,) = of_run(path, run.evaluations, {newest: label})
        sets.append(dataclasses.replace(found, scorers=_scorers(run)))
        if newest != "after":
            notes.append(f"{label} is shown {'before training' if newest == 'before' else f'at {newest}'}.")
    for videos in sets[1:]:
        notes += check_prompts(sets[0], videos)
    return runs, sets, notes


def _scorers(run: RunFiles) -> dict[str, str]:
    """Return score -> what computed it, for evaluations and training rewards."""
    reward = {key.removeprefix("reward."): value for key, value in run.settings.items() if key.startswith("reward.")}
    parts = {key.removeprefix(REWARD_PART) for row in run.rows for key in row if key.startswith(REWARD_PART)}
    parts |= {part for scores in run.evaluations.values() for part in scores["parts"]}
    newest = run.evaluations.get(run.last or "before", {})
    watching = {JUDGE_PART: run.settings.get("eval.judge")}
    return scorers_of(reward, watching, {"parts": parts, "weights": newest.get("weights")})


def write_compare(
    sources: Mapping[str, Path],
    folder: Path,
    count: int,
    rescore: Callable[[Sequence[VideoSet]], Sequence[VideoSet]] = lambda sets: sets,
) -> Path:
    """Write a page that compares runs, finished or not.

    Args:
        sources: label -> run folder or folder of videos.
        folder: created if missing.
        count: rows of videos on the page.
        rescore: adds the scores of a scorer that all sources share.

    Returns:
        The path of the page.

    Raises:
        UserError: as `read_sets` and `rescore`.
    """
    runs, found_sets, notes = read_sets(sources)
    sets = rescore(found_sets)
    rows = table(sets) if sets else []
    own = {
        (label, row.name): row
        for label, run in runs.items()
        if run.last is not None and "before" in run.evaluations
        for row in paired_table(run.evaluations["before"], run.evaluations[run.last])
    }
    found = {label: verdict(run.evaluations) for label, run in runs.items()}
    if sets and not set.intersection(*(set(videos.shown) for videos in sets)):
        notes.append("No videos are shown: no prompt has one of every source. sage-fast eval samples them alike.")
        count = 0
    path = folder / PAGE
    folder.mkdir(parents=True, exist_ok=True)
    write_gallery(
        path,
        title=" · ".join(sources),
        sets=sets,
        rows=rows,
        count=count,
        notes=notes,
        warnings=[f"{label}: {text}" for label, text in found.items() if text],
        own=own,
        charts=_charts(runs),
        settings=_differing(runs),
    )
    return path


def _differing(runs: Mapping[str, RunFiles]) -> list[list[str]]:
    """Return a header and the settings that differ between runs, with a dash where one has no effect; [] if none do."""
    flat = [{key: str(value) for key, value in run.settings.items() if _acts(key, run)} for run in runs.values()]
    names = sorted({name for settings in flat for name in settings} - {"output"})
    rows = [[name, *(settings.get(name, "\N{EN DASH}") for settings in flat)] for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return [["setting", *runs], *differing] if differing else []


def _acts(key: str, run: RunFiles) -> bool:
    if key == "sampling.eta":
        return run.settings.get("sampling.sampler") not in ODE_SAMPLERS
    return not key.startswith("kl.") or key == "kl.strategy" or charts.is_on(run.rows, "kl/lambda")


def _charts(runs: Mapping[str, RunFiles]) -> list[str]:
    """Draw every score and metric; a score only of the runs with the scorer of the first run that has it."""
    drawn, scorers = [], {label: _scorers(run) for label, run in runs.items()}

    def alike(score: str) -> list[str]:
        known = {label: found[score] for label, found in scorers.items() if score in found}
        return [label for label, scorer in known.items() if scorer == next(iter(known.values()))]

    scores = {name for run in runs.values() for found in run.evaluations.values() for name in columns_of(found)}
    for score in sorted(scores, key=lambda name: (name != "reward", name)):
        points = {label: points_of(runs[label], score) for label in alike(score)}
        drawn.append(charts.held_out(points, f"Held-out {shown_name(score)}", "mean score", least=1))
    rows = {label: run.rows for label, run in runs.items() if run.rows}
    parts = sorted({key for each in rows.values() for row in each for key in row if key.startswith(REWARD_PART)})
    mean = {"reward/mean": charts.METRICS["reward/mean"]}
    metrics = mean | {key: (key.removeprefix(REWARD_PART), "mean over the batch", {}) for key in parts} | charts.METRICS
    for key, (title, ylabel, options) in metrics.items():
        score = "reward" if key.startswith("reward/") else key.removeprefix(REWARD_PART)
        shown = alike(score) if key.startswith(("reward/", REWARD_PART)) else rows
        shown = [label for label in shown if label in rows and charts.is_on(rows[label], key)]
        data = {label: (rows[label], charts.column(rows[label], key)) for label in shown}
        drawn.append(charts.lines(data, name=key, title=title, ylabel=ylabel, **options))
    return [chart for chart in drawn if chart is not None]
