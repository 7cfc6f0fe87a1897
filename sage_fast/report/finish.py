"""Report on a run: its page and, once it is complete, the comparison of its videos and the table of its gains."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from sage_fast.eval.comparison import compare
from sage_fast.eval.playback import read_video
from sage_fast.eval.sheets import comparison_sheet
from sage_fast.eval.video_folder import write_folder
from sage_fast.eval.videoset import Key
from sage_fast.report.html import choose
from sage_fast.report.page import write_report
from sage_fast.run.folder import RunFolder
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError
from sage_fast.util.files import atomic_path

log = logging.getLogger(__name__)


def report_run(folder: Path, count: int, complete: bool) -> None:
    """Write `report.html`; of a complete run also `comparison.png`, and log the table of its gains.

    A damaged evaluation or video is left out, with a note.

    Args:
        folder: the run folder.
        count: maximum number of videos shown in `comparison.png`.
        complete: whether the run has come to its end.
    """
    if complete:
        run = RunFolder(folder)
        write_picture(run, count)
        for note in run.evaluations[1]:
            log.warning(wrapped(f"note: {note}"))
        evaluations = run.video_sets()
        for name, videos in evaluations.items():  # so that other rewards can score the videos later
            if kept := [i for i, file in enumerate(videos.files) if file is not None]:
                write_folder(videos.only(kept), run.videos(name))
        if evaluations.keys() >= {"before", "after"}:
            log.info(compare([evaluations["before"], evaluations["after"]]).text)
    page = write_report(folder)
    if complete:
        log.info(f"report: {page}")


def write_picture(run: RunFolder, count: int) -> None:
    """Write a run's `comparison.png`: base model, first evaluation during training, and last one, side by side.

    It shows the largest gains, the medians and the largest losses between the first column and the last, of the videos
    that all of them have and that can be read; without one, nothing is written.

    Args:
        count: maximum number of videos shown.
    """
    evaluations = run.video_sets()
    during = [name for name in evaluations if name.startswith("iteration-")]
    sets = [evaluations[name] for name in ("before", *during[:1], "after") if name in evaluations]
    videos: dict[Key, list[Tensor]] = {}
    captions = {}
    for key, why in choose(sets, count).items() if sets else ():
        try:
            if all(key in side.shown for side in sets):
                videos[key] = [read_video(side.shown[key], num_frames=3) for side in sets]
                captions[key] = f"{why}: {key[0]}" if why else key[0]
        except UserError as error:
            log.warning(wrapped(f"note: left out of comparison.png: {error}"))
    if videos:
        columns = {side.label: [found[i] for found in videos.values()] for i, side in enumerate(sets)}
        with atomic_path(run.picture) as file:
            comparison_sheet(columns, [*captions.values()]).save(file, "PNG")
