"""Profile one iteration: time by phase and, on a GPU, by kernel, MFU and HFU, TFLOP/s and GB/s of
operations, a Chrome trace.

    <folder>/profile.json rank-000.json.gz ...

With `window_only` the same window runs with NVTX ranges and without torch.profiler, for nsys and
ncu: only one tool at a time can use CUPTI. FLOPs come from algorithm/flops.py; the ceiling is a
matrix product measured on the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from sage_fast.algorithm.flops import flops
from sage_fast.algorithm.rates import format_rates, rate_table
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.config.schema import Config
from sage_fast.loading import load_setup
from sage_fast.models.checkpointing import CheckpointPlan
from sage_fast.ops import implementation
from sage_fast.tools.harness import full_rate, head_line, matmul_ceiling
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.console import progress, quiet
from sage_fast.util.environment import environment, format_bytes, synchronize
from sage_fast.util.errors import UserError
from sage_fast.util.files import write_json
from sage_fast.util.process_group import initialize
from sage_fast.util.profiling import PHASES, WAIT, annotate, ranges
from sage_fast.util.ranks import barrier, rank, world_size
from sage_fast.util.text import counted

log = logging.getLogger(__name__)

ByPhase = Mapping[str, float]
TRACE = "rank-{:03d}.json.gz"
"""File of a rank's trace."""
PART_OF_PLAN = {"rollout": "rollout", "decode": "decode", "anchor": "anchor", "train": "training"}
"""Phase -> part of the plan, for phases whose FLOPs have a formula."""

KERNELS = 25
"""Number of kernels in the table, by their time."""


def profile_iteration(
    config: Config,
    source: str,
    settings: Mapping[str, str],
    *,
    folder: Path,
    warmup: int,
    window_only: bool,
) -> dict[str, Any]:
    """Warm up, then profile one iteration on every rank. The trained weights are discarded.

    Args:
        config: validated settings.
        source: the configuration as given on the command line.
        settings: the settings given with it.
        folder: folder for profile.json, each rank's trace and the prompt embeddings.
        warmup: iterations before the measured one.
        window_only: whether to emit ranges for Nsight instead of running torch.profiler; writes no
            files.

    Returns:
        The content of profile.json, of rank 0; on other ranks without the tables of the trace.

    Raises:
        UserError: the folder already holds a profile, or a setting is impossible.
    """
    device = initialize(config.timeout_minutes)
    resolved = check_trainable(config)
    if not window_only and (folder / "profile.json").exists():
        raise UserError(
            f"{str(folder)!r} already holds a profile; choose another folder with --folder"
        )
    with ranges("nvtx" if window_only else "torch"):
        log.info("loading the model")
        setup = load_setup(resolved)
        folder.mkdir(parents=True, exist_ok=True)
        with quiet():
            setup.encode(folder / "embeddings")
        trainer = Trainer(
            setup.resolved,
            setup.model,
            setup.reward,
            setup.prompts,
            setup.embeddings,
            graphs=setup.graphs,
        )
        for index in progress(range(warmup), "warm-up", warmup, "iteration"):
            with quiet():
                trainer.iteration(index)
        log.info("measuring one iteration")
        ceiling = matmul_ceiling(device, trainer.policy.dtype)
        model = setup.model
        expected = plan(config, model.spec, ranks=world_size(), chosen=model.checkpointing)
        profiler = None if window_only else torch.profiler.profile(record_shapes=True)
        barrier()  # ranks measure the ceiling in different times
        with profiler or contextlib.nullcontext():
            row = _window(trainer, warmup)
    done, useful = flops_of_phases(trainer, expected.samples)
    facts = environment(device, implementation(device))
    facts["dtype"] = str(trainer.policy.dtype).removeprefix("torch.")
    full, _ = full_rate(facts, ceiling)
    result = {
        "environment": facts,
        "ranks": world_size(),
        "source": source,
        "settings": dict(settings),
        "warmup": warmup,
        "text_tokens": model.spec.text_tokens,
        "image_tokens": expected.prompt_tokens - model.spec.text_tokens,
        "ceiling_flops_per_second": ceiling,
        "phases": phase_table(row, done, useful, full),
        "peak_bytes": {
            phase: row[f"memory/{phase}"] for phase in PHASES if f"memory/{phase}" in row
        },
        "planned_bytes": sum(expected.memory.values()),
        "rates": [],
        "kernels": [],
        "trace": None if window_only else str(folder / TRACE.format(rank())),
    }
    if profiler is not None and rank() == 0:
        write_json(result, folder / "profile.json")  # before the trace is read, which may be long
        log.info("reading the trace")
        on_gpu = device.type == "cuda"
        result["rates"] = rate_table(profiler.events(), on_gpu=on_gpu)
        if on_gpu:
            result["kernels"] = kernel_table(profiler.key_averages())
        write_json(result, folder / "profile.json")
    if profiler is not None:
        profiler.export_chrome_trace(str(result["trace"]))
    return result


def _window(trainer: Trainer, index: int) -> dict[str, Any]:
    """Run the measured iteration; on CUDA it is the capture range of nsys and ncu."""
    synchronize(trainer.device)
    with (
        torch.cuda.profiler.profile() if trainer.device.type == "cuda" else contextlib.nullcontext()
    ):
        with quiet(), annotate("iteration", index):
            row = trainer.iteration(index)
        synchronize(trainer.device)
    return row


def flops_of_phases(trainer: Trainer, samples: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return phase -> mean FLOPs of a rank in the latest iteration, and its model FLOPs, without a
    recomputation.

    A step that the rollout trained is training.
    """
    model, frozen = trainer.model, trainer.config.model.trains_adapter
    cost = model.spec.cost(trainer.config)

    def of_a_rank(mode: CheckpointPlan | None) -> dict[str, float]:
        parts = flops(cost, trainer.forwards, samples, checkpointing=mode, trains_adapter=frozen)
        return {phase: parts[part] / world_size() for phase, part in PART_OF_PLAN.items()}

    return of_a_rank(model.checkpointing), of_a_rank(None)


# -- tables ----------------------------------------------------------------------------------------


def phase_table(
    row: Mapping[str, Any], flops: ByPhase, model_flops: ByPhase, full: float
) -> dict[str, dict[str, float | None]]:
    """Return phase or `total` -> seconds, share, FLOPs, FLOP/s, MFU and HFU.

    HFU = FLOPs / seconds / `full`, the FLOP/s by `full_rate`; MFU is the same of `model_flops`,
    which a recomputation does not add to.
    """
    shown = list(PHASES)
    if f"time/{WAIT}" in row:
        shown.append(WAIT)
    seconds = {phase: float(row.get(f"time/{phase}", 0.0)) for phase in shown}
    total = float(row["time/total"])
    seconds["other"] = total - sum(seconds.values())
    done = {**flops, "total": sum(flops.values())}
    useful = {**model_flops, "total": sum(model_flops.values())}
    table: dict[str, dict[str, float | None]] = {}
    for phase, value in (seconds | {"total": total}).items():
        line: dict[str, float | None] = {
            "seconds": value,
            "share": value / total,
            "flops": done.get(phase),
            "model_flops": useful.get(phase),
            "flops_per_second": None,
            "mfu": None,
            "hfu": None,
        }
        if phase in done and value > 0:
            line["flops_per_second"] = done[phase] / value
            line["hfu"] = done[phase] / value / full
        if phase in useful and value > 0:
            line["mfu"] = useful[phase] / value / full
        table[phase] = line
    return table


def kernel_table(averages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return name, calls and seconds of kernels and copies on the GPU, largest first, then the sum
    of the others."""
    kernels = [e for e in averages if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    rows = [
        {"name": e.key, "calls": e.count, "seconds": e.self_device_time_total / 1e6}
        for e in kernels
    ]
    rest = rows[KERNELS:]
    if not rest:
        return rows
    others = {
        "name": "all others",
        "calls": sum(row["calls"] for row in rest),
        "seconds": sum(row["seconds"] for row in rest),
    }
    return [*rows[:KERNELS], others]


def format_profile(result: Mapping[str, Any]) -> str:
    """Format the tables for a terminal."""

    def cell(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value / scale, form)

    env, phases = result["environment"], result["phases"]
    measured = result["ceiling_flops_per_second"]
    full, full_line = full_rate(env, measured)
    head = ("seconds", "share", "FLOPs", "TFLOP/s", "MFU", "HFU")
    lines = [
        head_line(env),
        f"a {env['dtype']} matrix product, measured here and now: {measured / 1e12:.3g} TFLOP/s",
        full_line,
        "",
        f"{'phase':<28}" + "".join(f"{title:>11}" for title in head),
    ]
    for phase, row in phases.items():
        cells = [cell(row["seconds"], ".4f"), cell(row["share"], ".1%")]
        cells += [cell(row["flops"], ".3g"), cell(row["flops_per_second"], ".3g", 1e12)]
        for key in ("model_flops", "flops"):
            # from FLOPs and seconds, since files of other commits hold shares of other rates
            done = row[key] if row["flops_per_second"] else None
            cells.append(cell(done, ".1%", row["seconds"] * full))
        lines.append(f"{phase:<28}" + "".join(f"{text:>11}" for text in cells))
    if result["ranks"] > 1:
        lines.append(
            f"seconds of rank 0 of {counted(result['ranks'], 'rank')}, FLOPs as the mean of all"
        )
    image_tokens = result.get("image_tokens", 0)
    images = f" and {image_tokens} image tokens" if image_tokens else ""
    lines.append(
        f"FLOPs by the formulas of `train --dry-run`, {result['text_tokens']} text tokens{images} "
        "a prompt"
    )
    lines.append(
        "HFU: share by all FLOPs; MFU: by those of the model, without what a backward recomputes"
    )
    peaks = result["peak_bytes"]
    if peaks:
        found = ", ".join(f"{phase} {format_bytes(peak)}" for phase, peak in peaks.items())
        line = f"peak of allocated memory: {found}"
        if "train" in peaks:
            planned = result["planned_bytes"]
            share = peaks["train"] / planned
            line += f"; train is {share:.0%} of the planned {format_bytes(planned)}"
        lines.append(line)
    rates = result.get("rates")
    kernels = result.get("kernels")
    if rates:
        lines += ["", *format_rates(rates, on_gpu=bool(kernels))]
    if kernels:
        total = sum(row["seconds"] for row in kernels)
        lines += [
            "",
            f"{'GPU seconds':>11}{'share':>8}{'calls':>9}  kernel; together {total:.4f} s, over "
            "all streams",
        ]
        for row in kernels:
            share = row["seconds"] / total
            lines.append(
                f"{row['seconds']:>11.4f}{share:>8.1%}{row['calls']:>9}  {row['name'][:90]}"
            )
    if result["trace"] is not None:
        others = f" (of other ranks: {TRACE.format(1)} ...)" if result["ranks"] > 1 else ""
        lines += ["", f"trace, for ui.perfetto.dev: {result['trace']}{others}"]
    return "\n".join(line.rstrip() for line in lines)
