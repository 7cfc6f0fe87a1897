"""Accumulate numbers over an iteration, reduce them over ranks, time its phases, and write them down."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from sage_fast.engine.distributed import all_gather_object
from sage_fast.profiling import annotate


class Metrics:
    """Per-sample values by name; nothing synchronises with the device until `reduce`."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._by_step: dict[int, list[Tensor]] = defaultdict(list)
        self._fixed: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        """A value that is already the same on every rank."""
        self._fixed[name] = value

    def count(self, name: str, value: int) -> None:
        self._fixed[name] = self._fixed.get(name, 0) + value

    def add(self, name: str, values: Tensor, op: str = "mean") -> None:
        """Collect `values [N]`; `op` is mean, min or max over all of them and all ranks."""
        self._values[name, op].append(values.detach())

    def add_by_step(self, steps: Sequence[int], values: Tensor) -> None:
        """Collect one value of `values [N]` for each of N transition steps."""
        for step, value in zip(steps, values.detach()):
            self._by_step[step].append(value)

    def reduce(self) -> dict[str, float]:
        """Names to numbers, the same on every rank; ranks need not have collected the same names."""
        operators: dict[str, Callable[..., float]] = {"mean": sum, "min": min, "max": max}
        merged: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        local = {}
        for (name, op), chunks in self._values.items():
            values = torch.cat([chunk.flatten().double() for chunk in chunks])
            reduced = {"mean": values.sum(), "min": values.amin(), "max": values.amax()}[op]
            local[name, op] = (float(reduced), len(values))
        for part in all_gather_object(local):
            for key, value in part.items():
                merged[key].append(value)
        row = dict(self._fixed)
        for (name, op), reduced_values in sorted(merged.items()):
            result = operators[op](value for value, _ in reduced_values)
            row[name] = result / sum(count for _, count in reduced_values) if op == "mean" else result
        return row

    def by_step(self, steps: int) -> list[float | None]:
        """Mean of the values collected for each of `steps` transitions; None where there is none."""
        local = {
            step: (float(torch.stack(values).double().sum()), len(values)) for step, values in self._by_step.items()
        }
        sums, counts = [0.0] * steps, [0] * steps
        for part in all_gather_object(local):
            for step, (total, count) in part.items():
                sums[step] += total
                counts[step] += count
        return [total / count if count else None for total, count in zip(sums, counts)]


class Stopwatch:
    """Seconds by phase, each a named range for profilers too; waits for the device where a phase ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str, *, wait: bool = True) -> Iterator[None]:
        """Add the seconds of the block to `phase`; without `wait`, those that it takes to give the device its work."""
        start = time.perf_counter()
        with annotate(phase):
            yield
            # Inside the range, so that every kernel of a phase starts and ends within it.
            if wait and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self._seconds[phase] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """`time/<phase>`, and `time/total` since this watch was made; `train` excludes `optimizer`, which it holds."""
        seconds = dict(self._seconds)
        if "train" in seconds and "optimizer" in seconds:
            seconds["train"] -= seconds["optimizer"]
        rows = {f"time/{phase}": value for phase, value in seconds.items()}
        return rows | {"time/total": time.perf_counter() - self.start}


class MetricsWriter:
    """`metrics.jsonl` and TensorBoard events of a run.

    Args:
        folder: the run.
        iteration: the next iteration; rows from there on (of a run that is resumed) are dropped.
    """

    def __init__(self, folder: Path, iteration: int = 0) -> None:
        path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(path) if json.loads(line)["iteration"] < iteration]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration or None)

    def write(self, row: dict[str, object]) -> None:
        """Append one iteration; numbers that are not finite are written as null."""
        self._file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
        self._file.flush()
        for key, value in row.items():
            if isinstance(value, int | float) and key != "iteration":
                self._events.add_scalar(key, value, int(str(row["iteration"])))

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_lines(path: Path) -> list[str]:
    """Complete lines of a JSONL file; a last line cut off by a kill is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
