"""`sage-fast doctor`: check what is installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError
from sage_fast.util.files import make_folder_of
from sage_fast.util.paths import TypedFile


def add_arguments(add: Callable[..., object]) -> None:
    add("--json", type=TypedFile, metavar="FILE", help="write every row to FILE")
    add(
        "--node",
        action="store_true",
        help="measure only the GPUs of this node, all at once; status 1 if one is too slow",
    )
    add(
        "--min-matmul",
        type=float,
        metavar="TFLOPS",
        help="with --node: TFLOP/s of a matrix product (default: 600 on an H100 SXM or H200)",
    )
    add(
        "--min-gather",
        type=float,
        metavar="GBS",
        help="with --node: GB/s of an all-gather (default: 300 on an H100 SXM or H200)",
    )
    add(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="with --node: a node that takes longer is refused (default: 120)",
    )


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    if options.node:
        if options.json is not None:
            raise UserError("--json is of the checks without --node; give one of them")
        with heavy_imports("doctor"):
            from sage_fast.tools.node_check import check_node

        return check_node(options.min_matmul, options.min_gather, options.timeout)

    if options.min_matmul is not None or options.min_gather is not None:
        raise UserError("--min-matmul and --min-gather are of the check of a node: add --node")
    make_folder_of(options.json)
    with heavy_imports("doctor"):
        from sage_fast.tools.doctor import doctor

    return doctor(options.json)
