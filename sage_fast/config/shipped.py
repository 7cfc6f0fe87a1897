"""The configurations that come with the package: their names, what they train, what they cost.

Imports nothing heavy: the costs are in `plans.json`, written from the plan by
`python -m scripts.shipped_plans`.
"""

from __future__ import annotations

import difflib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

FOLDER = Path(str(files("sage_fast.configs") / "demo.yaml")).parent
PLANS = FOLDER / "plans.json"
"""Name of a configuration -> its plans, each for a number of GPUs, or for CPU cores."""


def shipped_names() -> list[str]:
    """Return the names of the shipped configurations."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def gpus_of(name: str) -> tuple[int, int]:
    """Return the largest number of GPUs that a configuration's plans are for, and their memory in
    GB; no GPU for one that is planned for a CPU."""
    plans = json.loads(PLANS.read_text(encoding="utf-8"))[name]
    last = plans[-1]
    return last.get("gpus", 0), last.get("gpu_gigabytes", 0)


def describe_shipped() -> str:
    """Return the shipped configurations as text: of each its name, the first two lines, which say
    what it trains and on what evidence, and its memory and times by the plan."""
    plans = json.loads(PLANS.read_text(encoding="utf-8"))
    lines = []
    for name in shipped_names():
        head = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[:2]
        lines.append(name)
        lines += [f"  {line.removeprefix('# ')}" for line in head]
        lines += [f"  Plan: {_in_words(each)}" for each in plans[name]]
    lines += [
        "Plans are for cards of 80 GB, at the burst rate of an H200 and at the rates that one H200",
        "reached, for a card of 24 GB at the data sheet of an RTX 4090 and at the share of it that",
        "the H200 reached, or for two quiet CPU cores; without rewards and communication. Yours:",
        "sage-fast train CONFIG --dry-run --gpus N",
        "sage-fast init FOLDER --config NAME copies one",
    ]
    return "\n".join(lines)


def _in_words(plan: dict[str, Any]) -> str:
    """Return a plan as `8 GPUs, 66 GiB each (39 at least), an iteration 5.9 to 7.8 min, ...`."""
    iterations = f"{plan['iterations']:,} iterations"
    if "gpus" not in plan:
        return (
            f"two CPU cores, tensors of {plan['memory_gib']:.2g} GiB, an iteration "
            f"{plan['iteration_seconds']:.2g} s, {iterations} {plan['run_minutes']:.2g} min"
        )
    count = plan["gpus"]
    memory = f"{plan['memory_gib']:.0f} GiB"
    if plan["least_memory_gib"] < plan["memory_gib"] - 1:
        memory += f" ({plan['least_memory_gib']:.0f} at least)"
    each = " each" if count > 1 else ""
    low, high = plan["iteration_minutes"]
    fewest, most = plan["gpu_hours"]
    gigabytes = plan["gpu_gigabytes"]
    cards = f"{count} {'GPUs' if count > 1 else 'GPU'} of {gigabytes} GB"
    return (
        f"{cards}, {memory}{each}, an iteration {low:.2g} to {high:.2g} min, "
        f"{iterations} {fewest:,.0f} to {most:,.0f} GPU-hours"
    )


def shipped_hint(path: Path) -> str:
    """Return how to begin with the shipped configuration that a missing file is named like, after
    `; `; empty if none is meant."""
    names = shipped_names()
    name = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if name in names:
        return f"; {name!r} comes with the package: {start_of(name)}"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    if close:
        return f"; did you mean {close[0]!r}, which comes with the package? {start_of(close[0])}"
    return ""


def start_of(name: str) -> str:
    """Return how to begin with a shipped configuration."""
    return f"sage-fast init my-run --config {name}, then sage-fast train my-run/config.yaml"
