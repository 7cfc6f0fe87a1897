"""Metrics of an iteration, reduced over ranks, and the times of its phases."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.util.profiling import PHASES, WAIT, annotate
from sage_fast.util.ranks import all_gather_object, world_size

REWARD_PART = "reward_part/"
"""Prefix of a reward's parts, whose names its author chooses. Statistics are under `reward/`."""
JUDGE_PART = "judge/"
"""Prefix of the parts of `eval.judge` in an evaluation."""


def name_in_name(names: Iterable[str]) -> tuple[str, str] | None:
    """Return a name that is the folder of another, such as `loss` of `loss/policy`, and that other;
    None without."""
    known = set(names)
    for name in sorted(known):
        parts = name.split("/")
        for count in range(1, len(parts)):
            folder = "/".join(parts[:count])
            if folder in known:
                return folder, name
    return None


class Metrics:
    """Per-sample values keyed by name. Nothing synchronises with the device before `reduce`."""

    def __init__(self) -> None:
        self._values: dict[tuple[str | int, str], list[Tensor]] = defaultdict(list)
        self._fixed: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        """Record a value that is already the same on every rank."""
        self._fixed[name] = value

    def count(self, name: str, value: int) -> None:
        self._fixed[name] = self._fixed.get(name, 0) + value

    def add(self, name: str, values: Tensor, op: str = "mean") -> None:
        """Collect `values [N]`, to be reduced by `op` (mean, min or max) over the iteration and all
        ranks."""
        self._values[name, op].append(values.detach())

    def add_by_step(self, steps: Sequence[int], values: Tensor) -> None:
        """Collect `values [N]`, one for each of N transition steps."""
        for step, value in zip(steps, values.detach()):
            self._values[step, "mean"].append(value)

    def reduce(self) -> dict[str, float]:
        """Return the numbers by name, the same on every rank.

        Collective; ranks may have collected different names.
        """
        return self._fixed | self._over_ranks(str)

    def by_step(self, steps: int) -> list[float | None]:
        """Return the mean over ranks for each of `steps` transitions, None where nothing was
        collected. Collective."""
        found = self._over_ranks(int)
        return [found.get(step) for step in range(steps)]

    def _over_ranks(self, kind: type) -> dict[Any, float]:
        """Return what was collected under names of a type, reduced over the ranks."""
        operators: dict[str, Callable[..., float]] = {"mean": sum, "min": min, "max": max}
        merged: dict[tuple[Any, str], list[tuple[float, int]]] = defaultdict(list)
        local = {}
        for (name, op), chunks in self._values.items():
            if not isinstance(name, kind):
                continue
            values = torch.cat([chunk.flatten().double() for chunk in chunks])
            reduced = {"mean": values.sum(), "min": values.amin(), "max": values.amax()}[op]
            local[name, op] = (float(reduced), len(values))
        for part in all_gather_object(local):
            for key, value in part.items():
                merged[key].append(value)
        row = {}
        for (name, op), reduced_values in sorted(merged.items()):
            result = operators[op](value for value, _ in reduced_values)
            if op == "mean":
                result /= sum(count for _, count in reduced_values)
            row[name] = result
        return row


class Stopwatch:
    """Seconds per phase and, on a GPU, peak allocated memory. Each phase is also a named range for
    profilers.

    The end of a phase synchronises with the device. Work left running on another stream counts in
    the next phase. The time of a nested phase is not part of the outer one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, int] = {}
        self._open: list[str] = []

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the block's seconds to `phase`."""
        start = time.perf_counter()
        self._note_peak()
        self._open.append(phase)
        try:
            with annotate(phase):
                yield
                # Wait inside the range, so that it covers every kernel of the phase.
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        finally:
            self._note_peak()
            self._open.pop()
        seconds = time.perf_counter() - start
        self._seconds[phase] += seconds
        if self._open:
            self._seconds[self._open[-1]] -= seconds

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Time a collective whose result is needed at once, as phase `wait`.

        No-op in a single process.
        """
        if world_size() == 1:
            return contextlib.nullcontext()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # this rank's own work does not count as waiting
        return self(WAIT)

    def _note_peak(self) -> None:
        """Credit the peak since the last call to all open phases."""
        if self.device.type != "cuda":
            return
        peak = torch.cuda.max_memory_allocated(self.device)
        self._peaks |= {phase: max(peak, self._peaks.get(phase, 0)) for phase in self._open}
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> dict[str, int]:
        """Return `memory/<phase>` in bytes; empty on a CPU."""
        return {f"memory/{phase}": peak for phase, peak in self._peaks.items()}

    def seconds(self) -> dict[str, float]:
        """Return `time/<phase>`, and `time/total` since the stopwatch was created."""
        rows = {f"time/{phase}": value for phase, value in self._seconds.items()}
        return rows | {"time/total": time.perf_counter() - self.start}


def slowest_and_fastest(
    seconds: Sequence[Mapping[str, float]],
) -> dict[str, dict[str, list[float]]]:
    """Return phase -> `slowest` and `fastest`, each [rank, seconds]. Phase `work` is the sum over a
    rank's phases.

    Args:
        seconds: `Stopwatch.seconds()` of every rank.
    """
    times: dict[str, list[float]] = {}
    for phase in PHASES:
        name = f"time/{phase}"
        if any(name in row for row in seconds):
            times[phase] = [row.get(name, 0.0) for row in seconds]
    times["work"] = [sum(phases) for phases in zip(*times.values())]

    ends = {}
    for phase, values in times.items():
        slowest = values.index(max(values))
        fastest = values.index(min(values))
        ends[phase] = {"slowest": [slowest, values[slowest]], "fastest": [fastest, values[fastest]]}
    return ends
