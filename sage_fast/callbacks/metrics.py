"""The metrics of a run: a row of each iteration in `metrics.jsonl` and in the trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sage_fast.callbacks.interface import Callback

if TYPE_CHECKING:
    from sage_fast.run.train import Run


class Metrics(Callback):
    """Writes the row of each iteration, with the columns that the user's callbacks have added."""

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        if run.writer is not None:
            run.writer.write(run.newest_row)
