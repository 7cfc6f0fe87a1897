"""Metrics of an iteration, reduced over ranks, and the times of its phases."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sage_fast.util.errors import NonFiniteError
from sage_fast.util.profiling import PHASES, WAIT, annotate
from sage_fast.util.ranks import all_gather_object, world_size

if TYPE_CHECKING:
    from sage_fast.algorithm.objective import Loss

REWARD_PART = "reward_part/"
"""Prefix of a reward's parts, whose names its author chooses. Statistics are under `reward/`."""
JUDGE_PART = "judge/"
"""Prefix of the parts of `eval.judge` in an evaluation."""


class Metrics:
    """Per-sample values keyed by name. Nothing synchronises with the device before `reduce`."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._by_step: dict[int, list[Tensor]] = defaultdict(list)
        self._fixed: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        """Record a value that is already the same on every rank."""
        self._fixed[name] = value

    def count(self, name: str, value: int) -> None:
        self._fixed[name] = self._fixed.get(name, 0) + value

    def add(self, name: str, values: Tensor, op: str = "mean") -> None:
        """Collect `values [N]`, to be reduced by `op` (mean, min or max) over the iteration and all ranks."""
        self._values[name, op].append(values.detach())

    def add_by_step(self, steps: Sequence[int], values: Tensor) -> None:
        """Collect `values [N]`, one for each of N transition steps."""
        for step, value in zip(steps, values.detach()):
            self._by_step[step].append(value)

    def reduce(self) -> dict[str, float]:
        """Return the numbers by name, the same on every rank. Collective; ranks may have collected different names."""
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
        """Return the mean over ranks for each of `steps` transitions, None where nothing was collected. Collective."""
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
    """Record statistics of the composite as `reward/<statistic>` and means of its parts as `reward_part/<part>`.

    Args:
        metrics: receives them.
        rewards, advantages: `[P, G]`, of all ranks.
        parts: part -> `[P G]`.
        valid: bool `[P, G]`, False for a failed reward.
        equal: bool `[P]`, True for a group without advantages.
        retried: number of samples whose reward was retried.

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


def record_scouting(metrics: Metrics, rewards: Tensor) -> None:
    """Record the mean of the candidates' `rewards [N]` as `scout/reward`, and how many failed as `scout/dropped`.

    Raises:
        NonFiniteError: every reward failed.
    """
    valid = rewards.isfinite()
    if not valid.any():
        raise NonFiniteError("every reward of this iteration's scouting failed; no sample can be chosen")
    metrics.set("scout/reward", float(rewards[valid].mean()))
    metrics.set("scout/dropped", int((~valid).sum()))


def record_agreement(metrics: Metrics, scouted: Tensor, rewards: Tensor) -> None:
    """Record as `scout/agreement` how often a sample chosen as one of the best beats one chosen as one of the worst.

    It is the share of such pairs within a group; pairs with a failed reward do not count.

    Args:
        metrics: receives it.
        scouted: `[P, G]`, rewards of the scouting rollouts.
        rewards: `[P, G]`, rewards of the samples.
    """
    ranked = rewards.where(scouted.isfinite(), torch.nan).gather(1, scouted.argsort(dim=1, stable=True))
    worst, best = ranked.chunk(2, 1)
    gaps = (best[:, :, None] - worst[:, None, :]).flatten()
    if (gaps := gaps[gaps.isfinite()]).numel():
        metrics.set("scout/agreement", float((gaps > 0).float().mean()))


def record_losses(metrics: Metrics, losses: Sequence[Loss]) -> None:
    """Record the loss, the KLs and the ratio of an update."""
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
    """Seconds per phase and, on a GPU, peak allocated memory. Each phase is also a named range for profilers.

    The end of a phase synchronises with the device. Work left running on another stream counts in the next phase. The
    time of a nested phase is not part of the outer one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, int] = {}
        self._open: list[str] = []

    @contextlib.contextmanager
    def __call__(self, phase: str, *, wait: bool = True) -> Iterator[None]:
        """Add the block's seconds to `phase`. Without `wait` this is launch time: the device is not waited for."""
        start = time.perf_counter()
        self._note_peak()
        self._open.append(phase)
        try:
            with annotate(phase):
                yield
                # Wait inside the range, so that it covers every kernel of the phase.
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
        """Time a collective whose result is needed at once, as phase `wait`. No-op in a single process."""
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


def slowest_and_fastest(seconds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Return phase -> `slowest` and `fastest`, each [rank, seconds]. Phase `work` is the sum over a rank's phases.

    Args:
        seconds: `Stopwatch.seconds()` of every rank.
    """
    known = [phase for phase in PHASES if any(f"time/{phase}" in row for row in seconds)]
    times = {phase: [row.get(f"time/{phase}", 0.0) for row in seconds] for phase in known}
    times["work"] = [sum(phases) for phases in zip(*times.values())]
    ends = {}
    for phase, values in times.items():
        slowest, fastest = values.index(max(values)), values.index(min(values))
        ends[phase] = {"slowest": [slowest, values[slowest]], "fastest": [fastest, values[fastest]]}
    return ends


SHARE_OF_STRAGGLERS, SECONDS_OF_STRAGGLERS = 0.1, 1.0
"""Straggler thresholds for slowest minus fastest rank: share of the iteration, and seconds; both must be reached."""


def straggler_line(row: Mapping[str, Any]) -> str | None:
    """Return a line that names the straggler and the phase with the largest spread; None below the threshold."""
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
