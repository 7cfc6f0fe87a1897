"""`sage-fast compare`: compare runs on one page."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_fast.commands.sources import labelled
from sage_fast.util.errors import UserError

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add("run", metavar="RUN", nargs="+", help="run folder, or folder with videos.csv; LABEL=RUN names it")
    add("--folder", type=Path, default="comparison", help="where the page goes (default: comparison)")
    add("--videos", type=int, metavar="N", default=6, help="rows of videos on the page (default: 6)")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    if options.videos < 1:
        raise UserError(f"--videos {options.videos}: expected at least 1")
    sources = {label: Path(source) for label, source in labelled(options.run).items()}
    log.info(f"sage-fast compare: reading {', '.join(sources)}")
    from sage_fast.report.compare import write_compare

    print(write_compare(sources, options.folder, options.videos))
