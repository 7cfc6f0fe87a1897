"""`sage-fast export`: write the weights of a run for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from sage_fast.commands.sources import existing
from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import check_new_folder
from sage_fast.util.paths import TypedFile, TypedPath


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "run",
        type=TypedPath,
        metavar="RUN",
        help="run folder, whose newest weights are used, or a checkpoint in one",
    )
    add("folder", type=TypedFile, nargs="?", metavar="FOLDER", help="new or empty folder")
    add("--output", type=TypedFile, metavar="FOLDER", help="the same as FOLDER")
    add(
        "--base",
        metavar="HUB_ID",
        help="the base model on the hub, where model.path is a local folder",
    )


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    run = existing(options.run, "a run folder, or a checkpoint in one")
    if options.folder is not None and options.output is not None:
        raise UserError(
            f"FOLDER {str(options.folder)!r} and --output {str(options.output)!r}: both name the "
            "folder to write; give one"
        )
    folder = options.folder or options.output
    if folder is None:
        raise UserError("no FOLDER is given; expected a new or empty one, as in export RUN FOLDER")
    check_new_folder(folder, "folder")
    with heavy_imports("export"):
        from sage_fast.commands.export_formats import export

    print(printable("\n".join(map(str, export(run, folder, options.base)))))
