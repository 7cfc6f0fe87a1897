"""`sage-fast compare`: compare runs on one page."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sage_fast.commands.sources import check_folder, existing, labelled
from sage_fast.config.loader import from_overrides, load
from sage_fast.util.errors import UserError
from sage_fast.util.files import VIDEOS

if TYPE_CHECKING:
    from sage_fast.eval.videoset import VideoSet

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add("run", metavar="RUN", nargs="+", help="run folder, or folder with videos.csv; LABEL=RUN names it")
    add(
        "--scorer", action="append", default=[], metavar="NAME",
        help="a reward that scores the videos of all runs again; may be given several times",
    )  # fmt: skip
    add("--folder", type=Path, default="comparison", help="where the page goes (default: comparison)")
    add("--videos", type=int, metavar="N", default=6, help="rows of videos on the page (default: 6)")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    if options.videos < 1:
        raise UserError(f"--videos {options.videos}: expected at least 1")
    check_folder(options.folder)
    expected = f"a run folder, or a folder with {VIDEOS}"
    sources = {label: existing(source, expected) for label, source in labelled(options.run).items()}
    log.info(f"sage-fast compare: reading {', '.join(sources)}")
    from sage_fast.report.compare import write_compare

    def rescore(sets: Sequence[VideoSet]) -> Sequence[VideoSet]:
        if not options.scorer or not sets:
            return sets
        from sage_fast.commands.evaluator import add_scores

        first = next((path for path in sources.values() if not (path / VIDEOS).is_file()), None)
        config = from_overrides({}) if first is None else load(first / "config.yaml")
        return add_scores(sets, options.scorer, config.reward, config.sampling, config.data)

    print(write_compare(sources, options.folder, options.videos, rescore))
