"""accelerate's trackers: how each is started, fed with numbers and shown videos."""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from torch import Tensor

from sage_fast.config.load import dump
from sage_fast.config.schema import Config
from sage_fast.eval.sheets import contact_sheet
from sage_fast.util.errors import RunError, UserError, nearest

Values = Mapping[str, Any]


class Tracker:
    """One of accelerate's trackers, started, with the run's settings stored in it.

    Args:
        name: as in `tracking.trackers`.
        config: resolved settings, for the tracker to show.
        run: the run folder; its name is the name of the run.
        run_id: stable over `--resume`.
        iteration: the next iteration.

    Raises:
        RunError: it does not start, for example for lack of a login.
    """

    extra = ""
    """Extra of this package that installs it; empty if the package of its name does."""

    def __init__(self, name: str, config: Config, run: Path, run_id: str, iteration: int) -> None:
        PartialState()  # required by the trackers' logger; it joins the process group of `ranks.initialize`
        self.config, self.run, self.run_id, self.iteration = config, run, run_id, iteration
        self.tracker = self._make(LOGGER_TYPE_TO_CLASS[name])
        try:
            self.tracker.start()
            self._store_settings()
        except Exception as error:  # each tracker has its own exceptions for a missing login or server
            raise RunError(f"tracker {name!r} does not start: {error}") from error

    @classmethod
    def check(cls, name: str) -> None:
        """Check that a tracker is installed.

        Raises:
            UserError: accelerate does not know it, or it is not installed.
        """
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"tracking.trackers: {name!r}: {nearest(name, sorted(LOGGER_TYPE_TO_CLASS))}")
        if name not in {str(installed) for installed in get_available_trackers()}:
            package = f"'sage-fast[{cls.extra}]'" if cls.extra else name.replace("_", "-")
            raise UserError(f"tracking.trackers: {name!r} is not installed; install it with: pip install {package}")

    def _make(self, kind: Any) -> Any:
        return kind(self.config.tracking.project, *[self.run] * kind.requires_logging_directory)

    def _store_settings(self) -> None:
        self.tracker.store_init_configuration(dict(_flat(dataclasses.asdict(self.config))))

    def log(self, values: Values, step: int) -> None:
        self.tracker.log(values, step=step)

    def show(self, files: Sequence[Path], videos: Sequence[Tensor], prompts: Sequence[str], step: int) -> None:
        """Send the video files if the tracker plays them, and a contact sheet of the videos if it takes images."""
        if hasattr(self.tracker, "log_images"):
            self.tracker.log_images({"heldout/videos": self._image(videos, prompts)}, step=step)

    def _image(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> Any:
        return [contact_sheet(videos, prompts[: len(videos)])]

    def finish(self) -> None:
        self.tracker.finish()


class Aim(Tracker):
    def _image(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> Any:
        return super()._image(videos, prompts)[0]


class TensorBoard(Tracker):
    def _make(self, kind: Any) -> Any:
        return kind("tensorboard", logging_dir=self.run, purge_step=self.iteration + 1 if self.iteration else None)

    def _store_settings(self) -> None:  # its hyperparameter table would appear as a second run
        self.tracker.log({"config": textwrap.indent(dump(self.config), "    ")}, step=self.iteration)

    def show(self, files: Sequence[Path], videos: Sequence[Tensor], prompts: Sequence[str], step: int) -> None:
        pixels = np.stack(self._image(videos, prompts))
        self.tracker.log_images({"heldout/videos": pixels}, step=step, dataformats="NHWC")


class Trackio(Tracker):
    """Plays videos; it identifies a run by its name."""

    package = "trackio"
    extra = "trackers"

    def _make(self, kind: Any) -> Any:
        return kind(self.config.tracking.project, name=f"{self.run.name}-{self.run_id}", resume="allow")

    def show(self, files: Sequence[Path], videos: Sequence[Tensor], prompts: Sequence[str], step: int) -> None:
        package = importlib.import_module(self.package)
        media = {
            f"heldout/video_{number:02d}": package.Video(str(file), caption=prompt, format="mp4")
            for number, (file, prompt) in enumerate(zip(files, prompts))
        }
        self.log(media | {"heldout/videos": package.Image(*self._image(videos, prompts))}, step)


class Wandb(Trackio):
    """Logs STEP as a value, for the x-axis: by its own `step`, wandb would drop rows that a resumed run repeats."""

    package = "wandb"
    STEP = "iterations"

    def _make(self, kind: Any) -> Any:
        run = self.run
        return kind(self.config.tracking.project, name=run.name, id=self.run_id, resume="allow", dir=str(run))

    def _store_settings(self) -> None:
        super()._store_settings()
        self.tracker.tracker.define_metric("*", step_metric=self.STEP)

    def log(self, values: Values, step: int) -> None:
        self.tracker.log({**values, self.STEP: step})


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, bool | int | float | str | None]]:
    """Yield dotted keys and the plain values that trackers accept."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, bool | int | float | str | None) else str(value)
