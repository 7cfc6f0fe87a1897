"""Subprocesses of a study: several at a time, ended by a signal together."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

from sage_fast.util.errors import SIGNALS, Stopped


def run_many(
    jobs: Iterable[tuple[str, Sequence[str]]],
    ended: Callable[[str, int], object],
    *,
    workers: int = 1,
) -> None:
    """Run commands as subprocesses, up to `workers` at a time.

    A signal is forwarded to the running processes, and no more are started. Each process has its
    own session: in the terminal's process group it would receive the signal twice. If `ended`
    raises, the processes are terminated.

    Args:
        jobs: (name, command) pairs; each is drawn just before its process starts.
        ended: called with the name and exit status of each process that ends on its own.

    Raises:
        Stopped: a signal came, and every process has ended.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    waiting = iter(jobs)
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in running.values():
            child.send_signal(number)

    # nohup ignores SIGHUP
    taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in taken}
    try:
        while True:
            _start(waiting, running, received, workers)
            if not running:
                break
            time.sleep(0.05)
            for name, status in _ended(running):
                if not received:
                    ended(name, status)
    finally:
        for child in running.values():
            child.terminate()
            child.wait()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        raise Stopped(received[0])


def _start(
    waiting: Iterator[tuple[str, Sequence[str]]],
    running: dict[str, subprocess.Popen[bytes]],
    received: list[int],
    workers: int,
) -> None:
    """Start commands until `workers` of them run, none waits or a signal has come."""
    while not received and len(running) < workers:
        job = next(waiting, None)
        if job is None:
            return
        name, command = job
        running[name] = subprocess.Popen(command, start_new_session=True)
        if received:  # the signal came during the start, before `running` had the process
            running[name].send_signal(received[0])


def _ended(running: dict[str, subprocess.Popen[bytes]]) -> Iterator[tuple[str, int]]:
    """Take the processes that have ended out of `running`, with their statuses."""
    for name, child in list(running.items()):
        status = child.poll()
        if status is not None:
            del running[name]
            yield name, status
