"""The page of a run: drawn at evaluations, after iterations if it costs little, and at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sage_fast.callbacks.interface import Callback
from sage_fast.callbacks.once import NotesOnce
from sage_fast.report.page import report_run
from sage_fast.util.errors import in_one_line

if TYPE_CHECKING:
    from sage_fast.run.train import Run

PAGE_SHARE = 0.02
"""Share of the time of a run that its page may take between two evaluations: the other ranks wait.
"""


class Page(Callback):
    """Draws `report.html` on rank 0. A failure is reported, and never ends a run."""

    def __init__(self) -> None:
        self._notes = NotesOnce()
        self._next = 0.0  # time from which an iteration may draw it
        self._drawn: int | None = None  # complete iterations of the newest page

    def on_evaluation_end(self, run: Run, name: str, scores: Mapping[str, Any]) -> None:
        if name != "after":  # the page of the complete run follows at once
            self._draw(run, running=True)

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        has_been_drawn = self._drawn == run.iteration  # with this iteration's evaluation
        if not has_been_drawn and time.monotonic() >= self._next:
            self._draw(run, running=True)

    def on_run_end(self, run: Run) -> None:
        self._draw(run, running=False)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._draw(run, running=False)

    def _draw(self, run: Run, *, running: bool) -> None:
        if not run.is_main or run.claim.lost:
            return
        began = time.monotonic()
        try:
            report_run(run.folder, run.complete, running)
        except Exception as error:  # libraries that draw have their own exceptions
            later = f"later: sage-fast report {run.folder}"
            self._notes.say("no report", f"({in_one_line(error)}); {later}")
        seconds = time.monotonic() - began
        self._next = began + seconds / PAGE_SHARE
        self._drawn = run.iteration
