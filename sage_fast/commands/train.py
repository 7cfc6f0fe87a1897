"""`sage-fast train`: train a policy, or print the plan of a run."""

from __future__ import annotations

import argparse
import logging
import math
import reprlib
from collections.abc import Callable, Mapping

from sage_fast.commands.sources import resumed_settings
from sage_fast.config.loader import load
from sage_fast.config.rank_checks import (
    check_choices,
    check_engine,
    check_plugins,
    check_streaming,
)
from sage_fast.run.preflight import check_named, check_new
from sage_fast.run_folder import RunFolder
from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError, printable
from sage_fast.util.launchers import launched
from sage_fast.util.paths import TypedPath

log = logging.getLogger(__name__)

MAX_GPUS = 2**20
"""Most GPUs of a plan; an iteration has no more samples."""
DEFAULT_GPU_MEMORY = 80
"""Memory of a GPU of a plan, in GB."""


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
        help="check prompts and reward, estimate memory and time, then stop",
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
    notes: list[str] = []
    if options.resume:
        config, notes = resumed_settings(options.config, overrides)
    else:
        config = load(options.config, overrides)
    _check_gpus(options)
    resume = options.resume and RunFolder(config.output).can_continue()
    is_alone = launched("WORLD_SIZE", 1) == 1
    # else a rank would end before the others, which wait for it, can be told
    if options.dry_run or is_alone:
        check_choices(config.sampling, config.objective, config.train, config.reward.part_weights)
        check_streaming(config.model, config.train)
        check_plugins(config.plugins)
        check_named(config.model, config.data, config.named_rewards)
    if options.dry_run:
        with heavy_imports("train"):
            from sage_fast.tools.dry_run import dry_run

        ranks = options.gpus or launched("WORLD_SIZE", 1)
        gpu_bytes = 1e9 * (options.gpu_memory or DEFAULT_GPU_MEMORY)
        price = options.gpu_price or 0.0
        asked = (options.gpus, options.gpu_memory, options.gpu_price)
        may_be_cpu = is_alone and asked == (None, None, None)
        plan = dry_run(config, ranks, gpu_bytes, price, resume=resume, may_be_cpu=may_be_cpu)
        print(printable(plan))
        return
    if is_alone:
        check_engine(config.train)
        if not resume:
            check_new(config.output)
    with heavy_imports("train"):
        from sage_fast.run.train import train

    for note in notes:
        log.info(note)
    train(config, resume=options.resume)


def _check_gpus(options: argparse.Namespace) -> None:
    """Check the options of a plan.

    Raises:
        UserError: one is out of bounds, or is given without `--dry-run`.
    """
    gpus = options.gpus
    if gpus is not None and gpus > MAX_GPUS:
        raise UserError(f"--gpus {reprlib.repr(gpus)}: expected at most {MAX_GPUS:,}")

    given = {
        "--gpus": gpus,
        "--gpu-memory": options.gpu_memory,
        "--gpu-price": options.gpu_price,
    }
    for name, value in given.items():
        if value is None:
            continue
        if not 0 < value < math.inf:
            expected = "at least 1" if name == "--gpus" else "a number above 0"
            raise UserError(f"{name} {value:g}: expected {expected}")
        if not options.dry_run:
            start = f"torchrun --nproc-per-node {gpus or 'N'} -m sage_fast train {options.config}"
            raise UserError(f"{name} goes with --dry-run; to train on GPUs: {start}")
