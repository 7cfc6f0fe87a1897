"""Command line that the studies share."""

from __future__ import annotations

import argparse
from pathlib import Path

from sage_fast.util.container import available_cpus
from sage_fast.util.errors import UserError
from sage_fast.util.paths import TypedPath, expand_options


def study_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every study."""
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument(
        "--quick", action="store_true", help="few seeds and iterations, to check that it works"
    )
    parser.add_argument(
        "--output",
        type=TypedPath,
        metavar="FOLDER",
        help="default: runs/STUDY, or runs/STUDY-quick",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="parallel runs (default: number of cores)"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def folders_of(options: argparse.Namespace, study: str) -> tuple[Path, Path]:
    """Return the folder of the pages, with a `results/` made in it now rather than after hours, and
    that of the runs.

    Quick runs are kept apart.
    """
    expand_options(options)
    quick = "-quick" if options.quick else ""
    folder = Path(options.output or f"runs/{study}{quick}")
    (folder / "results").mkdir(parents=True, exist_ok=True)
    return folder, folder / f"runs{quick}"


def workers_of(options: argparse.Namespace) -> int:
    """Return the number of parallel runs.

    Raises:
        UserError: it is below 1.
    """
    workers = available_cpus() if options.workers is None else options.workers
    if workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    return workers
