"""Report on a complete run: the comparison of its videos, the table of its gains, and the page."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_fast.config.schema import Config
from sage_fast.eval.hacking import Evaluations
from sage_fast.eval.scores import paired_table, read_evaluations
from sage_fast.eval.sheets import comparison_sheet
from sage_fast.eval.text import format_paired_table
from sage_fast.report.page import write_report
from sage_fast.report.playback import read_video
from sage_fast.report.shown import scores_of, shown_pairs
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError
from sage_fast.util.files import atomic_path
from sage_fast.util.videos import numbered

log = logging.getLogger(__name__)


def report_run(config: Config) -> None:
    """Write `comparison.png` and `report.html` of a complete run, and log the table of its gains.

    A damaged evaluation or video is left out, with a note.
    """
    run, count = Path(config.output), config.eval.num_videos
    evaluations, left_out = read_evaluations(run)
    write_comparison(run, evaluations, count)
    keep_shown(run, evaluations, count)
    for note in left_out:
        log.warning(wrapped(f"note: {note}"))
    if evaluations.keys() >= {"before", "after"}:
        log.info(format_paired_table(paired_table(evaluations["before"], evaluations["after"])))
    log.info(f"report: {write_report(run)}")


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
    compared, shown = _shown(run, evaluations, count)
    files = {name: numbered(run / "videos" / name) for name in compared}
    videos: dict[int, dict[str, Tensor]] = {}
    for i in shown:
        try:
            videos[i] = {name: read_video(files[name][i], num_frames=3) for name in compared}
        except UserError as error:
            log.warning(wrapped(f"note: left out of comparison.png: {error}"))
    shown = {i: why for i, why in shown.items() if i in videos}
    if not shown:
        return None
    columns, notes = {}, []
    for name, scores in compared.items():
        label = f"{scores['iteration']} iterations" if scores["iteration"] else "base"
        columns[label] = [videos[i][name] for i in shown]
        known = [[(part, value) for part, value in scores_of(scores, i) if math.isfinite(value)] for i in shown]
        notes.append([", ".join(f"{part} {value:.2f}" for part, value in pairs) for pairs in known])
    prompts = next(iter(compared.values()))["prompts"]
    captions = [f"{why}: {prompts[i]}" if why else prompts[i] for i, why in shown.items()]
    path = run / "comparison.png"
    with atomic_path(path) as file:
        comparison_sheet(columns, captions, notes=notes if any(map(any, notes)) else None).save(file, "PNG")
    return path


def keep_shown(run: Path, evaluations: Evaluations, count: int) -> None:
    """Delete the candidate videos that `write_comparison` did not show."""
    compared, shown = _shown(run, evaluations, count)
    for name in compared if shown else ():
        for number, path in numbered(run / "videos" / name).items():
            if number not in shown:
                path.unlink()


def _shown(run: Path, evaluations: Evaluations, count: int) -> tuple[dict[str, Any], dict[int, str]]:
    """Return the columns of the comparison (name -> scores) and its videos (number -> reason)."""
    during = sorted(name for name in evaluations if name.startswith("iteration-"))
    compared = {name: evaluations[name] for name in ("before", *during[:1], "after") if name in evaluations}
    if not compared:
        return {}, {}
    common = set.intersection(*(set(numbered(run / "videos" / name)) for name in compared))
    scores = list(compared.values())
    return compared, shown_pairs(scores[0], scores[-1], common, count)
