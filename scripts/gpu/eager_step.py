"""Time an eager denoising step before and after a CUDA graph is captured, and trace one of each:
`python -m scripts.gpu.eager_step --json FILE [--tiny]`.

At 5x16x16 the eager step of `bench rollout` took 62 ms more than its forward, which follows a
capture in the same process. The traces lie beside FILE.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sage_fast.benchmarks.rung import SIZES, Rung, random_transformer

from sage_fast.callbacks.profiler import write_trace
from sage_fast.ops import implementation
from sage_fast.tools.harness import host_timer, usual_dtype
from sage_fast.util.environment import environment, synchronize
from sage_fast.util.files import write_json
from sage_fast.util.profiling import ranges
from sage_fast.util.ranks import local_device

SIZE = "5x16x16"
CALLS = 15
OPERATIONS = 15
"""Number of operations in the table, by their time on the host."""


def median_of(step: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Return the median seconds of a step, the device's work included."""
    timer = host_timer(step, device)
    for _ in range(2):
        timer()
    return statistics.median(timer() for _ in range(calls))


def traced(step: Callable[[], Any], device: torch.device, trace: Path) -> list[dict[str, Any]]:
    """Profile one step, write its trace, and return the operations that took the host longest."""
    synchronize(device)
    with torch.profiler.profile() as profiler, ranges("torch"):
        step()
        synchronize(device)
    write_trace(profiler, trace)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [
        {"name": event.key, "calls": event.count, "seconds": event.self_cpu_time_total / 1e6}
        for event in events[:OPERATIONS]
    ]


def measure(size: str, calls: int, file: Path) -> dict[str, Any]:
    """Return what is written to `file`; the traces lie beside it."""
    device = local_device()
    dtype = usual_dtype(device)
    torch.manual_seed(0)
    rung = Rung(random_transformer(SIZES[size].testbed, device, dtype), SIZES[size])
    seconds: dict[str, float] = {}
    operations: dict[str, list[dict[str, Any]]] = {}

    def eager(when: str) -> None:
        step = rung.contenders("step", ["eager"])["eager"]
        seconds[f"forward {when}"] = median_of(
            rung.contenders("forward", ["eager"])["eager"], device, calls
        )
        seconds[when] = median_of(step, device, calls)
        trace = file.with_name(f"{file.stem}-{when}.json.gz")
        operations[when] = traced(step, device, trace)

    eager("before")
    graphed = rung.contenders("step", ["graphed"])  # captures; empty on a CPU
    if graphed:
        seconds["graphed"] = median_of(graphed["graphed"], device, calls)
    eager("after")
    return {
        "environment": environment(device, implementation(device))
        | {"dtype": str(dtype).removeprefix("torch.")},
        "size": size,
        "calls": calls,
        "eager_step": {"seconds": seconds, "operations": operations},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    size, calls = ("tiny", 3) if options.tiny else (SIZE, CALLS)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = measure(size, calls, options.json)
    write_json(result, options.json)
    times = result["eager_step"]["seconds"]
    print(", ".join(f"{name} {1e3 * took:.2f} ms" for name, took in times.items()))


if __name__ == "__main__":
    main()
