"""`sage-fast train`: train a policy, or print the plan of a run."""

from __future__ import annotations

import argparse
import logging
import math
import reprlib
from collections.abc import Callable, Mapping

from sage_fast.config.loader import load
from sage_fast.config.rank_checks import check_choices, check_engine, check_plugins
from sage_fast.run.preflight import check_named, check_new
from sage_fast.run.sources import resumed_settings
from sage_fast.run_folder import RunFolder
from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import writing
from sage_fast.util.launchers import launched
from sage_fast.util.paths import TypedPath

log = logging.getLogger(__name__)

MAX_GPUS = 2**20
"""Most GPUs of a plan; an iteration has no more samples."""


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "config",
        type=TypedPath,
        metavar="CONFIG",
        help="YAML file; with --resume also a run folder",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print sizes, FLOPs, memory and times (rewards: as measured), then stop",
    )
    add("--gpus", type=int, metavar="N", help="with --dry-run: plan for N GPUs")
    add(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="with --dry-run: memory of a GPU (default: 80)",
    )
    add(
        "--gpu-price",
        type=float,
        metavar="PRICE",
        help="with --dry-run: price of a GPU-hour, for the cost of the run",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the run in the output folder, by its own settings, or begin it",
    )
    add("--quiet", action="store_true", help="print nothing but errors")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    given = options.config, overrides
    config, notes = resumed_settings(*given) if options.resume else (load(*given), [])
    _check_gpus(options)
    # alike on all ranks: it begins once all have joined
    resume = options.resume and RunFolder(config.output).exists
    is_alone = launched("WORLD_SIZE", 1) == 1
    # else a rank would end before the others, which wait for it, can be told
    if options.dry_run or is_alone:
        check_choices(config.sampling, config.objective, config.train, config.reward.part_weights)
        check_plugins(config.plugins)
        check_named(config.model, config.data, config.named_rewards)
    if options.dry_run:
        with heavy_imports("train"):
            from sage_fast.tools.plan import dry_run

        ranks = options.gpus or launched("WORLD_SIZE", 1)
        memory, price = 1e9 * (options.gpu_memory or 80), options.gpu_price or 0.0
        print(printable(dry_run(config, ranks, memory, price, resume=resume)))
        return
    if is_alone:
        check_engine(config.train)
        if not resume:
            check_new(config.output)
    with heavy_imports("train"):
        from sage_fast.run.fail_fast import fail_fast
        from sage_fast.run.train import train

    for note in notes:
        log.info(note)
    with fail_fast(config.timeout_minutes), writing(config.output):
        train(config, resume=resume)


def _check_gpus(o: argparse.Namespace) -> None:
    if o.gpus is not None and o.gpus > MAX_GPUS:
        raise UserError(f"--gpus {reprlib.repr(o.gpus)}: expected at most {MAX_GPUS:,}")
    for name, value in (
        ("--gpus", o.gpus),
        ("--gpu-memory", o.gpu_memory),
        ("--gpu-price", o.gpu_price),
    ):
        if value is not None and not 0 < value < math.inf:
            raise UserError(
                f"{name} {value:g}: expected "
                f"{'at least 1' if name == '--gpus' else 'a number above 0'}"
            )
        if value is not None and not o.dry_run:
            start = f"torchrun --nproc-per-node {o.gpus or 'N'} -m sage_fast train {o.config}"
            raise UserError(f"{name} goes with --dry-run; to train on GPUs: {start}")
