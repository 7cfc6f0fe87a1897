"""Name a rank that all others wait for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sage_fast.callbacks.interface import Callback
from sage_fast.util.console import wrapped

if TYPE_CHECKING:
    from sage_fast.run.train import Run

log = logging.getLogger(__name__)

STRAGGLER_FACTOR = 1.2
"""Seconds of work of the slowest rank over those of the fastest from which it is a straggler."""
STRAGGLER_ITERATIONS = 5
"""Consecutive iterations in which the same rank has to be one before a note names it."""

Ends = Mapping[str, Mapping[str, tuple[int, float]]]
"""The metric `time/ranks`: phase, or `work` for their sum -> `slowest` and `fastest`, each
[rank, seconds]."""


class Stragglers(Callback):
    """Says once of a rank that it has been much slower than the fastest for several iterations.

    Ranks that take turns at being slow are not named: rewards fail and groups are equal by chance.
    The iteration in which a process starts does not count, since it compiles and warms up.
    """

    def __init__(self) -> None:
        self._rank: int | None = None  # straggler of the latest iteration
        self._iterations = 0  # consecutive iterations in which it was that
        self._has_started = False
        self._named: set[int] = set()

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        if not self._has_started:
            self._has_started = True
            return

        ends: Ends | None = row.get("time/ranks")  # only with several ranks
        slow = None if ends is None else straggler(ends)
        if slow is None or slow != self._rank:
            self._iterations = 0
        self._rank = slow
        if ends is None or slow is None:
            return

        self._iterations += 1
        if self._iterations >= STRAGGLER_ITERATIONS and slow not in self._named:
            self._named.add(slow)
            log.warning(wrapped(f"note: {in_words(ends)}"))


def straggler(ends: Ends) -> int | None:
    """Return the slowest rank if it works `STRAGGLER_FACTOR` times as long as the fastest."""
    rank, slowest = ends["work"]["slowest"]
    _, fastest = ends["work"]["fastest"]
    return rank if slowest > STRAGGLER_FACTOR * fastest else None


def in_words(ends: Ends) -> str:
    """Say how much longer the slowest rank works than the fastest, and in which phase most."""
    rank, slowest = ends["work"]["slowest"]
    other, fastest = ends["work"]["fastest"]
    longer = (
        f"{100 * (slowest / fastest - 1):.0f} % longer than rank {other}" if fastest else "alone"
    )

    # seconds that the rank loses in each phase in which it is the slowest
    lost = {
        phase: sides["slowest"][1] - sides["fastest"][1]
        for phase, sides in ends.items()
        if phase != "work" and sides["slowest"][0] == rank
    }
    where = ""
    if lost:
        phase = max(lost, key=lambda name: lost[name])
        seconds, best = ends[phase]["slowest"][1], ends[phase]["fastest"][1]
        where = f", most in {phase} ({seconds:.3g} s against {best:.3g} s)"
    return (
        f"rank {rank} works {longer}{where}, and has been the slowest for {STRAGGLER_ITERATIONS} "
        "iterations: the others wait for it. Its GPU may be slow or shared, or it has more samples "
        "than others (docs/how-to/many-gpus.md)"
    )
