"""Report on a complete run: the comparison of its videos, the table of its gains, and the page."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from sage_fast.eval.hacking import Evaluations
from sage_fast.eval.scores import paired_table, read_evaluations
from sage_fast.eval.sheets import comparison_sheet
from sage_fast.eval.tables import format_paired_table
from sage_fast.eval.videoset import Key, VideoSet, of_run
from sage_fast.report.page import write_report
from sage_fast.report.playback import read_video
from sage_fast.report.shown import choose, scores_of
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError
from sage_fast.util.files import atomic_path
from sage_fast.util.metrics import JUDGE_PART

log = logging.getLogger(__name__)


def report_run(run: Path, count: int, complete: bool) -> None:
    """Write `report.html`; of a complete run also `comparison.png`, and log the table of its gains.

    A damaged evaluation or video is left out, with a note.

    Args:
        run: the run folder.
        count: maximum number of videos shown in `comparison.png`.
        complete: whether the run has come to its end.
    """
    if not complete:
        write_report(run)
        return
    evaluations, left_out = read_evaluations(run)
    write_comparison(run, evaluations, count)
    page = write_report(run)
    keep_shown(run, evaluations, count)
    for note in left_out:
        log.warning(wrapped(f"note: {note}"))
    if evaluations.keys() >= {"before", "after"}:
        log.info(format_paired_table(paired_table(evaluations["before"], evaluations["after"])))
    log.info(f"report: {page}")


def write_comparison(run: Path, evaluations: Evaluations, count: int) -> Path | None:
    """Write a run's `comparison.png`: base model, first evaluation during training, and last one, side by side.

    It shows the largest gains, the medians and the largest losses between the first column and the last. The choice is
    only known at the end. So each evaluation that may become a column writes all its videos as they are sampled, on
    every rank, and `keep_shown` deletes the others. Memory holds one chunk of videos at a time. A video of 100 MB takes
    a few MB on disk and seconds to write; sampling it again would take minutes.

    Args:
        run: the run folder.
        count: maximum number of videos shown.

    Returns:
        The path of the image; None if the evaluations have no video in common that can be read.
    """
    sets, shown = _shown(run, evaluations, count)
    videos: dict[Key, list[Tensor]] = {}
    for key in shown:
        try:
            videos[key] = [read_video(side.shown[key], num_frames=3) for side in sets]
        except UserError as error:
            log.warning(wrapped(f"note: left out of comparison.png: {error}"))
    if not videos:
        return None
    columns = {side.label: [found[i] for found in videos.values()] for i, side in enumerate(sets)}
    captions = [f"{shown[key]}: {key[0]}" if shown[key] else key[0] for key in videos]
    notes = [[_note(side, key) for key in videos] for side in sets]
    path = run / "comparison.png"
    with atomic_path(path) as file:
        comparison_sheet(columns, captions, notes=notes if any(map(any, notes)) else None).save(file, "PNG")
    return path


def keep_shown(run: Path, evaluations: Evaluations, count: int) -> None:
    """Delete the candidate videos that `write_comparison` did not show, except for the first `count`.

    These are there for `compare`: each run shows the videos of its own gains, so two runs may have none in common.
    """
    sets, shown = _shown(run, evaluations, count)
    for side in sets if shown else ():
        for number, (key, file) in enumerate(zip(side.keys, side.files)):
            if file is not None and key not in shown and number >= count:
                file.unlink()


def _shown(run: Path, evaluations: Evaluations, count: int) -> tuple[list[VideoSet], dict[Key, str]]:
    """Return the columns of the comparison, and the videos that all of them have with the reasons to show them."""
    during = sorted(name for name in evaluations if name.startswith("iteration-"))
    names = [name for name in ("before", *during[:1], "after") if name in evaluations]
    iterations = {name: evaluations[name]["iteration"] for name in names}
    sets = of_run(run, evaluations, {name: f"{i} iterations" if i else "base" for name, i in iterations.items()})
    shown = choose(sets, count) if sets else {}
    return sets, {key: why for key, why in shown.items() if all(key in side.shown for side in sets)}


def _note(side: VideoSet, key: Key) -> str:
    """Return the composite and the judge's scores of a video."""
    known = scores_of(side, key).items()
    return ", ".join(f"{name} {x:.2f}" for name, x in known if name == "overall" or name.startswith(JUDGE_PART))
