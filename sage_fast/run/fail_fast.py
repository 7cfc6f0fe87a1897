"""An error on one rank ends the others in seconds, also those that are blocked in a collective.

Before a rank ends, it writes down what it was doing (run/hang_dump.py).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sage_fast.run.hang_dump import HangDump
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
STARTED = "sage_fast/started"
"""Key of the time at which rank 0 started, which names the folder of the dumps."""
HOST = "sage_fast/host"
"""Key of the host of a rank."""
ANSWERED = "sage_fast/answered"
"""Key that a rank sets when it finds `KEY`."""
POLL = 0.25
"""Seconds between two looks at the store."""
POLL_OF_MANY = 1.0
"""Likewise beyond `FEW_RANKS` ranks: one process answers all of them."""
FEW_RANKS = 64
LOOKS_OF_GRACE = 4
"""Exit grace, in looks at the store: a rank stays after its error until the others have seen it.

Rank 0 may host the store, where the others look.
"""
MAX_NAMED = 8
"""Largest number of ranks that a line names."""
STORE_TIMEOUT_S = 10.0
"""Seconds for the store to answer.

Beyond a link that is down it answers after a quarter of an hour, with an error.
"""


_blocks = itertools.count()
"""Numbers the blocks of `fail_fast` in this process, alike on all ranks."""


@contextlib.contextmanager
def fail_fast(timeout_minutes: float, folder: Path | None = None) -> Iterator[HangDump | None]:
    """If the block raises on this rank alone, end this process and all other ranks with status 1.

    The rank prints its error and writes it into the store of the process group. On every other rank
    a thread finds it there, repeats it in one line and ends the process: with NCCL a collective
    would wait until `timeout_minutes` is over. A `UserError` is raised as usual, since bad settings
    raise it on every rank; only the ranks that go on are ended, with status 2.

    Args:
        timeout_minutes: timeout of a collective.
        folder: the run folder, or that of what a command writes, in which a failure leaves the
            dumps of the ranks; by default the working directory.

    Yields:
        The dump of this rank; None in a single process.
    """
    initialize(timeout_minutes)
    if world_size() == 1:
        yield None
        return
    group: Any = dist.group.WORLD  # torch's stubs lack `clone`
    store, over = group.get_group_store(), threading.Event()
    dump = HangDump(folder or Path(), _started(store))
    watch = threading.Thread(
        target=_watch, args=(store.clone(), over, dump), name="other ranks", daemon=True
    )
    watch.start()
    try:
        try:
            yield dump
        finally:
            over.set()
            watch.join(STORE_TIMEOUT_S)  # ends the process if another rank has failed
    except Exception as error:
        log.debug("what ended this rank", exc_info=error)  # for the rank's own log
        if fails_alone():
            answering = None if watch.is_alive() else store
            if not isinstance(error, UserError):
                _fail(answering, error, dump)
            if answering is not None:
                _publish(answering, REFUSED, f"rank {rank()} failed: {in_one_line(error)}")
        raise


def poll_seconds() -> float:
    """Return the seconds between two looks at the store."""
    return POLL if world_size() <= FEW_RANKS else POLL_OF_MANY


def exit_grace() -> float:
    """Return the seconds that a rank stays after its error."""
    return LOOKS_OF_GRACE * poll_seconds()


def _started(store: dist.Store) -> str:
    """Return the time at which rank 0 entered this block, and tell the others this rank's host."""
    store.set(f"{HOST}/{rank()}", socket.gethostname())
    key = f"{STARTED}/{next(_blocks)}"
    if rank() == 0:
        now = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
        store.set(key, now)
    return store.get(key).decode()


def _fail(store: dist.Store | None, error: Exception, dump: HangDump) -> None:
    """End this process and, by way of the store, the other ranks.

    The error is printed first, since a launcher may kill this rank as soon as another has ended.

    Args:
        store: None if it does not answer.
        error: the error of this rank.
        dump: written before the process ends.
    """
    with contextlib.suppress(dist.DistError):  # the rank that hosted the store is gone
        for key, status in STATUS.items():
            # the error of that rank is the cause of this one
            if store is not None and store.check([key]):
                why = store.get(key).decode()
                _write(dump, why, error)
                _end(why, status)
    lost = "/gloo/transport/" in str(error)  # a plain RuntimeError
    if not lost and not isinstance(error, (RunError, OSError)):
        sys.excepthook(type(error), error, error.__traceback__)
    of_others = "another rank is gone, hangs or cannot be reached: " if lost else ""
    why = f"rank {rank()} failed: {of_others}{in_one_line(error)}"

    waited_for = _write(dump, why, error)
    silent = ""
    if store is not None:
        _publish(store, KEY, why)
        silent = _silent_ranks(store)
    if waited_for and (lost or isinstance(error, dist.DistError)):
        print_error(f"sage-fast: rank {rank()} waited in {waited_for}")
    if silent:
        print_error(f"sage-fast: {silent}")
    print_error(f"sage-fast: what the ranks were doing is in {dump.folder}")
    _end(why)


def _write(dump: HangDump, why: str, error: Exception | None = None) -> str:
    """Write the dump, and return what this rank was waiting for, as `HangDump.write`."""
    try:
        return dump.write(why, error)
    except Exception as failure:  # the rank ends in any case
        print_error(f"sage-fast: rank {rank()} leaves no dump: {in_one_line(failure)}")
        return ""


def _silent_ranks(store: dist.Store) -> str:
    """Return which ranks have not seen the error that this one has published; "" if all have."""
    try:
        others = [other for other in range(world_size()) if other != rank()]
        silent = [other for other in others if not store.check([f"{ANSWERED}/{other}"])]
        named = []
        for other in silent[:MAX_NAMED]:
            host = store.get(f"{HOST}/{other}").decode()
            named.append(f"rank {other} on {host}")
    except dist.DistError:
        return "the store of the ranks does not answer: rank 0, or its torchrun, hosts it"
    if not silent:
        return ""
    rest = f" and {len(silent) - MAX_NAMED} more" if len(silent) > MAX_NAMED else ""
    return f"no answer from {', '.join(named)}{rest} (hangs, gone, or out of reach)"


def _publish(store: dist.Store, key: str, why: str) -> None:
    """Tell the other ranks, if no rank has told them anything yet, and stay until they have
    looked."""
    with contextlib.suppress(dist.DistError):
        store.compare_set(key, "", why)
        time.sleep(exit_grace())


def _watch(store: dist.Store, over: threading.Event, dump: HangDump) -> None:
    with contextlib.suppress(dist.DistError):
        while not over.wait(poll_seconds()):
            if store.check([KEY]):
                why = store.get(KEY).decode()
                store.set(f"{ANSWERED}/{rank()}", "")
                _write(dump, why)
                # a launcher takes the rank that ends first for the cause
                over.wait(2 * exit_grace())
                _end(why)
            if store.check([REFUSED]):
                why = store.get(REFUSED).decode()
                # else this rank raises it too; the other one is there until then
                if not over.wait(exit_grace() / 2):
                    _end(why, STATUS[REFUSED])


def _end(why: str, status: int = STATUS[KEY]) -> None:
    """End the process at once: destructors of NCCL may wait for the other ranks."""
    log.debug(why)
    print_error(f"sage-fast: {why}")
    os._exit(status)
