"""Print what scripts/gpu.sh measured beside what was expected: `python -m scripts.gpu_predictions
OUT [--tiny]`.

The expectations were written before the measurement, from the files of one H100 and from
arithmetic: no results. Stock stays below the times of an H200 that computed its adapter in float32.
Shares are of the data sheet; expected were 56 and 63 % of a burst of 789 TFLOP/s.
They are shown for that size (not with --tiny) and such a card alone.
"""

from __future__ import annotations

import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sage_fast.benchmarks.operators import LEAST_SHARE

from sage_fast.tools.harness import full_rate

Found = Mapping[str, Any]
CARDS = ("H100", "H200")
BAR = f"{100 * LEAST_SHARE['adapter_rows']:g} or more"
HOLDS = {
    "below": operator.lt,
    "above": operator.gt,
    "or more": operator.ge,
    "or below": operator.le,
}
"""Words of a bound -> (value, number) -> whether it is kept."""


def _rollout(part: str, path: str) -> Callable[[Found], float]:
    """Milliseconds of a path of `bench rollout`."""
    return lambda found: (
        1e3 * next(row["seconds"][path] for row in found["rows"] if row["part"] == part)
    )


def _attention(backend: str, direction: str) -> Callable[[Found], float]:
    """TFLOP/s of a backend on normal data."""
    wanted = {"backend": backend, "direction": direction, "data": "normal"}
    return lambda found: next(
        row["flops_per_second"] / 1e12
        for row in found["limits"]["attention"]
        if wanted.items() <= row.items()
    )


def _ceiling(data: str, key: str) -> Callable[[Found], float]:
    return lambda found: next(
        row[key] / 1e12 for row in found["limits"]["ceiling"] if row["data"] == data
    )


def _adapter_rows(kind: str, label: str | None) -> Callable[[Found], float]:
    """Milliseconds of a contender of `adapter_rows`; None: percent of a copy's speed that the best
    tile reaches."""

    def value(found: Found) -> float:
        seconds = next(
            row["seconds"] for row in found["limits"]["adapter_rows"] if row["kind"] == kind
        )
        tiles = [took for name, took in seconds.items() if name not in ("copy", "PyTorch")]
        return 1e3 * seconds[label] if label else 100 * seconds["copy"] / min(tiles)

    return value


def _training(found: Found) -> float:
    """Milliseconds of a trained step: six in the iteration's two samples of three steps."""
    return 1e3 * found["phases"]["train"]["seconds"] / 6


def _share(key: str) -> Callable[[Found], float]:
    """Percent of the data sheet that FLOPs of the whole iteration are."""

    def value(found: Found) -> float:
        total = found["phases"]["total"]
        full, _ = full_rate(found["environment"], found["ceiling_flops_per_second"])
        return 100 * total[key] / total["seconds"] / full

    return value


ROWS: tuple[tuple[str, str, str, Callable[[Found], float]], ...] = (
    ("ceiling", "matrix product, burst, TFLOP/s", "789", _ceiling("normal",
     "burst_flops_per_second")),
    ("ceiling", "the same for 3 s", "below the burst", _ceiling("normal", "flops_per_second")),
    ("ceiling", "the same of zeros", "894 in a burst", _ceiling("zeros", "flops_per_second")),
    ("attention", "cuDNN forward, TFLOP/s", "566", _attention("cudnn", "forward")),
    ("attention", "cuDNN backward, TFLOP/s", "530", _attention("cudnn", "backward")),
    ("attention", "FlashAttention 4 forward, TFLOP/s", "615", _attention("flash4", "forward")),
    ("attention", "FlashAttention 4 backward, TFLOP/s", "560", _attention("flash4", "backward")),
    ("adapter-rows", "adapter_rows with GELU, % of a copy", BAR, _adapter_rows("GELU", None)),
    ("adapter-rows", "GELU by PyTorch, then cuBLAS, ms", "0.78", _adapter_rows("GELU", "PyTorch")),
    ("adapter-rows", "its backward, % of a copy", BAR, _adapter_rows("backward of GELU", None)),
    ("rollout", "5x16x16: step by a graph / eager step", "below 1", lambda found: _rollout("step",
     "graphed")(found)
        / _rollout("step", "eager")(found)),
    ("rollout-480p", "forward, stock, ms", "below 3427", _rollout("forward", "stock")),
    ("rollout-480p", "forward, tuned stock, ms", "below 2098", _rollout("forward", "tuned")),
    ("rollout-480p", "forward, tuned compiled / ours", "above 1",
        lambda found: _rollout("forward", "tuned compiled")(found) / _rollout("forward",
            "eager")(found)),
    ("rollout-480p", "forward, ours, FlashAttention 4, ms", "1095", _rollout("forward",
     "eager flash4")),
    ("rollout-480p", "forward, ours, the fastest, ms", "1095; 1165 by cuDNN", _rollout("forward",
     "eager")),
    ("iteration", "trained step, ms", "3853; 4042 by cuDNN", _training),
    ("iteration", "MFU, %", "above 45", _share("model_flops")),
    ("iteration", "HFU, %", "above 50", _share("flops")),
    ("decode-480p", "decode of a video, ms", "below 2100", _rollout("decode", "channels last")),
    ("rollout-9x30x52", "9x30x52: step by a graph / eager step", "1 or below",
        lambda found: _rollout("step", "graphed")(found) / _rollout("step", "eager")(found)),
    ("video-121", "50 steps with guidance, s", "165 at a matmul's rate",
        lambda found: _rollout("rollout", "eager")(found) / 1e3),
)  # fmt: skip
"""Part, quantity, expectation, and how its result gives the value. Times are those of an H100 or
H200 at 480p, 81 frames, batch 1, unless a row names another size."""


def _result(out: Path, part: str) -> Found | None:
    file = next(
        (file for file in (out / f"{part}.json", out / part / "profile.json") if file.is_file()),
        None,
    )
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))


def missed(expected: str, value: float) -> bool:
    """Whether a value is outside an expected bound; other expectations are not bounds."""
    bound = re.fullmatch(r"(below|above)? ?([\d.]+) ?(or more|or below)?", expected)
    holds = HOLDS.get(bound[1] or bound[3]) if bound else None
    return bound is not None and holds is not None and not holds(value, float(bound[2]))


def lines(out: Path, tiny: bool = False) -> Iterator[str]:
    """Yield a line per row whose part has left a result; `absent` where that lacks the value."""
    for part, quantity, expected, value in ROWS:
        if (found := _result(out, part)) is None:
            continue
        if tiny or not any(card in found["environment"]["device"] for card in CARDS):
            expected = "not for this"
        try:
            number = value(found)
            measured = f"{number:.4g}"
            if missed(expected, number):
                measured += "  missed"
        except (KeyError, StopIteration, ValueError):
            # a path or a backend that is not there, or did not run
            measured = "absent"
        yield f"{part:<19}{quantity:<43}{expected:>22}  {measured}"


if __name__ == "__main__":
    rows = list(lines(Path(sys.argv[1]), "--tiny" in sys.argv))
    if rows:
        print(f"\n{'part':<19}{'quantity':<43}{'expected':>22}  measured")
        print("\n".join(rows))
