"""Train the testbed by one or several engines, keep the metrics, and compare them:
`python -m scripts.gpu.runs --json FILE --folder FOLDER [--engine ENGINE]... CONFIG
[SETTING VALUE]...`.

The first engine is what the others are compared with. The exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.ops import implementation
from sage_fast.util.environment import environment
from sage_fast.util.files import read_metrics, write_json
from sage_fast.util.ranks import local_device

COMPARED = ("reward/mean", "grad_norm")
TOLERANCE = 0.01
"""Largest relative difference between engines."""

Metrics = Mapping[str, Sequence[Mapping[str, Any]]]


def largest_difference(metrics: Metrics) -> float:
    """Return the largest relative difference of an engine from the first; NaN if a value is."""
    first, *others = metrics.values()
    largest = 0.0
    for rows in others:
        for expected, row in zip(first, rows, strict=True):
            for name in COMPARED:
                difference = abs(row[name] / expected[name] - 1)
                if not difference <= largest:
                    largest = difference
    return largest


def agree(metrics: Metrics) -> bool:
    difference = largest_difference(metrics)
    return not math.isnan(difference) and difference < TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", action="append", default=[])
    options, arguments = parser.parse_known_args()
    metrics = {}
    for engine in options.engine or ["plain"]:
        output = options.folder / engine
        command = [sys.executable, "-m", "sage_fast", "train", *arguments]
        command += ["--train.engine", engine, "--output", str(output)]
        status = subprocess.call(command)
        if status:
            return status
        metrics[engine] = read_metrics(output / "metrics.jsonl")

    device = local_device()
    difference = largest_difference(metrics)
    result = {
        "environment": environment(device, implementation(device)),
        "arguments": arguments,
        "largest_difference": difference,
        "metrics": metrics,
    }
    write_json(result, options.json)
    for name in COMPARED:
        for engine, rows in metrics.items():
            print(f"{name} of {engine}:", *(f"{row[name]:.6g}" for row in rows))
    if len(metrics) > 1:
        print(f"the engines differ by at most {difference:.1e} of a value")
    return int(not agree(metrics))


if __name__ == "__main__":
    sys.exit(main())
