"""`sage-fast compare`: compare runs on one page, by the evaluations that they hold."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping

from sage_fast.commands.sources import check_folder, existing, labelled
from sage_fast.util.files import VIDEOS
from sage_fast.util.paths import TypedFile

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "run",
        metavar="RUN",
        nargs="+",
        help="run folder, or folder with videos.csv; LABEL=RUN names it",
    )
    add(
        "--folder",
        type=TypedFile,
        default="comparison",
        help="where the page goes (default: comparison)",
    )


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    check_folder(options.folder)
    expected = f"a run folder, or a folder with {VIDEOS}"
    sources = {label: existing(source, expected) for label, source in labelled(options.run).items()}
    log.info(f"sage-fast compare: reading {', '.join(sources)}")
    from sage_fast.report.comparison_page import write_comparison

    write_comparison(sources, options.folder)
