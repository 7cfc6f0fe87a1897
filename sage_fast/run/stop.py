"""SIGINT and SIGTERM: a run ends between two iterations, with a checkpoint, within a grace time."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from sage_fast.console import Say
from sage_fast.distributed import all_reduce, world_size
from sage_fast.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWICE = 0.5
"""Seconds within which a signal that comes again is the same one: a terminal and torchrun both hand it on."""


class Stop:
    """Takes the signals inside a `with` block.

    The first one asks the run to end where its state is whole. Until `training` is set there is none to keep, and it
    raises `Stopped` at once. A second one ends the process at once, and so does the end of the grace time unless a
    checkpoint is being written: a thread sees to both, because the main thread may wait in a collective or a reward.

    Outside the main thread, where Python lets nobody take signals, it does nothing.

    Args:
        grace_seconds: from the first signal to the end of the process.
        tell: told that the run is going to end.

    Attributes:
        training: a checkpoint can be written.
        number: the signal that came; 0 without one.
    """

    def __init__(self, grace_seconds: float, tell: Say) -> None:
        self.grace_seconds = grace_seconds
        self.tell = tell
        self.training = False
        self.number = 0
        self._asked = 0.0
        self._saving = False
        self._saved = False

    # -- asked by the run ---------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Between steps of work that can be thrown away; each rank calls on its own.

        Raises:
            Stopped: half of the grace time is over; the other half is for the checkpoint.
        """
        if self._overdue:
            raise Stopped(self.number)

    def boundary(self, device: torch.device) -> None:
        """Between two iterations; all ranks call.

        Raises:
            Stopped: a signal came, on any rank.
        """
        self._agree(self.number, device)

    def before_update(self, device: torch.device) -> None:
        """Before an optimizer step; all ranks call.

        Raises:
            Stopped: half of the grace time is over, on any rank.
        """
        self._agree(self.number if self._overdue else 0, device)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint, which the end of the grace time does not cut off."""
        self._saving = True
        try:
            yield
            self._saved = self.number > 0
        finally:
            self._saving = False

    @property
    def _overdue(self) -> bool:
        return self.number > 0 and time.monotonic() > self._asked + self.grace_seconds / 2

    def _agree(self, number: int, device: torch.device) -> None:
        if world_size() > 1:
            number = int(all_reduce(torch.tensor(number, device=device), "max"))
        if number:
            raise Stopped(number)

    # -- signals ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Stop:
        global _active
        self._taken = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        self._ends = os.pipe()
        os.set_blocking(self._ends[1], False)
        self._before = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        _active = self
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                self._taken[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        if _active is not self:
            return
        _active = None
        for number, handler in self._taken.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._before)
        os.write(self._ends[1], b"\0")  # no signal has this number
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.training:
            raise Stopped(number)

    def _watch(self) -> None:
        """In its own thread: Python writes the number of a signal into the pipe as soon as it comes."""
        while True:
            left = None
            if self.number:
                left = max(0.0, self._asked + self.grace_seconds - time.monotonic())
            if not select.select([self._ends[0]], [], [], left if left != 0 or not self._saving else 0.1)[0]:
                if not self._saving:
                    self._end(f"{self.grace_seconds:g} s after {self._name}")
                continue
            for number in os.read(self._ends[0], 64):
                if number == 0:
                    return
                if number in SIGNALS:
                    self._came(number)

    def _came(self, number: int) -> None:
        if not self.number:
            self._asked, self.number = time.monotonic(), number
            if self.training:
                self.tell(
                    f"{self._name}: ends after this iteration, or in {self.grace_seconds:g} s; a second one ends it now"
                )
        elif time.monotonic() - self._asked > TWICE:
            self._end(f"at the second {signal.Signals(number).name}")

    @property
    def _name(self) -> str:
        return signal.Signals(self.number).name

    def _end(self, why: str) -> None:
        """End the process from whatever it is in, without its checkpoint."""
        stopped = Stopped(self.number)
        if not self._saved:
            print(f"sage-fast: ended {why}; the last whole checkpoint counts", file=sys.stderr, flush=True)
        os._exit(stopped.status if self._saved else 128 + self.number)


_active: Stop | None = None


def _hold() -> None:
    """Before a fork: a signal that came to the child before `_forget` would go into the pipe that it shares."""
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _forget() -> None:
    """In a forked child, such as a worker of a reward: its signals are its own, and end it as they would have."""
    global _active
    if _active is not None:
        signal.set_wakeup_fd(-1)
        for number in _active._taken:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _release()
        _active = None


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
