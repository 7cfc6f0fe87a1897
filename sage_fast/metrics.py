"""Accumulate numbers over an iteration, reduce them over ranks, and time its phases."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.distributed import all_gather_object, world_size
from sage_fast.errors import NonFiniteError
from sage_fast.objective import Loss
from sage_fast.profiling import PHASES, WAIT, annotate

REWARD_PART = "reward_part/"
"""Prefix of the parts of a reward, whose names its author chooses; statistics are under `reward/`."""
JUDGE_PART = "judge/"
"""Prefix of the parts of `eval.judge` among those of an evaluation."""


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
        """Mean of the values collected for each of `steps` transitions; None for a step without any."""
        local = {
            step: (float(torch.stack(values).double().sum()), len(values)) for step, values in self._by_step.items()
        }
        sums, counts = [0.0] * steps, [0] * steps
        for part in all_gather_object(local):
            for step, (total, count) in part.items():
                sums[step] += total
                counts[step] += count
        return [total / count if count else None for total, count in zip(sums, counts)]


def record_rewards(
    metrics: Metrics,
    rewards: Tensor,
    parts: Mapping[str, Tensor],
    advantages: Tensor,
    valid: Tensor,
    equal: Tensor,
    retried: int = 0,
) -> None:
    """Statistics of the composite as `reward/<statistic>`, means of its parts as `reward_part/<part>`.

    Args:
        metrics: takes them.
        rewards, advantages: `[P, G]`, of all ranks.
        parts: each `[P G]`.
        valid: bool `[P, G]`, False for a failed reward.
        equal: bool `[P]`, groups without an advantage.
        retried: samples whose reward was called again.

    Raises:
        NonFiniteError: every reward failed.
    """
    counted = rewards[valid]
    if not counted.numel():
        raise NonFiniteError("every reward of this iteration failed; nothing can be learned from it")
    spread = torch.stack([r[v].std(correction=0) for r, v in zip(rewards, valid) if v.any()])
    metrics.set("reward/mean", float(counted.mean()))
    metrics.set("reward/std", float(spread.mean()))
    metrics.set("reward/zero_std_groups", float(equal.float().mean()))
    metrics.set("reward/dropped", int((~valid).sum()))
    metrics.set("reward/dropped_groups", int((valid.sum(1) < 2).sum()))
    metrics.set("reward/retried", retried)
    metrics.set("advantage/abs_mean", float(advantages[valid].abs().mean()))
    for part, values in parts.items():
        metrics.set(REWARD_PART + part, float(values[values.isfinite()].mean()))


def record_losses(metrics: Metrics, losses: Sequence[Loss]) -> None:
    """What an update tells of the loss, the KLs and the ratio."""
    for loss in losses:
        metrics.add("loss", loss.total)
        metrics.add("loss/policy", loss.policy)
        metrics.add("kl/anchor", loss.kl_anchor)
        metrics.add("kl/velocity", loss.kl_velocity)
        metrics.add("ratio/mean", loss.ratio)
        metrics.add("ratio/min", loss.ratio, "min")
        metrics.add("ratio/max", loss.ratio, "max")
        metrics.add("ratio/clip_fraction", loss.clipped)
        metrics.add("log_prob/max_delta", loss.ratio.log().abs(), "max")


class Stopwatch:
    """Seconds by phase, and on a GPU the peak of allocated memory; each phase is a named range for profilers too.

    Waits for the device when a phase ends. What one phase left running on another stream counts in the next. A phase
    within another counts for itself alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, int] = {}
        self._open: list[str] = []

    @contextlib.contextmanager
    def __call__(self, phase: str, *, wait: bool = True) -> Iterator[None]:
        """Add the seconds of the block to `phase`; without `wait`, those that it takes to give the device its work."""
        start = time.perf_counter()
        self._note_peak()
        self._open.append(phase)
        try:
            with annotate(phase):
                yield
                # Inside the range, so that every kernel of a phase starts and ends within it.
                if wait and self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        finally:
            self._note_peak()
            self._open.pop()
        seconds = time.perf_counter() - start
        self._seconds[phase] += seconds
        if self._open:
            self._seconds[self._open[-1]] -= seconds

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around a collective whose result is needed at once: `wait`, of which a single process has none."""
        if world_size() == 1:
            return contextlib.nullcontext()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # its own work is not waiting
        return self(WAIT)

    def _note_peak(self) -> None:
        """The peak since the last call belongs to all phases that are open."""
        if self.device.type != "cuda":
            return
        peak = torch.cuda.max_memory_allocated(self.device)
        self._peaks |= {phase: max(peak, self._peaks.get(phase, 0)) for phase in self._open}
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> dict[str, int]:
        """`memory/<phase>`, bytes; nothing on the CPU."""
        return {f"memory/{phase}": peak for phase, peak in self._peaks.items()}

    def seconds(self) -> dict[str, float]:
        """`time/<phase>`, and `time/total` since this watch was made."""
        rows = {f"time/{phase}": value for phase, value in self._seconds.items()}
        return rows | {"time/total": time.perf_counter() - self.start}


def slowest_and_fastest(seconds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Phase -> `slowest` and `fastest`, each [rank, seconds]; `work` is all of a rank's phases.

    Args:
        seconds: `Stopwatch.seconds()` of every rank.
    """
    known = [phase for phase in PHASES if any(f"time/{phase}" in row for row in seconds)]
    times = {phase: [row.get(f"time/{phase}", 0.0) for row in seconds] for phase in known}
    times["work"] = [sum(of_rank) for of_rank in zip(*times.values())]
    ends = {}
    for phase, values in times.items():
        slowest, fastest = values.index(max(values)), values.index(min(values))
        ends[phase] = {"slowest": [slowest, values[slowest]], "fastest": [fastest, values[fastest]]}
    return ends


SHARE_OF_STRAGGLERS, SECONDS_OF_STRAGGLERS = 0.1, 1.0
"""Of an iteration, what the slowest rank works longer than the fastest before a line says so."""


def straggler_line(row: Mapping[str, Any]) -> str | None:
    """Which rank the others wait for, if that is worth a line; where it differs most is named."""
    ends = dict(row.get("time/ranks", {}))
    if not ends:
        return None

    def spread(phase: str) -> float:
        return ends[phase]["slowest"][1] - ends[phase]["fastest"][1]

    if spread("work") < max(SHARE_OF_STRAGGLERS * row["time/total"], SECONDS_OF_STRAGGLERS):
        return None
    phase = max((phase for phase in ends if phase != "work"), key=spread)
    (slow, most), (fast, least) = (ends["work"][end] for end in ("slowest", "fastest"))
    line = f"rank {slow} works {most:.1f} s, rank {fast} {least:.1f} s; {phase}: "
    return line + ", ".join(f"{ends[phase][end][1]:.1f} s on {ends[phase][end][0]}" for end in ("slowest", "fastest"))
