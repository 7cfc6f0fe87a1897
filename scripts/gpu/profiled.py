"""Profile an iteration, and count the kernels within each of its ranges:
`python -m scripts.gpu.profiled --folder FOLDER CONFIG [SETTING VALUE]...`.

It runs `sage-fast profile` and writes FOLDER/ranges.json from the trace. A range of the host is
projected onto the GPU by the kernels that its thread launched: one that holds none, such as a
backward in another thread, is not there. On a CPU operations stand for kernels.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.tools.phases import TRACE
from sage_fast.util.files import write_json
from sage_fast.util.profiling import RANGES

Event = Mapping[str, Any]
ON_GPU = {"ranges": "gpu_user_annotation", "kernels": ("kernel",)}
ON_CPU = {"ranges": "user_annotation", "kernels": ("cpu_op",)}
LABELS = frozenset(row.label for row in RANGES)


def label_of(name: str) -> str | None:
    """Return the label of one of our ranges, such as `block` of `sage_fast/block 17`; None for
    other ranges."""
    label = name.rpartition("/")[2].split(" ")[0]
    return label if label in LABELS else None


def count_kernels(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Return label of ranges -> their number, the kernels that begin within them, and seconds."""
    complete = [event for event in events if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "kernel" for event in complete)
    kinds = ON_GPU if on_gpu else ON_CPU
    starts = starts_by_thread(event for event in complete if event.get("cat") in kinds["kernels"])
    found: dict[str, dict[str, float]] = {}
    for event in complete:
        label = label_of(event["name"]) if event.get("cat") == kinds["ranges"] else None
        if label is None:
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        of_thread = starts.get((event["pid"], event["tid"]), [])
        inside = bisect.bisect_right(of_thread, end) - bisect.bisect_left(of_thread, begin)
        row = found.setdefault(label, {"ranges": 0, "kernels": 0, "seconds": 0.0})
        row["ranges"] += 1
        row["kernels"] += inside
        row["seconds"] += event["dur"] / 1e6
    return found


def starts_by_thread(events: Iterable[Event]) -> dict[tuple[Any, Any], list[float]]:
    """Return process and thread, or GPU and stream -> sorted starts of events."""
    found: dict[tuple[Any, Any], list[float]] = {}
    for event in events:
        found.setdefault((event["pid"], event["tid"]), []).append(event["ts"])
    for starts in found.values():
        starts.sort()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    options, arguments = parser.parse_known_args()
    command = [sys.executable, "-m", "sage_fast", "profile", *arguments]
    status = subprocess.call([*command, "--folder", str(options.folder)])
    if status:
        return status
    with gzip.open(options.folder / TRACE.format(0), "rt", encoding="utf-8") as trace:
        found = count_kernels(json.load(trace)["traceEvents"])
    write_json({"ranges": found}, options.folder / "ranges.json")
    for label, row in found.items():
        print(f"{label}: {row['ranges']:.0f} ranges, {row['kernels']:.0f} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
