"""`sage-fast compare`: compare runs, finished or not, on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sage_fast.eval.hacking import verdict
from sage_fast.eval.scores import columns_of, paired_table
from sage_fast.eval.videoset import VideoSet, check_prompts, of_run, read_folder, shown_name, table
from sage_fast.report import charts
from sage_fast.report.gallery import write_gallery
from sage_fast.report.page import RunFiles, points_of, read_run
from sage_fast.util.files import VIDEOS
from sage_fast.util.metrics import REWARD_PART

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
        sets += of_run(path, run.evaluations, {newest: label})
        if newest != "after":
            notes.append(f"{label} is shown {'before training' if newest == 'before' else f'at {newest}'}.")
    for videos in sets[1:]:
        notes += check_prompts(sets[0], videos)
    return runs, sets, notes


def write_compare(sources: Mapping[str, Path], folder: Path, count: int) -> Path:
    """Write a page that compares runs, finished or not.

    Args:
        sources: label -> run folder or folder of videos.
        folder: created if missing.
        count: rows of videos on the page.

    Returns:
        The path of the page.

    Raises:
        UserError: as `read_sets`.
    """
    runs, sets, notes = read_sets(sources)
    rows = table(sets) if sets else []
    own = {
        (label, row.name): row
        for label, run in runs.items()
        if run.last is not None and "before" in run.evaluations
        for row in paired_table(run.evaluations["before"], run.evaluations[run.last])
    }
    found = {label: verdict(run.evaluations) for label, run in runs.items()}
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
    """Return a header and the settings that differ between runs, with a dash where a run lacks one; [] if none do."""
    flat = [{key: str(value) for key, value in run.settings.items()} for run in runs.values()]
    names = sorted({name for settings in flat for name in settings} - {"output"})
    rows = [[name, *(settings.get(name, "\N{EN DASH}") for settings in flat)] for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return [["setting", *runs], *differing] if differing else []


def _charts(runs: Mapping[str, RunFiles]) -> list[str]:
    drawn = []
    scores = {name for run in runs.values() for found in run.evaluations.values() for name in columns_of(found)}
    for score in sorted(scores, key=lambda name: (name != "reward", name)):
        points = {label: points_of(run, score) for label, run in runs.items()}
        drawn.append(charts.held_out(points, f"Held-out {shown_name(score)}", "mean score", least=1))
    rows = {label: run.rows for label, run in runs.items() if run.rows}
    parts = sorted({key for each in rows.values() for row in each for key in row if key.startswith(REWARD_PART)})
    mean = {"reward/mean": charts.METRICS["reward/mean"]}
    metrics = mean | {key: (key.removeprefix(REWARD_PART), "mean over the batch", {}) for key in parts} | charts.METRICS
    for key, (title, ylabel, options) in metrics.items():
        data = {label: (each, charts.column(each, key)) for label, each in rows.items()}
        drawn.append(charts.lines(data, name=key, title=title, ylabel=ylabel, **options))
    return [chart for chart in drawn if chart is not None]
