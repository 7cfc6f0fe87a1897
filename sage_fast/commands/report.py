"""`sage-fast report`: write the page of a run."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping

from sage_fast.commands.sources import existing
from sage_fast.util.errors import printable
from sage_fast.util.paths import TypedPath

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add("run", type=TypedPath, metavar="RUN", help="run folder")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    run = existing(options.run, "a run folder")
    log.info(f"sage-fast report: reading {run}")
    from sage_fast.report.page import write_report

    print(printable(str(write_report(run))))
