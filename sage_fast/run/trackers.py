"""The metrics of a run on disk, and in the trackers that its user chose."""

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
from sage_fast.console import Say, say_nothing, say_wrapped
from sage_fast.errors import RunError, UserError, nearest
from sage_fast.files import append_line, read_metrics, write_atomic
from sage_fast.report.scores import mean_and_error

CHANCES = 3
"""Calls of a tracker that may fail before it is left out."""

WANDB_STEP = "iterations"
"""What wandb draws its curves over: it drops what has a `step` of its own that is not beyond the last one, as have the
rows of a run that went back to a checkpoint."""


def check_trackers(names: Iterable[str]) -> None:
    """Look for the packages without starting anything.

    Raises:
        UserError: a name that accelerate does not know, or a tracker that is not installed.
    """
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"tracking.trackers: {name!r}: {nearest(name, sorted(LOGGER_TYPE_TO_CLASS))}")
        if name not in installed:
            package = name.replace("_", "-")
            raise UserError(f"tracking.trackers: {name!r} is not installed; install it with: pip install {package}")


class MetricsWriter:
    """`metrics.jsonl`, and the trackers of `tracking.trackers`; made on the first rank only.

    Trackers count completed iterations, as the report does: the row of iteration 0 is step 1. One that fails once it
    runs does not end the run.

    Args:
        config: resolved settings, shown by the trackers.
        run: folder; its name is the name of the run.
        run_id: the same after `--resume`, so that trackers that can go on with the same run do.
        iteration: the next iteration; rows from there on (of a run that is resumed) are dropped.
        tell: told of a tracker that fails.

    Raises:
        RunError: a tracker does not start, such as one that asks for a login.
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
        """Append one iteration, whole or not at all; numbers that are not finite are written as null.

        Raises:
            OSError: it cannot be written, and is kept for `sync`.
        """
        self._unwritten.append(json.dumps({key: _finite(value) for key, value in row.items()}))
        self._append()
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "iteration"}
        self._each(lambda tracker: _log(tracker, numbers, row["iteration"] + 1))

    def write_evaluation(self, scores: Mapping[str, Any], videos: Sequence[Path], sheet: Path) -> None:
        """Show mean held-out scores, videos and their contact sheet in the trackers.

        Args:
            scores: as in `eval/*.json`.
            videos: files of the first prompts.
            sheet: PNG of all of them.
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
        """Have each tracker do it; what one raises is told, and ends nothing: the record is `metrics.jsonl`."""
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # each tracker has exceptions of its own
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
        """The rows are on the disk, as those before a checkpoint have to be.

        Raises:
            OSError: they are not.
        """
        self._append()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Raises nothing, which would hide the error that ends a run; rows since the last `sync` count for nothing."""
        self._each(lambda tracker: tracker.finish())
        try:
            self._file.close()
        except OSError as error:
            say_wrapped(f"note: metrics.jsonl: {error}", self._tell)


def _start(name: str, config: Config, run: Path, run_id: str, iteration: int) -> Any:
    """A tracker that runs and has been told the settings."""
    project = config.tracking.project
    tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
    PartialState()  # the trackers' logger asks for it; it joins the process group of `distributed.initialize`
    if name == "tensorboard":
        tracker = tracker_class("tensorboard", logging_dir=run, purge_step=iteration + 1 if iteration else None)
    elif name == "wandb":
        tracker = tracker_class(project, name=run.name, id=run_id, resume="allow", dir=str(run))
    elif name == "trackio":  # knows a run by its name
        tracker = tracker_class(project, name=f"{run.name}-{run_id}", resume="allow")
    else:
        tracker = tracker_class(project, *[run] * tracker_class.requires_logging_directory)
    try:
        tracker.start()
        if name == "tensorboard":  # its table of hyperparameters would be a second run beside this one
            tracker.log({"config": textwrap.indent(dump(config), "    ")}, step=iteration)
        else:
            tracker.store_init_configuration(dict(_flat(dataclasses.asdict(config))))
        if name == "wandb":
            tracker.tracker.define_metric("*", step_metric=WANDB_STEP)
    except Exception as error:  # each tracker has exceptions of its own for a missing login or server
        raise RunError(f"tracker {name!r} does not start: {error}") from error
    return tracker


def _log(tracker: Any, values: Mapping[str, Any], step: int) -> None:
    if tracker.name == "wandb":
        tracker.log({**values, WANDB_STEP: step})
    else:
        tracker.log(values, step=step)


def _show(tracker: Any, videos: Mapping[Path, str], sheet: Path, step: int) -> None:
    """The videos (file -> prompt) if the tracker plays them, and their contact sheet if it takes images."""
    if tracker.name in ("wandb", "trackio"):
        package = importlib.import_module(tracker.name)
        media = {
            f"heldout/video_{number:02d}": package.Video(str(file), caption=prompt, format="mp4")
            for number, (file, prompt) in enumerate(videos.items())
            if file.suffix == ".mp4"  # the trackers play no animated pictures
        }
        _log(tracker, media | {"heldout/videos": package.Image(str(sheet))}, step)
    elif tracker.name == "tensorboard":
        pixels = np.asarray(Image.open(sheet))[None]
        tracker.log_images({"heldout/videos": pixels}, step=step, dataformats="NHWC")
    elif hasattr(tracker, "log_images"):
        image = Image.open(sheet)
        tracker.log_images({"heldout/videos": image if tracker.name == "aim" else [image]}, step=step)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, bool | int | float | str | None]]:
    """Dotted keys and the plain values that trackers take."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, bool | int | float | str | None) else str(value)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
