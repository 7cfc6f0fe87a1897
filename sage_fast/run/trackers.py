"""Write a run's metrics to disk and to the configured trackers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from PIL import Image

from sage_fast.config.load import dump
from sage_fast.config.schema import Config
from sage_fast.report.scores import mean_and_error
from sage_fast.util.console import Say, say_nothing, say_wrapped
from sage_fast.util.errors import RunError, UserError, nearest
from sage_fast.util.files import append_line, read_metrics, write_atomic

CHANCES = 3
"""Failed calls after which a tracker is dropped."""

WANDB_STEP = "iterations"
"""The x-axis of wandb's curves. wandb's own `step` must increase: it drops the rows that a resumed run repeats."""


def check_trackers(names: Iterable[str]) -> None:
    """Check that the trackers are installed, without starting them.

    Raises:
        UserError: accelerate does not know a name, or a tracker is not installed.
    """
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"tracking.trackers: {name!r}: {nearest(name, sorted(LOGGER_TYPE_TO_CLASS))}")
        if name not in installed:
            package = name.replace("_", "-")
            raise UserError(f"tracking.trackers: {name!r} is not installed; install it with: pip install {package}")


class MetricsWriter:
    """Writes `metrics.jsonl` and feeds the trackers of `tracking.trackers`. Create on rank 0 only.

    Trackers count completed iterations, as the report does: the row of iteration 0 is step 1. A tracker that fails
    after its start does not stop the run.

    Args:
        config: resolved settings, for the trackers to show.
        run: the run folder; its name is the name of the run.
        run_id: stable over `--resume`, so that trackers can continue the same run.
        iteration: the next iteration; rows from there on are dropped (on a resume).
        tell: receives a note if a tracker fails.

    Raises:
        RunError: a tracker does not start, for example for lack of a login.
    """

    def __init__(self, config: Config, run: Path, run_id: str, iteration: int = 0, tell: Say = say_nothing) -> None:
        path = run / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["iteration"] < iteration]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._trackers = {
            name: _start(name, config, run.resolve(), run_id, iteration) for name in config.tracking.trackers
        }
        self._failures: Counter[str] = Counter()
        self._tell = tell
        self._file = path.open("ab", buffering=0)
        self._unwritten: list[str] = []

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of one iteration atomically; non-finite numbers become null.

        Raises:
            OSError: the row cannot be written; `sync` tries again.
        """
        self._unwritten.append(json.dumps({key: _finite(value) for key, value in row.items()}))
        self._append()
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "iteration"}
        self._each(lambda tracker: _log(tracker, numbers, row["iteration"] + 1))

    def write_evaluation(self, scores: Mapping[str, Any], videos: Sequence[Path], sheet: Path) -> None:
        """Send mean held-out scores, videos and their contact sheet to the trackers.

        Args:
            scores: as in `eval/*.json`.
            videos: files for the first prompts.
            sheet: PNG with all videos.
        """
        step = scores["iteration"]
        named = {"reward": scores["reward"], **scores["parts"]}
        means = {f"heldout/{name}": mean_and_error(scores["prompts"], values)[0] for name, values in named.items()}
        self._each(lambda tracker: _log(tracker, means, step))
        self._each(lambda tracker: _show(tracker, dict(zip(videos, scores["prompts"])), sheet, step))

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
                    what = f"{type(error).__name__}: {error}".splitlines()[0]
                    say_wrapped(
                        f"note: tracker {name!r} failed ({what}); it is left out if it fails {CHANCES} times, and "
                        "metrics.jsonl has every row",
                        self._tell,
                    )
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
            say_wrapped(f"note: metrics.jsonl: {error}", self._tell)


def _start(name: str, config: Config, run: Path, run_id: str, iteration: int) -> Any:
    """Start a tracker and send it the settings."""
    project = config.tracking.project
    tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
    PartialState()  # required by the trackers' logger; it joins the process group of `distributed.initialize`
    if name == "tensorboard":
        tracker = tracker_class("tensorboard", logging_dir=run, purge_step=iteration + 1 if iteration else None)
    elif name == "wandb":
        tracker = tracker_class(project, name=run.name, id=run_id, resume="allow", dir=str(run))
    elif name == "trackio":  # identifies a run by its name
        tracker = tracker_class(project, name=f"{run.name}-{run_id}", resume="allow")
    else:
        tracker = tracker_class(project, *[run] * tracker_class.requires_logging_directory)
    try:
        tracker.start()
        if name == "tensorboard":  # its hyperparameter table would appear as a second run
            tracker.log({"config": textwrap.indent(dump(config), "    ")}, step=iteration)
        else:
            tracker.store_init_configuration(dict(_flat(dataclasses.asdict(config))))
        if name == "wandb":
            tracker.tracker.define_metric("*", step_metric=WANDB_STEP)
    except Exception as error:  # each tracker has its own exceptions for a missing login or server
        raise RunError(f"tracker {name!r} does not start: {error}") from error
    return tracker


def _log(tracker: Any, values: Mapping[str, Any], step: int) -> None:
    if tracker.name == "wandb":
        tracker.log({**values, WANDB_STEP: step})
    else:
        tracker.log(values, step=step)


def _show(tracker: Any, videos: Mapping[Path, str], sheet: Path, step: int) -> None:
    """Send the videos (file -> prompt) if the tracker plays them, and the contact sheet if it takes images."""
    if tracker.name in ("wandb", "trackio"):
        package = importlib.import_module(tracker.name)
        media = {
            f"heldout/video_{number:02d}": package.Video(str(file), caption=prompt, format="mp4")
            for number, (file, prompt) in enumerate(videos.items())
            if file.suffix == ".mp4"  # the trackers do not play animated images
        }
        _log(tracker, media | {"heldout/videos": package.Image(str(sheet))}, step)
    elif tracker.name == "tensorboard":
        pixels = np.asarray(Image.open(sheet))[None]
        tracker.log_images({"heldout/videos": pixels}, step=step, dataformats="NHWC")
    elif hasattr(tracker, "log_images"):
        image = Image.open(sheet)
        tracker.log_images({"heldout/videos": image if tracker.name == "aim" else [image]}, step=step)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, bool | int | float | str | None]]:
    """Yield dotted keys and the plain values that trackers accept."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, bool | int | float | str | None) else str(value)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
