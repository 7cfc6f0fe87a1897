"""`sage-fast doctor`: check what is installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from sage_fast.util.console import heavy_imports
from sage_fast.util.files import make_folder_of
from sage_fast.util.paths import TypedFile


def add_arguments(add: Callable[..., object]) -> None:
    add("--json", type=TypedFile, metavar="FILE", help="write every row to FILE")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    make_folder_of(options.json)
    with heavy_imports("doctor"):
        from sage_fast.tools.doctor import doctor

    return doctor(options.json)
