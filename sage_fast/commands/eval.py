"""`sage-fast eval`: score one or more sources on the same prompts and seeds, sampled with the ODE."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_fast.commands.sources import notes_on, read_sources, settings_for
from sage_fast.util.files import make_folder_of
from sage_fast.util.imports import heavy_imports

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "source",
        metavar="SOURCE",
        nargs="+",
        help="YAML file, run folder, checkpoint, folder with videos.csv, or base; LABEL=SOURCE names it",
    )
    add("--scorer", action="append", default=[], metavar="NAME", help="an extra reward; may be given several times")
    add("--folder", type=Path, help="new or empty folder for the videos, the table, and a page with both")
    add("--json", type=Path, metavar="FILE", help="write every score to FILE")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    make_folder_of(options.json)
    sources = read_sources(options.source, overrides)
    config = settings_for(sources, overrides)
    for note in notes_on(sources, config.sampling, config.eval_guidance_scale):
        log.info(note)
    with heavy_imports("eval"):
        from sage_fast.commands.evaluator import run_eval
        from sage_fast.run.fail_fast import fail_fast

    with fail_fast(config.timeout_minutes):
        run_eval(sources, config, scorers=options.scorer, folder=options.folder, json=options.json)
