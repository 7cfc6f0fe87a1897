"""Operators of the demo's updates, without the optimizer: diffusers' forward against ours, by
torch.profiler.

python -m benchmarks.training_ops [FILE]    print the table, and write it as JSON

The paths run one after the other: compare calls, and shares within a path, not the seconds of two
paths.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from sage_fast.benchmarks import iteration

from sage_fast.config.loader import load
from sage_fast.ops import implementation
from sage_fast.util.environment import environment

CONFIG = "configs/demo.yaml"
GROUPS = {
    "matmuls": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "fused operators": ("sage_fast",),
    "GELU": ("aten::gelu",),
    "element-wise, sums, copies, views": ("",),
}
"""Group -> beginnings of its operators' names; the first group that matches counts one."""


def updates(path: str, count: int = 4) -> dict[str, dict[str, float]]:
    """Return group -> mean calls and self CPU seconds of `count` updates."""
    trainer = iteration._trainer(load(CONFIG), path)
    engine: Any = trainer.engine
    trainer.iteration(0)
    update, engine.optimizers, found = trainer.update, [], []

    def profiled(*arguments: Any) -> None:
        with torch.profiler.profile() as profiler:
            update(*arguments)
        found.append(profiler.key_averages())

    trainer.update = profiled
    for index in range(1, count // 2 + 1):
        trainer.iteration(index)
    table: dict[str, dict[str, float]] = {group: {"calls": 0.0, "seconds": 0.0} for group in GROUPS}
    for event in (event for averages in found for event in averages):
        group = next(
            name for name, beginnings in GROUPS.items() if event.key.startswith(beginnings)
        )
        table[group]["calls"] += event.count / len(found)
        table[group]["seconds"] += event.self_cpu_time_total / 1e6 / len(found)
    return table


if __name__ == "__main__":
    device = torch.device("cpu")
    rows = {path: updates(path) for path in ("stock", "eager")}
    result = {
        "environment": environment(device, implementation(device)),
        "source": CONFIG,
        "updates": 4,
        "paths": rows,
    }
    for file in sys.argv[1:]:
        Path(file).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    totals: dict[str, float] = defaultdict(float)
    for path, table in rows.items():
        totals[path] = sum(row["seconds"] for row in table.values())
    for group in GROUPS:
        cells = [
            f"{rows[p][group]['calls']:.0f} | {rows[p][group]['seconds'] / totals[p]:.0%}"
            for p in rows
        ]
        print(f"| {group} | {' | '.join(cells)} |")
