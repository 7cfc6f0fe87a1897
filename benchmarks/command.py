"""`sage-fast bench`: time operators, rollout or whole iterations against stock code, and what
kernels can reach."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

from sage_fast.config.loader import load
from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import make_folder_of, write_json
from sage_fast.util.paths import TypedFile, TypedPath

ONLY = {
    "config": ("iteration",),
    "size": ("operators", "rollout", "limits"),
    "part": ("rollout", "limits"),
    "path": ("rollout", "iteration"),
    "budget": ("rollout",),
    "dry_run": ("rollout",),
    "tiny": ("rollout",),
}
"""Option -> the benchmarks that accept it."""


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "what",
        nargs="?",
        choices=("operators", "rollout", "iteration", "limits"),
        default="operators",
        help="what to time (default: operators)",
    )
    add("--config", type=TypedPath, metavar="FILE", help="YAML file, for `bench iteration`")
    add(
        "--json",
        type=TypedFile,
        metavar="FILE",
        help="write every number to FILE, again after every row",
    )
    add("--size", action="append", help="a size such as '480p batch 4'; may be given several times")
    add("--part", action="append",
        help="of `bench rollout`: forward, step, rollout, decode, host or train: 'train full', "
        "'train attention', 'train auto', 'train none'; of `bench limits`: ceiling, attention or "
        "adapter_rows")  # fmt: skip
    add(
        "--path",
        action="append",
        help="for `bench rollout` or `iteration`: stock, tuned, eager, ...",
    )
    add(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="for `bench rollout`: skip rows that do not fit",
    )
    add("--repetitions", type=int, default=15, help="timed calls of a row (default: 15)")
    add(
        "--dry-run",
        action="store_true",
        default=None,
        help="for `bench rollout`: print FLOPs, and run nothing",
    )
    add(
        "--tiny",
        action="store_true",
        default=None,
        help="for `bench rollout`: every row once at the smallest size, to see that it runs",
    )
    add("--compile", action="store_true", help="compile every Triton kernel instead; needs no GPU")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    """Measure, print the table, and write the JSON after every row. Return the exit status: 1 if a
    path failed.

    Raises:
        UserError: the benchmark does not accept an option, or does not know a name.
    """
    _check(options)
    make_folder_of(options.json, "--json")
    config = load(options.config) if options.what == "iteration" else None
    with heavy_imports("bench"):
        from sage_fast.benchmarks.timing import Save, save_nothing

    if options.compile:
        from sage_fast.benchmarks.compile_report import (
            compile_report,
            format_summary,
            format_table,
        )

        rows = compile_report()
        print(format_table(rows))
        print(format_summary(rows))
        if options.json is not None:
            write_json({"rows": [dataclasses.asdict(row) for row in rows]}, options.json)
        return 0
    save: Save = (
        save_nothing if options.json is None else functools.partial(write_json, path=options.json)
    )
    if config is not None:
        from sage_fast.benchmarks import iteration

        paths = _known("path", options.path, iteration.PATHS)
        print(
            iteration.format_iterations(
                iteration.run(config, options.config, options.repetitions, paths, save)
            )
        )
    elif options.what == "rollout":
        from sage_fast.benchmarks import rollout, rung

        if options.tiny:
            options.size = ["tiny"]
            options.repetitions = 1
        sizes = _known("size", options.size, rung.SIZES)
        parts, paths = (
            _known("part", options.part, [*rung.PARTS, *rung.GROUPS]),
            _known("path", options.path, rung.PATHS),
        )
        if options.dry_run:
            print(rollout.arithmetic(sizes, parts))
            return 0
        result = rollout.run(
            sizes, options.repetitions, parts=parts, paths=paths, budget=options.budget, save=save
        )
        print(rollout.format_rollout(result))
        return int(rollout.failures(result) > 0)
    elif options.what == "limits":
        from sage_fast.benchmarks import limits

        sizes = _known("size", options.size, limits.SIZES) or [next(iter(limits.SIZES))]
        parts = _known("part", options.part, limits.PARTS)
        print(limits.format_limits(limits.run(sizes[-1], parts, options.repetitions, save)))
    else:
        from sage_fast.benchmarks import operators

        result = operators.run(
            _known("size", options.size, operators.SIZES), options.repetitions, save
        )
        print(operators.format_result(result))
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.compile:
        given = [name for name in ONLY if getattr(options, name) is not None]
        if given or options.what != "operators":
            wrong = f"--{given[0]}" if given else f"`bench {options.what}`"
            raise UserError(
                f"--compile compiles every kernel and goes with --json alone, not with {wrong}"
            )
    if options.repetitions < 1:
        raise UserError(f"--repetitions {options.repetitions}: expected at least 1")
    if options.what == "iteration" and not options.config:
        raise UserError("`bench iteration` needs --config FILE")
    for name, accepting in ONLY.items():
        if getattr(options, name) is not None and options.what not in accepting:
            raise UserError(
                f"--{name.replace('_', '-')} goes with "
                f"{' or '.join(f'`bench {what}`' for what in accepting)}"
            )
    if options.budget is not None and not options.budget > 0:
        raise UserError(f"--budget {options.budget:g}: expected seconds above 0")


def _known(option: str, names: list[str] | None, choices: Iterable[str]) -> list[str] | None:
    for name in names or []:
        if name not in choices:
            raise UserError(f"--{option} {name!r}: {nearest(name, choices)}")
    return names
