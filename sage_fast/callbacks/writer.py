"""Write a run's metrics to disk and to the configured trackers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sage_fast.callbacks.columns import counts_and_edges
from sage_fast.callbacks.interface import Histogram
from sage_fast.callbacks.trackers import Sheet, Trackers
from sage_fast.config.schema import TrackingConfig
from sage_fast.eval.scores import columns_of, mean_and_margin
from sage_fast.run_folder import RunFolder
from sage_fast.util.console import wrapped
from sage_fast.util.files import append_line, cut_off, json_value, sync_opened, write_atomic

log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes `metrics.jsonl` and feeds the trackers of `tracking.trackers`. Create on rank 0 only.

    Trackers count completed iterations, as the report does: the row of iteration 0 is step 1. A
    tracker that fails after its start does not stop the run.

    Args:
        tracking: section of the settings.
        settings: all of them by their dotted names, for the trackers to show.
        run: the run folder; its name is the name of the run.
        run_id: stable over `--resume`, so that trackers can continue the same run.
        iteration: the next iteration; rows from there on are dropped (on a resume).
        continued: trackers that have a run of this one already.

    Raises:
        RunError: a tracker of a new run does not start, for example for lack of a login.
    """

    def __init__(
        self,
        tracking: TrackingConfig,
        settings: Mapping[str, Any],
        run: Path,
        run_id: str,
        iteration: int = 0,
        continued: Collection[str] = (),
    ) -> None:
        folder = RunFolder(run)
        path = folder.metrics_file
        kept = [row for row in folder.rows if row["iteration"] < iteration]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        undone = len(kept) < len(folder.rows)
        self._trackers = Trackers(
            tracking, settings, run.resolve(), run_id, iteration, continued, undone
        )
        self._file = path.open("ab", buffering=0)
        self._newest = iteration - 1  # iteration of the newest row that `write` was given
        self._unwritten: list[str] = []
        self._whole: int | None = None  # size of the file before an append that failed

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of one iteration atomically; non-finite numbers become null.

        A row that it has already is left out: an error may have come before or after it.

        Raises:
            OSError: the row cannot be written; `sync` tries again.
        """
        if row["iteration"] <= self._newest:
            return

        written: dict[str, Any] = {}
        numbers: dict[str, float] = {}
        histograms: dict[str, np.ndarray] = {}
        for name, value in row.items():
            if isinstance(value, Histogram):
                histograms[name] = value.values
                counts, edges = counts_and_edges(value.values)
                written[name] = {"counts": counts, "edges": edges}
                continue
            written[name] = _plain(value)
            if isinstance(value, int | float) and name != "iteration":
                numbers[name] = value

        self._unwritten.append(json.dumps(written))
        self._newest = row["iteration"]
        self._append()
        step = row["iteration"] + 1
        self._trackers.log(numbers, step)
        if histograms:
            self._trackers.log_histograms(histograms, step)

    def write_evaluation(
        self, scores: Mapping[str, Any], files: Sequence[Path], videos: Sequence[Tensor]
    ) -> None:
        """Send mean held-out scores and videos to the trackers.

        Args:
            scores: as in `eval/*.json`.
            files: videos of the first prompts, for trackers that play them.
            videos: videos of the first prompts, float `[F, 3, H, W]` each, for a contact sheet,
                drawn once.
        """
        step = scores["iteration"]
        prompts = scores["prompts"]
        means = {}
        for name, values in columns_of(scores).items():
            means[f"heldout/{name}"], _ = mean_and_margin(prompts, values)
        self._trackers.log(means, step)
        self.show("heldout", files, videos, prompts, step)

    def show(
        self,
        group: str,
        files: Sequence[Path],
        videos: Sequence[Tensor],
        captions: Sequence[str],
        step: int,
    ) -> None:
        """Send videos to the trackers.

        Args:
            group: what they are, as a prefix of their names.
            files: of the videos, for trackers that play them.
            videos: float `[F, 3, H, W]` each, for a contact sheet.
            captions: of the files, and of the videos.
            step: complete iterations.
        """
        self._trackers.show(group, files, videos, captions, step)

    def show_sheet(
        self, group: str, files: Sequence[Path], sheet: Sheet, captions: Sequence[str], step: int
    ) -> None:
        """Send videos to the trackers, as `show` does, with a contact sheet that `sheet` draws."""
        self._trackers.show_sheet(group, files, sheet, captions, step)

    def _append(self) -> None:
        """Append the rows that are not written yet, and first cut off what a failed try may have
        left."""
        while self._unwritten:
            if self._whole is not None:
                cut_off(self._file, self._whole)
            self._whole = os.fstat(self._file.fileno()).st_size
            append_line(self._file, self._unwritten[0])
            self._whole = None
            del self._unwritten[0]

    def sync(self) -> None:
        """Flush all rows to disk; call before writing a checkpoint.

        Raises:
            OSError: they cannot be written.
        """
        self._append()
        sync_opened(self._file)

    def close(self) -> None:
        """Close trackers and file. Never raises: that would hide the error that stopped the run.

        Rows after the last `sync` may be lost; a resume would drop them anyway.
        """
        self._trackers.finish()
        try:
            self._file.close()
        except OSError as error:
            log.info(wrapped(f"note: metrics.jsonl: {error}"))


def _plain(value: Any) -> Any:
    """Return `json_value` of a number, or of each number of a list."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return json_value(value)
