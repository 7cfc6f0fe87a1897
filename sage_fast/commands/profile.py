"""`sage-fast profile`: time one iteration by phase and by kernel, or measure the signal of its
gradient."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_fast.commands.sources import check_folder, load_source, split_output
from sage_fast.util.errors import UserError
from sage_fast.util.paths import TypedFile, TypedPath

FOLDER = "profile"


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "config",
        type=TypedPath,
        metavar="CONFIG",
        help="YAML file, a run folder, whose newest weights are used, or a checkpoint in one",
    )
    add("--folder", type=TypedFile, help=f"where the files go (default: {FOLDER})")
    add("--warmup", type=int, default=1, help="iterations before the measured one (default: 1)")
    add(
        "--window-only", action="store_true", help="emit only NVTX ranges, to run under nsys or ncu"
    )
    add(
        "--signal",
        type=int,
        metavar="K",
        help="signal and noise of the gradient, from K iterations without an update",
    )
    against = (
        "with --signal: a second configuration at the same weights, and the cosine of the two "
        "gradients"
    )
    add("--against", type=TypedPath, metavar="OTHER", help=against)


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    if options.warmup < 0:
        raise UserError(f"--warmup {options.warmup}: expected 0 or more")
    folder, settings = split_output(options, overrides)
    options.folder = folder or Path(FOLDER)
    check_folder(options.folder)
    if options.signal is None and options.against is None:
        _profile(options, settings)
    else:
        _measure_signal(options, settings)


def _profile(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Time one iteration by phase and by kernel, and print the tables."""
    config = load_source("profile", options.config, overrides)
    from sage_fast.run.fail_fast import fail_fast
    from sage_fast.tools.phases import format_profile, profile_iteration
    from sage_fast.util.ranks import rank

    with fail_fast(config.timeout_minutes, options.folder):
        result = profile_iteration(
            config,
            options.config,
            overrides,
            folder=options.folder,
            warmup=options.warmup,
            window_only=options.window_only,
        )
    if rank() == 0:
        print(format_profile(result))


def _measure_signal(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Measure the signal of the gradient of one configuration, or of two, and print the table.

    Raises:
        UserError: as `measure_signal`, or an option is impossible.
    """
    if options.signal is not None and (options.signal < 3 or options.window_only):
        raise UserError(
            f"--signal {options.signal}: expected 3 or more iterations, without --window-only"
        )
    if options.against is not None and (
        options.signal is None or options.against == options.config
    ):
        raise UserError(
            f"--against {options.against}: expected another configuration than CONFIG, and "
            "--signal K"
        )

    sources = [options.config]
    # no update follows that rounding could spoil
    ungated = {**overrides, "train.parity_gate": "false"}
    configs = [load_source("profile", options.config, ungated)]
    if options.against is not None:
        sources.append(options.against)
        other = load_source("profile", options.against, ungated)
        weights = configs[0].model.weights
        if weights is not None and other.model.weights is None:
            model = dataclasses.replace(other.model, weights=weights)
            other = dataclasses.replace(other, model=model)
        configs.append(other)

    from sage_fast.algorithm.trainable import check_trainable
    from sage_fast.run.fail_fast import fail_fast
    from sage_fast.tools.signal_meter import format_signal, measure_signal
    from sage_fast.util.process_group import initialize
    from sage_fast.util.ranks import rank

    timeout = configs[0].timeout_minutes
    with fail_fast(timeout, options.folder):
        initialize(timeout)
        measured = {source: check_trainable(config) for source, config in zip(sources, configs)}
        result = measure_signal(
            measured, overrides, folder=options.folder, count=options.signal, warmup=options.warmup
        )
    if rank() == 0:
        print(format_signal(result))
