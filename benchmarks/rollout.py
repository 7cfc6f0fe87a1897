"""Measure the rollout engine: forwards, steps, rollouts, training and decode against stock
diffusers.

`sage-fast bench rollout`. One model with random weights (nothing is downloaded); its stock forward
and ours are timed interleaved in one process, and the table gives medians. A correctness gate runs
first: a wrong result gets no time. On a GPU the ladder is the published 8.3 B architecture from 5 x
16 x 16 latents to 480p, 81 frames; on the CPU it is the testbed. Rows that do not fit the time
budget are listed as not run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from sage_fast.benchmarks.limits import format_sustained, sustained_ceiling
from sage_fast.benchmarks.rung import (
    CPU_SIZES,
    GPU_SIZES,
    GROUPS,
    HOST,
    PARTS,
    SIZES,
    TRAINED,
    Rung,
    checkpointing_of,
    part_flops,
    random_decoders,
    random_transformer,
    spec_of,
)
from sage_fast.benchmarks.timing import (
    Save,
    fresh_compilation,
    interleaved,
    launch_timer,
    save_nothing,
)

from sage_fast.models.checkpointing import MODES, CheckpointPlan
from sage_fast.models.hunyuan15.spec import decode_flops
from sage_fast.ops import implementation
from sage_fast.tools.harness import (
    BURST_FLOPS,
    full_rate,
    head_line,
    host_timer,
    matmul_ceiling,
    usual_dtype,
)
from sage_fast.util.console import Progress
from sage_fast.util.environment import environment
from sage_fast.util.errors import UserError, in_one_line
from sage_fast.util.ranks import local_device

WARM_UPS = 2
"""Calls of a contender before it is timed: one that compiles and allocates, one in steady state."""
LONG = 20
"""Steps from which on a rollout is timed once, after the warm-up of one step."""
Timer = Callable[[Callable[[], Any], torch.device], Callable[[], float]]
"""(function, device) -> a function that runs it once and returns seconds."""
OUT_OF_MEMORY = "out of memory"
"""The one reason for a missing time that is a finding, not a fault."""


def measure(
    contenders: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    left: float = math.inf,
    warm_ups: Mapping[str, Callable[[], Any]] | None = None,
    timer_kind: Timer = host_timer,
) -> dict[str, Any]:
    """Return the median seconds per path, the peak of allocated bytes on a GPU, the rounds, and the
    failures.

    Args:
        contenders: path -> function without arguments.
        device: device they run on.
        rounds: maximum number of interleaved rounds.
        left: seconds that the row may take. If they are too few, there are fewer rounds, but at
            least one.
        warm_ups: path -> what warms it up; its contender by default. With warm-ups of its own there
            is one round.
        timer_kind: what times a call.
    """
    stop = time.monotonic() + left
    peak: dict[str, int] = {}
    timers: dict[str, Callable[[], float]] = {}
    steady: dict[str, list[float]] = {}
    failed: dict[str, str] = {}

    def timer_of(name: str) -> Callable[[], float]:
        timer = timer_kind(contenders[name], device)

        def timed() -> float:
            if device.type != "cuda":
                return timer()
            torch.cuda.reset_peak_memory_stats()
            seconds = timer()
            peak[name] = max(peak.get(name, 0), torch.cuda.max_memory_allocated())
            return seconds

        return timed

    for name, function in contenders.items():
        warm_up = host_timer((warm_ups or {}).get(name, function), device)
        try:
            steady[name] = [warm_up() for _ in range(WARM_UPS)][-1:]
        except torch.OutOfMemoryError:
            failed[name] = OUT_OF_MEMORY
            continue
        except (
            Exception
        ) as error:  # from a compiler or a kernel: the other paths can still be measured
            failed[name] = in_one_line(error)
            continue
        timers[name] = timer_of(name)
    fitting = (
        (stop - time.monotonic()) / sum(seconds for (seconds,) in steady.values())
        if timers
        else 1.0
    )
    rounds = 1 if warm_ups else max(1, int(min(rounds, fitting)))
    try:
        seconds = interleaved(timers, rounds)
    except Exception as error:
        # GPU faults surface late and nothing runs after one: keep the warm-up times
        rounds = 1
        if warm_ups:
            seconds = {}
            failed["interleaved"] = in_one_line(error)
        else:
            seconds = steady
            failed["interleaved"] = f"only the second warm-up is timed: {in_one_line(error)}"
    return {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "peak_bytes": peak,
        "rounds": rounds,
        "failed": failed,
    }


def estimate(
    rows: Sequence[Mapping[str, Any]],
    size: str,
    part: str,
    flops: float,
    paths: Collection[str],
    calls: int,
) -> float:
    """Estimate the seconds of a row with `calls` calls of each path from the measured rows; 0
    before the first.

    Each path runs at its FLOP/s in the most similar row: the same size, else the same part, else
    the latest. A path missing there runs at the FLOP/s of the slowest. The largest overhead of any
    row is added.
    """
    timed = [row for row in rows if row["seconds"]]
    if not timed:
        return 0.0
    like = max(reversed(timed), key=lambda row: (row["size"] == size, row["part"] == part))
    slowest = max(like["seconds"].values())
    work = flops / like["flops"] * sum(like["seconds"].get(path, slowest) for path in paths)
    overhead = max(
        row["wall_seconds"] - (WARM_UPS + row["rounds"]) * sum(row["seconds"].values())
        for row in timed
    )
    return calls * work + max(overhead, 0.0)


def chosen_paths(parts: Sequence[str] | None, paths: Sequence[str] | None) -> dict[str, list[str]]:
    """Return part -> paths to measure.

    Raises:
        UserError: a requested part has none of the requested paths.
    """
    chosen = {}
    given = parts or PARTS
    wanted = dict.fromkeys(one for part in given for one in GROUPS.get(part, (part,)))
    for part in wanted:
        chosen[part] = [path for path in PARTS[part] if paths is None or path in paths]
        if parts is not None and not chosen[part]:
            asked = " or ".join(map(repr, paths or []))
            raise UserError(
                f"--part {part!r} has no path {asked}; its paths are {', '.join(PARTS[part])}"
            )
    return {part: found for part, found in chosen.items() if found}


def run(
    names: Sequence[str] | None = None,
    rounds: int = 7,
    parts: Sequence[str] | None = None,
    paths: Sequence[str] | None = None,
    budget: float | None = None,
    save: Save = save_nothing,
) -> dict[str, Any]:
    """Measure every row. Return what `sage-fast bench rollout` writes as JSON.

    Args:
        names: names of sizes; by default the ladder of this device.
        rounds: interleaved rounds per row.
        parts: names of PARTS and GROUPS; all by default.
        paths: a subset of PATHS; all by default.
        budget: seconds for the whole benchmark; no limit by default. Rows that do not fit the
            remainder are not run.
        save: called with the result after every row.
    """
    end = time.monotonic() + (math.inf if budget is None else budget)
    device = local_device()
    dtype = usual_dtype(device)
    work = chosen_paths(parts, paths)
    sizes = names or (GPU_SIZES if device.type == "cuda" else CPU_SIZES)
    rows: list[dict[str, Any]] = []
    not_run: list[dict[str, Any]] = []
    result = {
        "environment": environment(device, implementation(device))
        | {"dtype": str(dtype).removeprefix("torch.")},
        "ceiling_flops_per_second": matmul_ceiling(device, dtype),
        "sustained_ceiling": sustained_ceiling(device, dtype),
        "budget_seconds": budget,
        "rows": rows,
        "not_run": not_run,
        "stand_ins": [],
    }
    transformer = decoders = built = None
    with Progress("bench rollout", len(sizes) * len(work), "row") as bar:
        for name in sizes:
            size = SIZES[name]
            if built != size.testbed:
                transformer = decoders = None  # free their memory for the next ones
                transformer, built = random_transformer(size.testbed, device, dtype), size.testbed
                decoders = (
                    random_decoders(size.testbed, device, dtype) if "decode" in work else None
                )
            assert transformer is not None
            rung = Rung(transformer, size, decoders)
            result["stand_ins"] = rung.stand_ins
            problems: dict[
                str, dict[str, str]
            ] = {}  # gate -> path -> problem, for gates that have run
            for part, chosen in work.items():
                gate = "decode" if part == "decode" else "forward"
                flops, once = rung.flops(part), part == "rollout" and size.steps >= LONG
                calls = (1 if once else WARM_UPS + 1) + (gate not in problems)
                expected = estimate(rows, name, part, flops, chosen, calls)
                facts = _facts(rung, name, part, chosen)
                if (left := _left(end)) <= expected:
                    reason = (
                        f"about {math.ceil(expected)} s, and {max(left, 0):.0f} s of {budget:g} s "
                        "are left"
                    )
                    not_run.append(facts | {"reason": reason, "expected_seconds": expected})
                else:
                    with fresh_compilation():
                        start = time.monotonic()
                        if gate not in problems:
                            problems[gate] = rung.check(
                                gate, {path for found in work.values() for path in found}
                            )
                        wrong = {
                            path: why
                            for path, why in problems[gate].items()
                            if path in (*chosen, "stock")
                        }
                        right = [path for path in chosen if path not in wrong]
                        contenders = rung.contenders(part, right)
                        if contenders or wrong:
                            warm_ups = rung.contenders("step", right) if once else None
                            kind = launch_timer if part == HOST else host_timer
                            measured = measure(
                                contenders, device, rounds, _left(end), warm_ups, kind
                            )
                            measured["failed"] |= wrong
                            rows.append(
                                facts | measured | {"wall_seconds": time.monotonic() - start}
                            )
                        else:
                            not_run.append(facts | {"reason": f"no {' or '.join(chosen)} here"})
                save(result)
                bar.update()
    return result


def _facts(rung: Rung, name: str, part: str, paths: Sequence[str]) -> dict[str, Any]:
    """Return what a row says besides its times.

    Args:
        rung: the size.
        name: its name.
        part: the row's part.
        paths: those to measure.
    """
    facts: dict[str, Any] = {
        "size": name,
        "part": part,
        "batch": rung.size.batch,
        "flops": rung.flops(part),
        "model_flops": rung.flops(part, model=True),
        "unavailable": {path: rung.unavailable[path] for path in paths if path in rung.unavailable},
    }
    if part in TRAINED:
        facts["recomputed"] = str(rung.checkpointing(part))
    if part != "decode":
        facts["attention"] = rung.attention
    return facts


def _left(end: float) -> float:
    """Return the seconds left; negative once the budget is spent."""
    return end - time.monotonic()


def failures(result: Mapping[str, Any]) -> int:
    """Return the number of paths that failed for a reason other than lack of memory."""
    return sum(why != OUT_OF_MEMORY for row in result["rows"] for why in row["failed"].values())


# -- tables ----------------------------------------------------------------------------------------


def arithmetic(names: Sequence[str] | None = None, parts: Sequence[str] | None = None) -> str:
    """Format what the rows cost by the plan's formulas, without running them."""
    lines = [
        f"{'size':<18}{'part':<17}{'tokens':>9}{'forwards':>10}{'model FLOPs':>13}"
        f"{'with recomputation':>20}{'at ' + format(BURST_FLOPS / 1e12, '.0f') + ' TFLOP/s':>16}"
    ]
    for name in names or GPU_SIZES:
        size = SIZES[name]
        spec = spec_of(size.testbed)
        config = spec.meta("transformer").config
        tokens = size.batch * (math.prod(size.space) + size.text_tokens)
        for part in chosen_paths(parts, None):
            # What `auto` recomputes depends on the card, and the host's time on no FLOPs.
            if checkpointing_of(part) not in MODES or part == HOST:
                continue
            if part == "decode":
                forwards, model = (
                    0,
                    size.batch * decode_flops(spec.vae.decoder, (config.out_channels, *size.space)),
                )
                done = model
            else:
                forwards = size.passes * (size.steps if part == "rollout" else 1)
                plan = CheckpointPlan(checkpointing_of(part))
                model, done = (part_flops(config, size, part, chosen) for chosen in (None, plan))
            lines.append(
                f"{name:<18}{part:<17}{tokens:>9,}{forwards or '':>10}{model:>13.3g}{done:>20.3g}"
                f"{done / BURST_FLOPS:>14.3g} s"
            )
    lines += [
        "",
        "arithmetic: every FLOP at the burst of a bf16 matrix product on one H200, without text "
        "encoding",
    ]
    return "\n".join(lines)


def format_rollout(result: Mapping[str, Any]) -> str:
    """Format the table for a terminal."""
    env, measured = result["environment"], result["ceiling_flops_per_second"]
    full, full_line = full_rate(env, measured)
    lines = [
        head_line(env),
        f"a {env['dtype']} matrix product, measured here and now: {measured / 1e12:.3g} TFLOP/s",
        *(
            [format_sustained(result["sustained_ceiling"])]
            if result.get("sustained_ceiling")
            else []
        ),
        full_line,
        "",
        f"{'size':<18}{'part':<17}{'path':<30}{'time':>12}{'calls':>7}{'to stock':>10}"
        f"{'TFLOP/s':>9}{'MFU':>8}{'HFU':>8}{'peak memory':>13}",
    ]
    for row in result["rows"]:
        for name, seconds in row["seconds"].items():
            peak = f"{row['peak_bytes'][name] / 2**30:.2f} GiB" if name in row["peak_bytes"] else ""
            model, done = (row[key] / seconds / full for key in ("model_flops", "flops"))
            rate = row["flops"] / seconds / 1e12
            stock = f"{row['seconds']['stock'] / seconds:.2f}x" if "stock" in row["seconds"] else ""
            rates = f"{rate:>9.3g}{model:>8.1%}{done:>8.1%}"
            if row["part"] == HOST:
                rates = " " * len(rates)
            lines.append(
                f"{row['size']:<18}{row['part']:<17}{name:<30}{1e3 * seconds:>9.2f} "
                f"ms{row['rounds']:>7}{stock:>10}{rates}{peak:>13}".rstrip()
            )
        lines += [
            f"{row['size']:<18}{row['part']:<17}{name:<30}{why}"
            for name, why in (row["failed"] | row.get("unavailable", {})).items()
        ]
    lines += [
        "",
        "calls: timed calls of each path, interleaved; the time is their median. stock: diffusers "
        "as it comes, with",
        "masked attention. TFLOP/s, HFU: all FLOPs over time, with the unpadded prompt; MFU: "
        "without what a backward",
        "recomputes",
    ]
    if any(row["part"] == HOST for row in result["rows"]):
        lines += [
            "host: the CPU's time of a forward of an eighth of the video tokens, until all is "
            "launched, without the",
            "exchanges of ranks; eight GPUs that share a sample (model.sequence_parallel = 8) take "
            "no less",
        ]
    lines += [
        f"not run: {row['size']}, {row['part']}: {row['reason']}" for row in result["not_run"]
    ]
    served = {
        row["size"]: row["attention"]
        for row in [*result["rows"], *result["not_run"]]
        if "attention" in row
    }
    lines += [f"attention of eager and graphed at {size}: {name}" for size, name in served.items()]
    lines += [
        f"recomputed by {row['part']} at {row['size']}: {row['recomputed']}"
        for row in result["rows"]
        if checkpointing_of(row["part"]) not in MODES
    ]
    ran = {path for row in result["rows"] for path in row["seconds"]}
    stand_ins = [path for path in result.get("stand_ins", []) if path in ran]
    if stand_ins:
        kernels = ", ".join(stand_ins)
        lines.append(f"no GPU: PyTorch's attention stands in for the kernels of {kernels}")
    return "\n".join(lines)
