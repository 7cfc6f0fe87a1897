"""Read what benchmarks/results holds of GPUs, for the pages: rows, kernels and their seconds."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"

ROLLOUT = "2026-11-27-h200-rollout-480p.json"
ITERATION = "2026-11-27-h200-iteration.json"
VIDEO = "2026-11-27-h200-video-121.json"
SMALL = "2026-11-27-h200-rollout.json"
CEILING = "2026-11-27-h200-ceiling.json"
ATTENTION = "2026-11-27-h200-attention.json"
TILES = "2026-11-27-h200-adapter-rows.json"
OPERATORS = "2026-11-25-h100-operators.json"
FULL = "2026-11-25-h100-full.json"
NFT = "2026-11-25-h100-nft.json"
ZERO3 = "2026-11-25-h100-nft-zero3.json"
PICTURE = "2026-11-29-cpu-demo-picture.json"
DEMO = "2026-11-29-cpu-2-cores-iteration.json"

SIZE = "480p 81 frames"
STEPS, SAMPLES = 3, 2
"""Steps of a sample and samples of the profiled iteration."""
BLOCKS = 54
WIDTH = 2048
TOKENS = 21 * 30 * 52 + 200
"""Tokens of a video of 480p, 81 frames, and of its prompt."""
UNIT = 21 * 30 * 52 * WIDTH * 2
"""Bytes of a block's video tokens, 480p, 81 frames, in bfloat16."""
PLANNED_BURST = 789e12
"""FLOP/s that the predictions were written for."""


@functools.cache
def result(name: str) -> Any:
    """Return the content of a file in benchmarks/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def row(name: str, **cells: Any) -> Mapping[str, Any]:
    """Return the one row of a result of `bench rollout` or `bench` that has these cells."""
    (found,) = (r for r in result(name)["rows"] if cells.items() <= r.items())
    return found


def limit(name: str, part: str, **cells: Any) -> Mapping[str, Any]:
    """Return the one row of a part of `bench limits` that has these cells."""
    (found,) = (r for r in result(name)["limits"][part] if cells.items() <= r.items())
    return found


def seconds(part: str, path: str) -> float:
    """Return the seconds of a path at 480p, 81 frames: a forward, or a trained step that recomputes
    everything."""
    return row(ROLLOUT, size=SIZE, part=part, rounds=3)["seconds"][path]


def trained_step() -> float:
    """Return the seconds of a trained step as shipped: `auto`, in the profiled iteration."""
    return result(ITERATION)["phases"]["train"]["seconds"] / (SAMPLES * STEPS)


def kernels(*beginnings: str) -> tuple[int, float]:
    """Return calls and GPU seconds of the iteration's kernels whose names begin so."""
    found = [k for k in result(ITERATION)["kernels"] if k["name"].startswith(beginnings)]
    assert found, beginnings
    return sum(k["calls"] for k in found), sum(k["seconds"] for k in found)


def copy_rate() -> float:
    """Return bytes a second of a large copy on the H200."""
    plain = limit(TILES, "adapter_rows", kind="plain")
    return plain["bytes"] / plain["seconds"]["copy"]
