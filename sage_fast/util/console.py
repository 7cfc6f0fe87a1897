"""What a process shows: messages of Python's `logging` on stdout, progress of long work, and the
log file.

Every module logs to `logging.getLogger(__name__)`: a note is INFO, a warning WARNING; DEBUG is for
the log file alone. Nothing is shown until `log_to_screen`, which each command calls once. On a
terminal and in a notebook, progress is a bar. Elsewhere it is a plain line now and then: a log gets
no carriage returns, and long work is never silent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import select
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tqdm.asyncio import tqdm_asyncio
from tqdm.auto import tqdm

from sage_fast.util.errors import drop_output, print_error, printable, reason
from sage_fast.util.launchers import speaks
from sage_fast.util.text import escape_on_screen

IN_NOTEBOOK = tqdm is not tqdm_asyncio
SECONDS_BETWEEN_LINES = 4.0
LONG = 60.0
"""Seconds of work after which progress lines come only this often, so that a log of hours stays
short."""

Item = TypeVar("Item")

log = logging.getLogger(__name__)
PACKAGE = logging.getLogger(__name__.partition(".")[0])


class _Formatter(logging.Formatter):
    """Escapes what a terminal would obey, also in a log file, which may be read on one."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Screen(logging.Handler):
    """Prints messages on stdout, above any bar, for as long as its terminal is open or its file can
    be written.

    What is only shown ends no command. A pipe whose reader has gone ends every command but a run,
    which has a log file.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:
            # The reader of a pipe, such as `tee`, has ended: a run, which has a log file, goes on;
            # any other command ends as a pipe's writer does.
            if isinstance(error, BrokenPipeError) and not _logs():
                raise
            if not leave_terminal():  # it may be closed before its SIGHUP was handled
                _leave_stdout(error)


_screen = _Screen()
_screen.setFormatter(_Formatter())


def log_to_screen(*, quiet: bool = False) -> None:
    """Print the package's messages and progress from here on.

    `quiet`, or a rank other than 0, prints only errors.
    """
    escape_on_screen()
    _screen.setLevel(logging.INFO if speaks() and not quiet else logging.ERROR)
    PACKAGE.setLevel(logging.DEBUG)
    PACKAGE.addHandler(_screen)
    PACKAGE.propagate = False  # a library may have set up the root logger


@contextlib.contextmanager
def heavy_imports(command: str) -> Iterator[None]:
    """Announce the imports of the block, and run them without the garbage collector."""
    log.info(f"sage-fast {command}: loading PyTorch and diffusers")
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print only errors within the block."""
    before = _screen.level
    _screen.setLevel(max(before, logging.ERROR))
    try:
        yield
    finally:
        _screen.setLevel(before)


def shows(level: int = logging.INFO) -> bool:
    """Whether messages of this level are printed."""
    return _screen in PACKAGE.handlers and level >= _screen.level


def wrapped(line: str, *, first: str = "", rest: str = "  ") -> str:
    """Wrap a line to 80 columns; paths and names are not broken.

    Args:
        first: what the first line begins with.
        rest: what each line after it begins with.
    """
    return textwrap.fill(
        line,
        80,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def leave_terminal() -> bool:
    """Point stdout and stderr to /dev/null if nobody can read them: printing to them would fail and
    end the run.

    Returns:
        Whether that is so of stdout.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    gone = select.POLLHUP | select.POLLERR  # a closed terminal; a pipe without a reader
    closed = [descriptor for descriptor, event in poll.poll(0) if event & gone]
    for descriptor in closed:
        drop_output(descriptor)
    return 1 in closed


def _leave_stdout(error: OSError) -> None:
    """Say once on stderr that stdout, a file on a full disk, cannot be written, and print nothing
    more there.

    What Python still holds for it is dropped too: flushed at the end, it would fail a command that
    has done its work.
    """
    drop_output(1)
    print_error(f"note: nothing more is printed: stdout cannot be written ({error.strerror})")


class _LogFile(logging.FileHandler):
    """A log file that does not end or drown a run when it cannot be written: a note says so once,
    on the screen."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True  # first: the note comes here too
            log.warning(
                f"note: the log {self.baseFilename} cannot be written ({error.strerror}), and has "
                "gaps"
            )


def _logs() -> list[logging.Handler]:
    return [handler for handler in PACKAGE.handlers if isinstance(handler, logging.FileHandler)]


def leave_logs() -> None:
    """Write no more to the log of an earlier run in this process.

    It stays open: faulthandler has its descriptor.
    """
    for handler in _logs():
        PACKAGE.removeHandler(handler)


@contextlib.contextmanager
def logs_restored() -> Iterator[None]:
    """Write on to the present log after the block, whatever the block does about logs."""
    before = _logs()
    try:
        yield
    finally:
        if _logs() != before:
            leave_logs()
            for handler in before:
                PACKAGE.addHandler(handler)


def log_to(path: Path) -> None:
    """Append the package's messages to `path` too, also those that are not printed, and the stack
    after a crash.

    If it cannot be opened, a note says so, and there is no log.
    """
    leave_logs()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8", errors="replace")
    except OSError as error:
        log.warning(f"note: no log is written: {reason(error)}")
        return
    handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    PACKAGE.setLevel(logging.DEBUG)
    PACKAGE.addHandler(handler)
    log.debug(f"process {os.getpid()} on {socket.gethostname()}")
    assert handler.stream is not None  # open from the start, without delay=True
    faulthandler.enable(handler.stream)


class Progress:
    """Progress of `total` units of work. Use it as a context manager and call `update`.

    Args:
        what: name of the work, such as `sample`.
        total: number of units.
        unit: singular name of a unit.
        pause: called after each update; an exception it raises ends the work.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: str = "step",
        *,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.pause = pause
        self.done = 0
        self._bar: Any = None
        draws = IN_NOTEBOOK or sys.stderr.isatty()
        self._prints = shows() and not draws
        self._start = time.monotonic()
        self._next_line = self._start + SECONDS_BETWEEN_LINES
        if shows() and draws and total:
            self._bar = tqdm(total=total, desc=what, unit=unit, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, count: int = 1) -> None:
        """Count `count` more units as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._prints and time.monotonic() >= self._next_line and self.done < self.total:
            log.info(f"{self.what}: {self.done} of {self.total} {self.unit}s")
            now = time.monotonic()
            self._next_line = now + (SECONDS_BETWEEN_LINES if now < self._start + LONG else LONG)
        self.pause()


def progress(items: Iterable[Item], what: str, total: int, unit: str = "step") -> Iterator[Item]:
    """Yield the items and show `Progress` over them."""
    with Progress(what, total, unit) as bar:
        for item in items:
            yield item
            bar.update()
