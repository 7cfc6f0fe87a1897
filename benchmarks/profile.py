"""`sage-fast profile`: time one iteration by phase and by kernel, or measure the signal of its
gradient."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from sage_fast.commands.sources import check_folder, load_source
from sage_fast.util.errors import UserError
from sage_fast.util.paths import TypedFile, TypedPath


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "config",
        type=TypedPath,
        metavar="CONFIG",
        help="YAML file, or a run folder (its weights are used)",
    )
    add("--folder", type=TypedFile, default="profile", help="where the files go (default: profile)")
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
    against = "with --signal: a second configuration, and the cosine of the two gradients"
    add("--against", type=TypedPath, metavar="OTHER", help=against)


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    if options.warmup < 0:
        raise UserError(f"--warmup {options.warmup}: expected 0 or more")
    check_folder(options.folder)
    if options.signal is not None or options.against is not None:
        from sage_fast.benchmarks import signal_meter

        signal_meter.check_options(options)
        # no update follows that rounding could spoil
        ungated = {**overrides, "train.parity_gate": "false"}
        sources = [options.config] if options.against is None else [options.config, options.against]
        configs = {source: load_source("profile", source, ungated) for source in sources}
        return signal_meter.run(options, overrides, configs)
    config = load_source("profile", options.config, overrides)
    from sage_fast.benchmarks.phases import format_profile, profile_iteration

    from sage_fast.run.fail_fast import fail_fast
    from sage_fast.util.ranks import rank

    folder, window_only = options.folder, options.window_only
    with fail_fast(config.timeout_minutes):
        result = profile_iteration(
            config,
            options.config,
            overrides,
            folder=folder,
            warmup=options.warmup,
            window_only=window_only,
        )
    if rank() == 0:
        print(format_profile(result))
