"""accelerate's trackers: how each is started, fed with numbers and shown videos."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from PIL.Image import Image
from torch import Tensor

from sage_fast.config.schema import TrackingConfig
from sage_fast.eval.sheets import contact_sheet
from sage_fast.util.console import wrapped
from sage_fast.util.errors import HUNG_THREAD, RunError, UserError, in_one_line, nearest
from sage_fast.util.files import WRITE_ERRORS
from sage_fast.util.futures import fulfil
from sage_fast.util.launchers import without_group
from sage_fast.util.time_limit import TimeLimit

log = logging.getLogger(__name__)

Values = Mapping[str, Any]
Sheet = Callable[[], Image]
"""Returns the contact sheet of some videos, drawn by the first call."""

MAX_FAILURES = 3
"""Failed calls after which a tracker is dropped."""
SECONDS = 60.0
"""How long a call of a tracker may take; then it is dropped at once."""
SECONDS_AT_ENDS = 600.0
"""How long it may take to start when a run is resumed, and to finish, which uploads what is left.
"""


class Tracker:
    """One of accelerate's trackers, started, with the run's settings stored in it.

    Attributes:
        continues: whether a resumed run goes on with the tracker's run, by `run_id`. Otherwise it
            would be a second one, so the tracker is left out.
        forgets: whether what is beyond the iteration that is resumed from leaves the tracker.

    Args:
        name: as in `tracking.trackers`.
        project: as in `tracking.project`.
        settings: of the run by their dotted names, for the tracker to show.
        run: the run folder; its name is the name of the run.
        run_id: stable over `--resume`.
        iteration: the next iteration.

    Raises:
        RunError: it does not start, for example for lack of a login.
    """

    continues: ClassVar[bool] = False
    forgets: ClassVar[bool] = False

    def __init__(
        self, name: str, project: str, settings: Values, run: Path, run_id: str, iteration: int
    ) -> None:
        # Required by the trackers' logger. It takes the process group that the run has joined. A
        # run of one process has joined none, and LOCAL_RANK alone, which says which GPU it takes,
        # would make accelerate look for others.
        with contextlib.nullcontext() if dist.is_initialized() else without_group():
            PartialState()
        self.project = project
        self.run = run
        self.run_id = run_id
        self.iteration = iteration
        self.tracker = self._make(LOGGER_TYPE_TO_CLASS[name])
        try:
            self.tracker.start()
            self._store(settings)
        except (
            Exception,
            SystemExit,
        ) as error:  # each tracker has its own for a missing login or server
            raise RunError(f"tracker {name!r} does not start: {error}") from error

    def _make(self, kind: Any) -> Any:
        if kind.requires_logging_directory:
            return kind(self.project, self.run)
        return kind(self.project)

    def _store(self, settings: Values) -> None:
        plain = (bool, int, float, str, type(None))  # what trackers accept
        stored = {
            key: value if isinstance(value, plain) else str(value)
            for key, value in settings.items()
        }
        self.tracker.store_init_configuration(stored)

    def log(self, values: Values, step: int) -> None:
        self.tracker.log(values, step=step)

    def log_histograms(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Draw the finite values, float64 `[N]` each, if the tracker draws histograms."""

    def show(
        self, group: str, files: Sequence[Path], sheet: Sheet, captions: Sequence[str], step: int
    ) -> None:
        """Send the video files if the tracker plays them, and a contact sheet of the videos if it
        takes images."""
        if hasattr(self.tracker, "log_images"):
            self.tracker.log_images({f"{group}/videos": [sheet()]}, step=step)

    def finish(self) -> None:
        self.tracker.finish()


class TensorBoard(Tracker):
    continues = True
    forgets = True

    def _make(self, kind: Any) -> Any:
        _leave_errors_to_callers()
        # A run that begins again purges too: killed before its first checkpoint, it has left
        # events.
        return kind("tensorboard", logging_dir=self.run, purge_step=self.iteration + 1)

    def _store(
        self, settings: Values
    ) -> None:  # its hyperparameter table would appear as a second run
        text = "\n".join(f"    {name}: {value}" for name, value in settings.items())
        self.tracker.log({"config": text}, step=self.iteration)

    def log_histograms(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        for name, values in histograms.items():
            if len(values):  # TensorBoard takes no empty one
                self.tracker.writer.add_histogram(name, values, global_step=step)
        self.tracker.writer.flush()

    def show(
        self, group: str, files: Sequence[Path], sheet: Sheet, captions: Sequence[str], step: int
    ) -> None:
        images = np.asarray(sheet())[None]
        self.tracker.log_images({f"{group}/videos": images}, step=step, dataformats="NHWC")


class Wandb(Tracker):
    """Plays videos.

    Logs STEP as a value, for the x-axis: by its own `step`, wandb would drop rows that repeat.
    """

    STEP = "iterations"
    continues = True

    def _make(self, kind: Any) -> Any:
        run = self.run
        return kind(self.project, name=run.name, id=self.run_id, resume="allow", dir=str(run))

    def _store(self, settings: Values) -> None:
        super()._store(settings)
        self.tracker.tracker.define_metric("*", step_metric=self.STEP)

    def log(self, values: Values, step: int) -> None:
        self.tracker.log({**values, self.STEP: step})

    def log_histograms(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        package = importlib.import_module("wandb")
        drawn = {name: package.Histogram(values) for name, values in histograms.items()}
        self.log(drawn, step)

    def show(
        self, group: str, files: Sequence[Path], sheet: Sheet, captions: Sequence[str], step: int
    ) -> None:
        package = importlib.import_module("wandb")
        media = {f"{group}/videos": package.Image(sheet())}
        for number, (file, caption) in enumerate(zip(files, captions)):
            video = package.Video(str(file), caption=caption, format="mp4")
            media[f"{group}/video_{number:02d}"] = video
        self.log(media, step)


@functools.cache
def _leave_errors_to_callers() -> None:
    """Print no traceback of TensorBoard's own thread: its next call raises the same error, and a
    note says so."""
    print_error_of = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if type(failed.thread).__module__.partition(".")[0] != "tensorboard":
            print_error_of(failed)

    threading.excepthook = hook


class MLflow(Tracker):
    """Finds the run that it continues by a tag: MLflow gives the ids of its runs itself."""

    TAG = "sage_fast.run_id"
    continues = True

    def _make(self, kind: Any) -> Any:
        package = importlib.import_module("mlflow")
        # as accelerate chooses it
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", self.project)
        found = []
        if package.get_experiment_by_name(experiment) is not None:
            found = package.search_runs(
                experiment_names=[experiment],
                filter_string=f"tags.`{self.TAG}` = '{self.run_id}'",
                max_results=1,
                output_format="list",
            )
        self.is_new = not found
        return kind(
            experiment,
            run_id=None if self.is_new else found[0].info.run_id,
            run_name=self.run.name,
            tags={self.TAG: self.run_id},
        )

    def _store(self, settings: Values) -> None:
        # its parameters cannot be changed; the lines of a resume and config.yaml have what changed
        if self.is_new:
            super()._store(settings)


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
"""Name in `tracking.trackers` -> its class; `Tracker` is the class of accelerate's other trackers.
"""


def check_trackers(names: Iterable[str]) -> None:
    """Check that the trackers are installed, without starting them.

    Raises:
        UserError: accelerate does not know a name, or a tracker is not installed.
    """
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(
                f"tracking.trackers: {name!r}: {nearest(name, sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in map(str, get_available_trackers()):
            package = name.replace("_", "-")
            raise UserError(
                f"tracking.trackers: {name!r} is not installed; install it with: pip install "
                f"{package}"
            )


class _Thread:
    """Makes all calls of a tracker on one daemon thread, where a call that hangs can be left
    behind.

    One thread, since some trackers keep their run in thread-local state.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name="tracker", daemon=True
        )
        self._thread.start()

    def call(
        self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None
    ) -> Future[Any]:
        """Call a function; return after it, or after `seconds` with a future that is not done."""
        future: Future[Any] = Future()
        self._calls.put((future, function, *arguments))
        limit = TimeLimit(seconds or 0)
        while futures.wait([future], limit.next_look).not_done:
            if limit.is_over():
                self._thread.name = HUNG_THREAD
                break
        return future

    def end(self) -> None:
        self._calls.put(None)


def _serve(calls: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
    while (call := calls.get()) is not None:
        fulfil(*call)
        del call  # otherwise an idle thread would keep the last videos alive


def _is_write_error(error: object) -> bool:
    """Whether a tracker does not start because its files cannot be written."""
    cause = error.__cause__ if isinstance(error, RunError) else None
    return isinstance(cause, OSError) and cause.errno in WRITE_ERRORS


class Trackers:
    """The trackers of a run. One that fails or hangs after its start does not stop it:
    `metrics.jsonl` is the record.

    Args:
        tracking, settings, run, run_id, iteration: as for `MetricsWriter`.
        continued: those that have a run already, because the run is resumed.
        undone: whether the run has been beyond `iteration`.

    Raises:
        RunError: a tracker of a new run does not start, for example for lack of a login. A resumed
            run goes on, and so does one whose disk cannot take the tracker's files.
    """

    def __init__(
        self,
        tracking: TrackingConfig,
        settings: Values,
        run: Path,
        run_id: str,
        iteration: int,
        continued: Collection[str] = (),
        undone: bool = False,
    ) -> None:
        names = []
        for name in tracking.trackers:
            kind = TRACKERS.get(name, Tracker)
            if name in continued and not kind.continues:
                log.info(
                    wrapped(
                        f"note: tracker {name!r} would begin a second run for this one; it is left "
                        "out, and metrics.jsonl has every row"
                    )
                )
                continue
            if name in continued and undone and not kind.forgets:
                log.info(
                    wrapped(
                        f"note: tracker {name!r} keeps the numbers beyond iteration {iteration}, "
                        "which are made again: its later ones count"
                    )
                )
            names.append(name)
        self._threads = {name: _Thread() for name in names}
        self._started: dict[str, Tracker] = {}
        for name, thread in self._threads.items():
            seconds = SECONDS_AT_ENDS if iteration > 0 else None
            kind = TRACKERS.get(name, Tracker)
            arguments = (name, tracking.project, settings, run, run_id, iteration)
            start = thread.call(kind, *arguments, seconds=seconds)
            error = (
                start.exception()
                if start.done()
                else f"tracker {name!r} does not start within {seconds:g} s"
            )
            optional = iteration > 0 or _is_write_error(error)
            if optional and isinstance(error, RunError | str):
                log.info(wrapped(f"note: {error}; it is left out, and metrics.jsonl has every row"))
            else:
                self._started[name] = start.result()
        self._failures: Counter[str] = Counter()

    def log(self, values: Values, step: int) -> None:
        self._each(lambda tracker: tracker.log(values, step), SECONDS)

    def log_histograms(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        self._each(lambda tracker: tracker.log_histograms(histograms, step), SECONDS)

    def show(
        self,
        group: str,
        files: Sequence[Path],
        videos: Sequence[Tensor],
        captions: Sequence[str],
        step: int,
    ) -> None:
        self.show_sheet(
            group, files, lambda: contact_sheet(videos, captions[: len(videos)]), captions, step
        )

    def show_sheet(
        self, group: str, files: Sequence[Path], sheet: Sheet, captions: Sequence[str], step: int
    ) -> None:
        """Show videos; the first tracker that takes their contact sheet draws it."""
        drawn = functools.cache(sheet)
        self._each(lambda tracker: tracker.show(group, files, drawn, captions, step), SECONDS)

    def finish(self) -> None:
        self._each(lambda tracker: tracker.finish(), SECONDS_AT_ENDS)
        for thread in self._threads.values():
            thread.end()

    def _each(self, act: Callable[[Tracker], object], seconds: float) -> None:
        """Call `act` on each tracker, for at most `seconds` each.

        Failures are reported, not raised.
        """
        for name, tracker in list(self._started.items()):
            future = self._threads[name].call(act, tracker, seconds=seconds)
            hangs = not future.done()
            error = TimeoutError(f"no answer within {seconds:g} s") if hangs else future.exception()
            if error is None:
                continue
            self._failures[name] += 1
            if hangs or self._failures[name] == 1:
                note = (
                    f"note: tracker {name!r} failed ({in_one_line(error)}); it is left out"
                    f"{'' if hangs else f' if it fails {MAX_FAILURES} times'}, and metrics.jsonl "
                    "has every row"
                )
                log.info(wrapped(note))
            if hangs or self._failures[name] == MAX_FAILURES:
                del self._started[name]
