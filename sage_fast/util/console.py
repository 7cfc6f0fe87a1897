"""Console output: lines on stdout, progress of long work, and the log file.

On a terminal, progress is a bar on stderr. Elsewhere it is a plain line now and then: a log gets no carriage returns,
and long work is never silent.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

Say = Callable[[str], object]
"""Function that takes one line of output."""

SECONDS_BETWEEN_LINES = 4.0
LONG = 60.0
"""Seconds of work after which progress lines come only this often, so that a log of hours stays short."""

Item = TypeVar("Item")


def say(line: str) -> None:
    """Print a line above any bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def say_wrapped(line: str, tell: Say) -> None:
    """Wrap a line to 80 columns and pass it to `tell`. Continuation lines are indented; paths are not broken."""
    tell(textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))


def say_nothing(line: str) -> None:
    """Log a line without printing it: `say` for a quiet command and for every rank but 0."""
    if _log is not None:
        _log.write(f"{line}\n")


def speaker(quiet: bool) -> Say:
    """Return `say_nothing` if quiet, else `say`."""
    return say_nothing if quiet else say


class _Log:
    """Log file with a timestamp per line; progress bars (text with carriage returns) are left out."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self._at_start = True

    def write(self, text: str) -> None:
        for line in text.splitlines(keepends=True) if "\r" not in text else ():
            time_of_line = time.strftime("%Y-%m-%d %H:%M:%S ") if self._at_start and line.strip() else ""
            self.file.write(time_of_line + line)
            self._at_start = line.endswith("\n")


class _Copied:
    """Output stream that also writes to the log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if _log is not None:
            _log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_log: _Log | None = None


def log_to(path: Path) -> None:
    """Mirror stdout and stderr to `path`, appending to what an earlier process wrote.

    The log gets warnings, the final traceback, the stack after a crash or an abort (faulthandler), and the lines of
    `say_nothing`. The screen shows the same as before.
    """
    global _log
    path.parent.mkdir(parents=True, exist_ok=True)
    _log = _Log(path.open("a", encoding="utf-8", errors="replace", buffering=1))
    _log.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    faulthandler.enable(_log.file)
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _Copied):
            setattr(sys, name, _Copied(getattr(sys, name)))


class Progress:
    """Progress of `total` units of work. Use it as a context manager and call `update`.

    Args:
        what: name of the work, such as `sample`.
        total: number of units.
        unit: singular name of a unit.
        quiet: show nothing.
        pause: called after each update; an exception it raises ends the work.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: str = "step",
        *,
        quiet: bool = False,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        self.what, self.total, self.unit, self.pause = what, total, unit, pause
        self.done = 0
        self._bar: Any = None
        self._prints = not quiet and not sys.stderr.isatty()
        self._start = time.monotonic()
        self._next_line = self._start + SECONDS_BETWEEN_LINES
        if not quiet and not self._prints:
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
            say(f"{self.what}: {self.done} of {self.total} {self.unit}s")
            now = time.monotonic()
            self._next_line = now + (SECONDS_BETWEEN_LINES if now < self._start + LONG else LONG)
        self.pause()


def progress(
    items: Iterable[Item], what: str, total: int, unit: str = "step", *, quiet: bool = False
) -> Iterator[Item]:
    """Yield the items and show `Progress` over them."""
    with Progress(what, total, unit, quiet=quiet) as bar:
        for item in items:
            yield item
            bar.update()
