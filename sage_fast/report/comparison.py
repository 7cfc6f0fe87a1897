"""The pages that compare sources: of `sage-fast eval`, and of `sage-fast compare`, with the course of each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.config.schema import ODE_SAMPLERS
from sage_fast.eval.comparison import Comparison, compare, shown_name, summary
from sage_fast.eval.gains import table
from sage_fast.eval.video_folder import read_folder, scorers_of
from sage_fast.eval.videoset import VideoSet
from sage_fast.report import charts
from sage_fast.report.html import cards, render
from sage_fast.report.page import Trained, read_run
from sage_fast.util.errors import printable
from sage_fast.util.files import VIDEOS, json_value, write_atomic, write_json
from sage_fast.util.metrics import JUDGE_PART, REWARD_PART


def write_evaluation(
    sets: Sequence[VideoSet],
    evaluations: Sequence[Mapping[str, Any]],
    watched: tuple[str, ...],
    count: int,
    *,
    folder: Path | None,
    json: Path | None,
) -> None:
    """Print the table of an evaluation and write the requested files.

    Args:
        evaluations: the scores of each set, as in `eval/*.json`.
        watched: prefixes of the scores that nothing trains on.
        count: rows of videos on the page.
        folder: where to write `evaluation.md` and `evaluation.html`.
        json: file for all scores.

    Raises:
        UserError: a set has no prompt in common with the first.
    """
    found = compare(sets, watched)
    print(printable(found.text))
    if json is not None:
        lines = [{name: json_value(value) for name, value in dataclasses.asdict(row).items()} for row in found.rows]
        several = {"sources": {side.label: scores for side, scores in zip(sets, evaluations)}, "table": lines}
        write_json(several if len(sets) > 1 else evaluations[0], json)
    if folder is not None:
        write_atomic(folder / "evaluation.md", f"{found.text}\n")
        print(_write_page(folder / "evaluation.html", found, count))


# -- runs -------------------------------------------------------------------------------------------------------------


def scorers_in(run: Trained) -> dict[str, str]:
    """Return score -> what computed it, for evaluations and training rewards."""
    reward = {name.removeprefix("reward."): x for name, x in run.settings.items() if name.startswith("reward.")}
    parts = {key.removeprefix(REWARD_PART) for row in run.folder.rows for key in row if key.startswith(REWARD_PART)}
    parts |= {part for videos in run.evaluations.values() for part in videos.scores} - {"reward"}
    weights = [scores["weights"] for scores in run.folder.evaluations[0].values()] or [{}]
    scores = {"parts": parts, "weights": weights[-1]}
    return scorers_of(reward, {JUDGE_PART: run.settings.get("eval.judge")}, scores)


def read_sets(sources: Mapping[str, Path]) -> tuple[dict[str, Trained], list[VideoSet], list[str]]:
    """Read run folders and folders of videos.

    Args:
        sources: label -> folder.

    Returns:
        The runs by label, the newest evaluation of each source that has one, and notes.

    Raises:
        UserError: a folder is neither.
    """
    runs, sets, notes = {}, [], []
    for label, path in sources.items():
        if (path / VIDEOS).is_file():
            sets.append(read_folder(label, path))
            continue
        runs[label] = run = read_run(path)
        notes += [f"{label}: {note}" for note in run.folder.evaluations[1]]
        if not run.ends:
            notes.append(f"{label} has no evaluation yet.")
            continue
        newest = run.ends[-1].label
        sets.append(dataclasses.replace(run.ends[-1], label=label, scorers=scorers_in(run)))
        if newest != "after":
            notes.append(f"{label} is shown {'before training' if newest == 'before' else f'at {newest}'}.")
    return runs, sets, notes


def write_comparison(sources: Mapping[str, Path], folder: Path, count: int) -> None:
    """Print the table of runs, finished or not, and of folders of videos; write `comparison.html`.

    Args:
        sources: label -> run folder or folder of videos.
        folder: created if missing.
        count: rows of videos on the page.

    Raises:
        UserError: as `read_sets`, or a source has no prompt in common with the first.
    """
    runs, sets, notes = read_sets(sources)
    found = compare(sets)
    own = {(label, row.score): row for label, run in runs.items() if run.ends for row in table(run.ends) if row.pairs}
    found.warnings.extend(f"{label}: {run.hacking}" for label, run in runs.items() if run.hacking)
    found.notes[:0] = notes
    if sets and not set.intersection(*(set(videos.shown) for videos in sets)):
        found.notes.append("No videos are shown: no prompt has one of every source. sage-fast eval samples them alike.")
        count = 0
    folder.mkdir(parents=True, exist_ok=True)
    print(printable(found.text))
    of_runs = {"own": own, "charts": _charts(runs), "settings": _differing(runs)}
    print(_write_page(folder / "comparison.html", found, count, " · ".join(sources), **of_runs))


def _write_page(path: Path, found: Comparison, count: int, title: str = "", **of_runs: Any) -> Path:
    """Write a self-contained page.

    Args:
        count: number of rows of videos to show.
        of_runs: `own` ((label, score) -> a run's gain over its own evaluation before training), `charts` (SVG), and
            `settings` (rows of cells, of which the first is the header).
    """
    rows, notes = found.rows, [*found.notes]
    scores = dict.fromkeys(row.score for row in rows)
    page = render(
        "gallery.html.j2",
        title=title or " · ".join(videos.label for videos in found.sets),
        groups=[(shown_name(score), [row for row in rows if row.score == score]) for score in scores],
        gains=rows[0].label if any(row.gain is not None for row in rows) else None,
        summary=summary(rows) if rows else "",
        videos=cards(found.sets, count, notes),
        notes=notes,
        warnings=found.warnings,
        **({"own": {}, "charts": [], "settings": []} | of_runs),
    )
    write_atomic(path, page)
    return path


def _differing(runs: Mapping[str, Trained]) -> list[list[str]]:
    """Return a header and the settings that differ between runs, with a dash where one has no effect; [] if none do."""
    flat = [{key: str(value) for key, value in run.settings.items() if _acts(key, run)} for run in runs.values()]
    names = sorted({name for settings in flat for name in settings} - {"output"})
    rows = [[name, *(settings.get(name, "\N{EN DASH}") for settings in flat)] for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return [["setting", *runs], *differing] if differing else []


def _acts(name: str, run: Trained) -> bool:
    """Whether a setting has an effect in a run."""
    if name == "sampling.eta":
        return run.settings.get("sampling.sampler") not in ODE_SAMPLERS
    return not name.startswith("kl.") or name == "kl.strategy" or charts.is_on(run.folder.rows, "kl/lambda")


def _charts(runs: Mapping[str, Trained]) -> list[str]:
    """Draw every score and metric; a score only of the runs with the scorer of the first run that has it."""
    drawn, scorers = [], {label: scorers_in(run) for label, run in runs.items()}

    def alike(score: str) -> list[str]:
        known = {label: found[score] for label, found in scorers.items() if score in found}
        return [label for label, scorer in known.items() if scorer == next(iter(known.values()))]

    scores = {name for run in runs.values() for name in run.points}
    for score in sorted(scores, key=lambda name: (name != "reward", name)):
        shown = {label: runs[label].points.get(score, {}) for label in alike(score)}
        drawn.append(charts.held_out(shown, f"Held-out {shown_name(score)}", "mean score", least=1))
    rows = {label: run.folder.rows for label, run in runs.items() if run.folder.rows}
    parts = sorted({key for each in rows.values() for row in each for key in row if key.startswith(REWARD_PART)})
    for key in dict.fromkeys(["reward/mean", *parts, *charts.METRICS]):
        score = "reward" if key.startswith("reward/") else key.removeprefix(REWARD_PART)
        of_score = alike(score) if key.startswith(("reward/", REWARD_PART)) else rows
        drawn.append(charts.metric(key, {label: rows[label] for label in of_score if label in rows}))
    return [chart for chart in drawn if chart is not None]
