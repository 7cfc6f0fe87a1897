"""An error on one rank ends the others in seconds, also those that are blocked in a collective."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from sage_fast.util.errors import RunError, UserError, in_one_line, print_error
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import fails_alone, rank, world_size

log = logging.getLogger(__name__)

KEY = "sage_fast/failed"
"""Key in the store of the process group; its value says which rank failed first, and why."""
REFUSED = "sage_fast/refused"
"""Likewise for a `UserError`, which usually is raised on every rank."""
STATUS = {KEY: 1, REFUSED: 2}
"""Exit status of a rank that ends because of what it finds under a key."""
POLL = 0.25
"""Seconds between two looks at the store."""
EXIT_GRACE = 1.0
"""Exit grace: seconds that a rank stays after its error.

Rank 0 may host the store, where the others look.
"""
STORE_TIMEOUT_S = 10.0
"""Seconds for the store to answer.

Beyond a link that is down it answers after a quarter of an hour, with an error.
"""


@contextlib.contextmanager
def fail_fast(timeout_minutes: float) -> Iterator[None]:
    """If the block raises on this rank alone, end this process and all other ranks with status 1.

    The rank prints its error and writes it into the store of the process group. On every other rank
    a thread finds it there, repeats it in one line and ends the process: with NCCL a collective
    would wait until `timeout_minutes` is over. A `UserError` is raised as usual, since bad settings
    raise it on every rank; only the ranks that go on are ended, with status 2.
    """
    initialize(timeout_minutes)
    if world_size() == 1:
        yield
        return
    group: Any = dist.group.WORLD  # torch's stubs lack `clone`
    store, over = group.get_group_store(), threading.Event()
    watch = threading.Thread(
        target=_watch, args=(store.clone(), over), name="other ranks", daemon=True
    )
    watch.start()
    try:
        try:
            yield
        finally:
            over.set()
            watch.join(STORE_TIMEOUT_S)  # ends the process if another rank has failed
    except Exception as error:
        log.debug("what ended this rank", exc_info=error)  # for the rank's own log
        if fails_alone():
            answering = None if watch.is_alive() else store
            if not isinstance(error, UserError):
                _fail(answering, error)
            if answering is not None:
                _publish(answering, REFUSED, f"rank {rank()} failed: {in_one_line(error)}")
        raise


def _fail(store: dist.Store | None, error: Exception) -> None:
    """End this process and, by way of the store, the other ranks.

    The error is printed first, since a launcher may kill this rank as soon as another has ended.

    Args:
        store: None if it does not answer.
        error: the error of this rank.
    """
    with contextlib.suppress(dist.DistError):  # the rank that hosted the store is gone
        for key, status in STATUS.items():
            # the error of that rank is the cause of this one
            if store is not None and store.check([key]):
                _end(store.get(key).decode(), status)
    lost = "/gloo/transport/" in str(error)  # a plain RuntimeError
    if not lost and not isinstance(error, (RunError, OSError)):
        sys.excepthook(type(error), error, error.__traceback__)
    of_others = "another rank is gone, hangs or cannot be reached: " if lost else ""
    why = f"rank {rank()} failed: {of_others}{in_one_line(error)}"
    if store is not None:
        _publish(store, KEY, why)
    _end(why)


def _publish(store: dist.Store, key: str, why: str) -> None:
    """Tell the other ranks, if no rank has told them anything yet, and stay until they have
    looked."""
    with contextlib.suppress(dist.DistError):
        store.compare_set(key, "", why)
        time.sleep(EXIT_GRACE)


def _watch(store: dist.Store, over: threading.Event) -> None:
    with contextlib.suppress(dist.DistError):
        while not over.wait(POLL):
            if store.check([KEY]):
                why = store.get(KEY).decode()
                over.wait(2 * EXIT_GRACE)  # a launcher takes the rank that ends first for the cause
                _end(why)
            if store.check([REFUSED]):
                why = store.get(REFUSED).decode()
                # else this rank raises it too; the other one is there until then
                if not over.wait(EXIT_GRACE / 2):
                    _end(why, STATUS[REFUSED])


def _end(why: str, status: int = STATUS[KEY]) -> None:
    """End the process at once: destructors of NCCL may wait for the other ranks."""
    log.debug(why)
    print_error(f"sage-fast: {why}")
    os._exit(status)
