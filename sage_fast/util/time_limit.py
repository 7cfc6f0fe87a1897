"""A time limit that does not count the time in which this process was suspended."""

from __future__ import annotations

import math
import time

LOOK_S = 0.5
"""Longest time between two looks at a limit, in seconds."""
LONGEST_GAP_S = 1.0
"""What a longer gap between two looks counts as: the process was suspended, or hardly got the
processor."""


class TimeLimit:
    """Seconds of a wait, without those of a suspended process: Ctrl-Z, `scontrol suspend`, a paused
    container.

    The clock goes on meanwhile. An answer that was on its way would be late as soon as the process
    continues.

    Args:
        seconds: 0: no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds or math.inf
        self._looked = time.monotonic()

    @property
    def next_look(self) -> float:
        """Seconds to wait before `is_over` is called again."""
        return max(0.0, min(LOOK_S, self._left))

    def is_over(self) -> bool:
        """Return whether the limit has passed. To be called at least every `LOOK_S` seconds."""
        now = time.monotonic()
        self._left -= min(now - self._looked, LONGEST_GAP_S)
        self._looked = now
        return self._left <= 0
