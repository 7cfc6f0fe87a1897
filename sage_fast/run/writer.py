"""Write a run's metrics to disk and to the configured trackers."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_fast.config.schema import Config
from sage_fast.eval.scores import columns_of, mean_and_margin
from sage_fast.util.console import wrapped
from sage_fast.util.errors import in_one_line
from sage_fast.util.files import append_line, json_value, read_metrics, write_atomic

log = logging.getLogger(__name__)

CHANCES = 3
"""Failed calls after which a tracker is dropped."""

TRACKERS = {name.lower(): f"sage_fast.run.trackers:{name}" for name in ("TensorBoard", "Wandb", "Trackio", "Aim")}
"""Name in `tracking.trackers` -> its class, imported when a run has a tracker."""
OTHER = "sage_fast.run.trackers:Tracker"
"""Class of accelerate's other trackers."""


def tracker_class(name: str) -> Any:
    """Return the class of a tracker."""
    return pkgutil.resolve_name(TRACKERS.get(name, OTHER))


def check_trackers(names: Iterable[str]) -> None:
    """Check that the trackers are installed, without starting them.

    Raises:
        UserError: accelerate does not know a name, or a tracker is not installed.
    """
    for name in names:
        tracker_class(name).check(name)


class MetricsWriter:
    """Writes `metrics.jsonl` and feeds the trackers of `tracking.trackers`. Create on rank 0 only.

    Trackers count completed iterations, as the report does: the row of iteration 0 is step 1. A tracker that fails
    after its start does not stop the run.

    Args:
        config: resolved settings, for the trackers to show.
        run: the run folder; its name is the name of the run.
        run_id: stable over `--resume`, so that trackers can continue the same run.
        iteration: the next iteration; rows from there on are dropped (on a resume).

    Raises:
        RunError: a tracker does not start, for example for lack of a login.
    """

    def __init__(self, config: Config, run: Path, run_id: str, iteration: int = 0) -> None:
        path = run / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["iteration"] < iteration]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._trackers = {
            name: tracker_class(name)(name, config, run.resolve(), run_id, iteration)
            for name in config.tracking.trackers
        }
        self._failures: Counter[str] = Counter()
        self._file = path.open("ab", buffering=0)
        self._unwritten: list[str] = []

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of one iteration atomically; non-finite numbers become null.

        Raises:
            OSError: the row cannot be written; `sync` tries again.
        """
        self._unwritten.append(json.dumps({key: json_value(value) for key, value in row.items()}))
        self._append()
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "iteration"}
        self._each(lambda tracker: tracker.log(numbers, row["iteration"] + 1))

    def write_evaluation(self, scores: Mapping[str, Any], files: Sequence[Path], videos: Sequence[Tensor]) -> None:
        """Send mean held-out scores and videos to the trackers.

        Args:
            scores: as in `eval/*.json`.
            files: videos of the first prompts, for trackers that play them.
            videos: videos of the first prompts, float `[F, 3, H, W]` each, for a contact sheet.
        """
        step = scores["iteration"]
        columns, prompts = columns_of(scores).items(), scores["prompts"]
        means = {f"heldout/{name}": mean_and_margin(prompts, values)[0] for name, values in columns}
        self._each(lambda tracker: tracker.log(means, step))
        self._each(lambda tracker: tracker.show(files, videos, prompts, step))

    def _append(self) -> None:
        while self._unwritten:
            append_line(self._file, self._unwritten[0])
            del self._unwritten[0]

    def _each(self, act: Callable[[Any], object]) -> None:
        """Call `act` on each tracker. Exceptions are reported, not raised: `metrics.jsonl` is the record."""
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # each tracker has its own exceptions
                self._failures[name] += 1
                if self._failures[name] == 1:
                    note = (
                        f"note: tracker {name!r} failed ({in_one_line(error)}); it is left out if it fails {CHANCES} "
                        "times, and metrics.jsonl has every row"
                    )
                    log.info(wrapped(note))
                if self._failures[name] == CHANCES:
                    del self._trackers[name]

    def sync(self) -> None:
        """Flush all rows to disk; call before writing a checkpoint.

        Raises:
            OSError: they cannot be written.
        """
        self._append()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close trackers and file. Never raises: that would hide the error that stopped the run.

        Rows after the last `sync` may be lost; a resume would drop them anyway.
        """
        self._each(lambda tracker: tracker.finish())
        try:
            self._file.close()
        except OSError as error:
            log.info(wrapped(f"note: metrics.jsonl: {error}"))
