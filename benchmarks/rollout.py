"""Measure the rollout engine: forwards, steps, rollouts, training and decode against stock diffusers.

`sage-fast bench rollout`. One model with random weights (nothing is downloaded); its stock forward and ours are timed
interleaved in one process, and the table gives medians. A correctness gate runs first: a wrong result gets no time. On
a GPU the ladder is the published 8.3 B architecture from 5 x 16 x 16 latents to 480p, 81 frames; on the CPU it is the
testbed. Rows that do not fit the time budget are listed as not run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from sage_fast.benchmarks.rung import CPU_SIZES, GPU_SIZES, PARTS, SIZES, Rung, random_decoders, random_transformer
from sage_fast.benchmarks.timing import Save, interleaved, save_nothing

from sage_fast.ops import implementation
from sage_fast.tools.harness import head_line, host_timer, matmul_ceiling, usual_dtype
from sage_fast.util.console import Progress
from sage_fast.util.environment import environment
from sage_fast.util.errors import UserError, in_one_line
from sage_fast.util.ranks import local_device

WARM_UPS = 2
"""Calls of a contender before it is timed: one that compiles and allocates, one in steady state."""
OUT_OF_MEMORY = "out of memory"
"""The one reason for a missing time that is a finding, not a fault."""


def measure(
    contenders: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, left: float = math.inf
) -> dict[str, Any]:
    """Return the median seconds per path, the peak of allocated bytes on a GPU, the rounds, and the failures.

    Args:
        contenders: path -> function without arguments.
        device: device they run on.
        rounds: maximum number of interleaved rounds.
        left: seconds that the row may take. If they are too few, there are fewer rounds, but at least one.
    """
    stop = time.monotonic() + left
    peak: dict[str, int] = {}
    timers: dict[str, Callable[[], float]] = {}
    steady: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, function in contenders.items():
        timer = host_timer(function, device)
        try:
            timer()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            steady[name] = [timer()]
        except torch.OutOfMemoryError:
            failed[name] = OUT_OF_MEMORY
            continue
        except Exception as error:  # from a compiler or a kernel: the other paths can still be measured
            failed[name] = in_one_line(error)
            continue
        if device.type == "cuda":
            peak[name] = torch.cuda.max_memory_allocated()
        timers[name] = timer
    fitting = (stop - time.monotonic()) / sum(seconds for (seconds,) in steady.values()) if timers else 1.0
    rounds = max(1, int(min(rounds, fitting)))
    try:
        seconds = interleaved(timers, rounds)
    except Exception as error:  # GPU faults surface late and nothing runs after one: keep the warm-up times
        seconds, rounds = steady, 1
        failed["interleaved"] = f"only the second warm-up is timed: {in_one_line(error)}"
    return {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "peak_bytes": peak,
        "rounds": rounds,
        "failed": failed,
    }


def estimate(
    rows: Sequence[Mapping[str, Any]], size: str, part: str, flops: float, paths: Collection[str], calls: int
) -> float:
    """Estimate the seconds of a row with `calls` calls of each path from the measured rows; 0 before the first.

    Each path runs at its FLOP/s in the most similar row: the same size, else the same part, else the latest. A path
    missing there runs at the FLOP/s of the slowest. The largest overhead of any row is added.
    """
    timed = [row for row in rows if row["seconds"]]
    if not timed:
        return 0.0
    like = max(reversed(timed), key=lambda row: (row["size"] == size, row["part"] == part))
    slowest = max(like["seconds"].values())
    work = flops / like["flops"] * sum(like["seconds"].get(path, slowest) for path in paths)
    overhead = max(row["wall_seconds"] - (WARM_UPS + row["rounds"]) * sum(row["seconds"].values()) for row in timed)
    return calls * work + max(overhead, 0.0)


def chosen_paths(parts: Sequence[str] | None, paths: Sequence[str] | None) -> dict[str, list[str]]:
    """Return part -> paths to measure.

    Raises:
        UserError: a requested part has none of the requested paths.
    """
    chosen = {}
    for part in parts or PARTS:
        chosen[part] = [path for path in PARTS[part] if paths is None or path in paths]
        if parts is not None and not chosen[part]:
            asked = " or ".join(map(repr, paths or []))
            raise UserError(f"--part {part!r} has no path {asked}; its paths are {', '.join(PARTS[part])}")
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
        parts: a subset of PARTS; all by default.
        paths: a subset of PATHS; all by default.
        budget: seconds for the whole benchmark; no limit by default. Rows that do not fit the remainder are not run.
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
        "environment": environment(device, implementation(device)) | {"dtype": str(dtype).removeprefix("torch.")},
        "ceiling_flops_per_second": matmul_ceiling(device, dtype),
        "budget_seconds": budget,
        "rows": rows,
        "not_run": not_run,
    }
    transformer = decoders = built = None
    with Progress("bench rollout", len(sizes) * len(work), "row") as bar:
        for name in sizes:
            size = SIZES[name]
            if built != size.testbed:
                transformer = decoders = None  # free their memory for the next ones
                transformer, built = random_transformer(size.testbed, device, dtype), size.testbed
                decoders = random_decoders(size.testbed, device, dtype) if "decode" in work else None
            assert transformer is not None
            rung = Rung(transformer, size, decoders)
            problems: dict[str, dict[str, str]] = {}  # gate -> path -> problem, for gates that have run
            for part, chosen in work.items():
                gate = "decode" if part == "decode" else "forward"
                flops = rung.flops(part)
                expected = estimate(rows, name, part, flops, chosen, calls=WARM_UPS + 1 + (gate not in problems))
                facts = {"size": name, "part": part, "batch": size.batch, "flops": flops}
                facts |= {} if part == "decode" else {"attention": rung.attention}
                if (left := _left(end)) <= expected:
                    reason = f"about {math.ceil(expected)} s, and {max(left, 0):.0f} s of {budget:g} s are left"
                    not_run.append(facts | {"reason": reason, "expected_seconds": expected})
                else:
                    start = time.monotonic()
                    if gate not in problems:
                        problems[gate] = rung.check(gate, {path for found in work.values() for path in found})
                    wrong = {path: why for path, why in problems[gate].items() if path in (*chosen, "stock")}
                    contenders = rung.contenders(part, [path for path in chosen if path not in wrong])
                    if contenders or wrong:
                        measured = measure(contenders, device, rounds, _left(end))
                        measured["failed"] |= wrong
                        rows.append(facts | measured | {"wall_seconds": time.monotonic() - start})
                    else:
                        not_run.append(facts | {"reason": f"no {' or '.join(chosen)} here"})
                save(result)
                bar.update()
    return result


def _left(end: float) -> float:
    """Return the seconds left; negative once the budget is spent."""
    return end - time.monotonic()


def failures(result: Mapping[str, Any]) -> int:
    """Return the number of paths that failed for a reason other than lack of memory."""
    return sum(why != OUT_OF_MEMORY for row in result["rows"] for why in row["failed"].values())


# -- tables -----------------------------------------------------------------------------------------------------------


def format_rollout(result: Mapping[str, Any]) -> str:
    """Format the table for a terminal."""
    env, ceiling = result["environment"], result["ceiling_flops_per_second"]
    lines = [
        head_line(env),
        f"ceiling of a {env['dtype']} matrix product, measured here and now: {ceiling / 1e12:.3g} TFLOP/s",
        "",
        f"{'size':<18}{'part':<9}{'path':<15}{'time':>12}{'to stock':>10}{'of ceiling':>12}{'peak memory':>13}",
    ]
    for row in result["rows"]:
        for name, seconds in row["seconds"].items():
            peak = f"{row['peak_bytes'][name] / 2**30:.2f} GiB" if row["peak_bytes"] else ""
            share = row["flops"] / seconds / ceiling
            stock = f"{row['seconds']['stock'] / seconds:.2f}x" if "stock" in row["seconds"] else ""
            lines.append(
                f"{row['size']:<18}{row['part']:<9}{name:<15}{1e3 * seconds:>9.2f} ms"
                f"{stock:>10}{share:>12.1%}{peak:>13}".rstrip()
            )
        lines += [f"{row['size']:<18}{row['part']:<9}{name:<15}{why}" for name, why in row["failed"].items()]
    lines += ["", "medians of one interleaved run; FLOPs of every path are the model's with the unpadded prompt"]
    lines += [f"not run: {row['size']}, {row['part']}: {row['reason']}" for row in result["not_run"]]
    served = {row["size"]: row["attention"] for row in [*result["rows"], *result["not_run"]] if "attention" in row}
    lines += [f"attention of eager and graphed at {size}: {name}" for size, name in served.items()]
    return "\n".join(lines)
