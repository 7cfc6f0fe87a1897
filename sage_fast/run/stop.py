"""Signals that stop a run between two iterations, with a checkpoint, within a grace period;
errors.py lists them."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from sage_fast.util.console import leave_terminal
from sage_fast.util.errors import SIGNALS, Stopped, print_error
from sage_fast.util.ranks import all_reduce, world_size

log = logging.getLogger(__name__)

DEBOUNCE = 0.5
"""Debounce time of repeated signals in seconds: a terminal and torchrun both deliver one."""
REPEATED = signal.SIGXCPU
"""Signal that the kernel repeats each second beyond a CPU limit, so that a second one means nothing
new."""


class Stop:
    """Context manager that handles the signals.

    The first signal asks the run to stop at the next consistent state. Before `training` is set
    there is no state to keep, and it raises `Stopped` at once. The same signal a second time ends
    the process at once, and so does Ctrl-\\ after any other: a scheduler sends different ones in
    turn, such as LSF's SIGINT, SIGTERM and SIGKILL. The end of the grace period ends it too, unless
    a checkpoint is being written. A thread does both, because the main thread may be blocked in a
    collective or a reward.

    A no-op outside the main thread, where Python does not allow signal handlers.

    Args:
        grace_seconds: time from the first signal to the end of the process.

    Attributes:
        training: whether a checkpoint can be written.
        number: the signal received; 0 if none.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.training = False
        self.number = 0
        self._asked = 0.0
        self._first: dict[int, float] = {}
        self._raised = 0
        self._saving = False
        self._saved = False

    # -- called by the run -------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop between steps of work that can be discarded. Not collective.

        Raises:
            Stopped: half of the grace period is over; the other half is for the checkpoint.
        """
        if self._overdue:
            raise Stopped(self.number)

    def boundary(self, device: torch.device) -> None:
        """Stop between two iterations. Collective.

        Raises:
            Stopped: any rank has received a signal.
        """
        self._agree(self.number, device)

    def before_update(self, device: torch.device) -> None:
        """Stop before an optimizer step. Collective.

        Raises:
            Stopped: half of the grace period is over on any rank.
        """
        self._agree(self.number if self._overdue else 0, device)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let the block, which writes a checkpoint, finish even after the grace period."""
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

    # -- signals -----------------------------------------------------------------------------------

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
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                self._taken[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        global _active
        if _active is not self:
            return
        _active = None
        for number, handler in self._taken.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._before)
        os.write(self._ends[1], b"\0")  # ends the thread: no signal has this number
        self._thread.join()
        for end in self._ends:
            os.close(end)
        # a library that read weights made its own error of it
        if self._raised and isinstance(error, Exception):
            raise Stopped(self._raised) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if not self.training and not (number == REPEATED and self._raised):
            self._raised = number
            raise Stopped(number)

    def _watch(self) -> None:
        """Watch the pipe in a thread: Python writes a signal's number into it as soon as it
        arrives."""
        while True:
            left = (
                max(0.0, self._asked + self.grace_seconds - time.monotonic())
                if self.number
                else None
            )
            if not select.select(
                [self._ends[0]], [], [], left if left != 0 or not self._saving else 0.1
            )[0]:
                if not self._saving:
                    self._end(f"{self.grace_seconds:g} s after {Stopped(self.number)}")
                continue
            for number in os.read(self._ends[0], 64):
                if number == 0:
                    return
                if number in SIGNALS:
                    self._came(number)

    def _came(self, number: int) -> None:
        now = time.monotonic()
        first = self._first.setdefault(number, now)
        if not self.number:
            if number == signal.SIGHUP:
                leave_terminal()  # before the main thread reads `number` and prints
            self._asked = now
            self.number = number
            if self.training:
                limit = f"{self.grace_seconds:g} s"
                log.info(
                    f"{Stopped(number)}: stopping after this iteration or {limit}; a second one "
                    "stops at once"
                )
        elif number == signal.SIGQUIT and self.number != signal.SIGQUIT:
            self._end("at SIGQUIT")
        elif number != REPEATED and now - first > DEBOUNCE:
            self._end(f"at the second {signal.Signals(number).name}")

    def _end(self, why: str) -> None:
        """End the process at once, whatever it is doing, without a new checkpoint."""
        stopped = Stopped(self.number)
        if not self._saved:
            print_error(f"sage-fast: ended {why}; --resume uses the last complete checkpoint")
        os._exit(stopped.status if self._saved else 128 + self.number)


_active: Stop | None = None


def _hold() -> None:
    """Block signals before a fork: until `_forget`, the child would write them into the pipe it
    shares."""
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _forget() -> None:
    """Restore default signal handling in a forked child, such as a reward worker."""
    global _active
    if _active is not None:
        signal.set_wakeup_fd(-1)
        for number in _active._taken:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        _release()
        _active = None


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
