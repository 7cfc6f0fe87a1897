"""Subprocesses of a study: several at a time, ended by a signal together."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
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
            while not received and len(running) < workers and (job := next(waiting, None)):
                name, command = job
                running[name] = subprocess.Popen(command, start_new_session=True)
                if received:  # a signal came during the start
                    running[name].send_signal(received[0])
            if not running:
                break
            time.sleep(0.05)
            for name, child in list(running.items()):
                if (status := child.poll()) is not None:
                    del running[name]
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
