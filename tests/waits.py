"""Waiting in tests: for events, never for an amount of time."""

import time
from collections.abc import Callable

HANG = 600
"""Seconds after which a test that waits has failed.

It guards against a hang and claims nothing about speed.
"""


def wait_until(condition: Callable[[], object], shown: Callable[[], object] = str) -> None:
    """Poll until `condition` holds; fail with what is `shown` if it never does."""
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, shown()
        time.sleep(0.02)
