"""Numbers in the results of parts, for their predictions.

Each function raises KeyError, StopIteration or ValueError where a result lacks the number, as when
a path or a backend did not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Found = Mapping[str, Any]
Value = Callable[[Found], float]


def _rollout_row(found: Found, part: str) -> Mapping[str, Any]:
    return next(row for row in found["rows"] if row["part"] == part)


def rollout(part: str, path: str) -> Value:
    """Seconds of a path of `bench rollout`."""
    return lambda found: float(_rollout_row(found, part)["seconds"][path])


def rollout_peak(part: str, path: str) -> Value:
    """Peak of allocated memory of a path of `bench rollout`, GiB."""
    return lambda found: _rollout_row(found, part)["peak_bytes"][path] / 2**30


def attention(backend: str, direction: str) -> Value:
    """TFLOP/s of a backend on normal data."""
    wanted = {"backend": backend, "direction": direction, "data": "normal"}
    return lambda found: next(
        row["flops_per_second"] / 1e12
        for row in found["limits"]["attention"]
        if wanted.items() <= row.items()
    )


def ceiling(data: str) -> Value:
    """Sustained TFLOP/s of a matrix product."""
    return lambda found: next(
        row["flops_per_second"] / 1e12 for row in found["limits"]["ceiling"] if row["data"] == data
    )


def adapter_rows(kind: str) -> Value:
    """Percent of a copy's speed that the best tile of `adapter_rows` reaches."""

    def value(found: Found) -> float:
        seconds = next(
            row["seconds"] for row in found["limits"]["adapter_rows"] if row["kind"] == kind
        )
        tiles = [took for name, took in seconds.items() if name not in ("copy", "PyTorch")]
        return float(100 * seconds["copy"] / min(tiles))

    return value


def slowest_transition(found: Found) -> float:
    """Percent of a copy's speed of the slower transition operator at 720p."""
    rows = [row for row in found["rows"] if row["size"] == "720p batch 4"]
    rows = [row for row in rows if row["operator"].startswith("transition")]
    medians = [{name: took["p50"] for name, took in row["seconds"].items()} for row in rows]
    return min(100 * median["copy"] / median["fused"] for median in medians)


def share(key: str) -> Value:
    """Percent of the data sheet's FLOP/s that a whole iteration reaches: `mfu` or `hfu`."""
    return lambda found: 100 * found["phases"]["total"][key]


def tests(outcome: str) -> Value:
    """Number of tests with an outcome."""
    return lambda found: found["tests"][outcome]


def eager_step_growth(found: Found) -> float:
    """Milliseconds by which an eager step is longer after a capture than before."""
    seconds = found["eager_step"]["seconds"]
    return float(1e3 * (seconds["after"] - seconds["before"]))


def graphed_share(found: Found) -> float:
    """Time of a graph's step over that of an eager one before the capture."""
    seconds = found["eager_step"]["seconds"]
    return float(seconds["graphed"] / seconds["before"])


def streamed(work: str) -> Value:
    """Time with streamed blocks over that with resident ones."""

    def value(found: Found) -> float:
        seconds = {kind: found["streamed"][kind]["seconds"] for kind in ("streamed", "resident")}
        return float(seconds["streamed"][work] / seconds["resident"][work])

    return value


def wan(part: str, path: str) -> Value:
    """Seconds of a path of the part `wan`."""
    return lambda found: rollout(part, path)(found["wan"])


def wan_ratio(part: str) -> Value:
    """Time of compiled diffusers over ours in the part `wan`."""
    return lambda found: wan(part, "diffusers")(found) / wan(part, "ours")(found)


def wan_peak(found: Found) -> float:
    """Peak of a trained step of Wan, ours, over what the plan adds to its weights."""
    facts = found["wan"]
    peak = _rollout_row(facts, "train")["peak_bytes"]["ours"]
    return float(peak / (facts["resting_bytes"] + facts["planned_bytes"]))
