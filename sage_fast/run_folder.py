"""A run folder, finished or not: where its files are, and what they hold.

<run>/config.yaml run.json metrics.jsonl tensorboard/ wandb/ embeddings/ checkpoints/ weights/ eval/
videos/ logs/ hangs/ <run>/report.html run.lock

Imports nothing heavy.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.util.errors import RankError, UserError, first_line, reason
from sage_fast.util.files import HANGS, read_json, read_metrics, reading, write_json
from sage_fast.util.presence import entries, holds_file, holds_folder, leads_nowhere

log = logging.getLogger(__name__)

Found = TypeVar("Found")

FLOAT32_MAX = float.fromhex("0x1.fffffep127")
"""Largest float32: scores are float32."""
STEPS = ("sigmas", "transition_std", "equalizer")
"""Lists of `run.json` with a value for each step of a rollout."""


MANIFEST = "manifest.json"
"""File in a checkpoint and in `weights/` that holds the size and SHA-256 of every other file."""

NOT_WRITTEN = f"{MANIFEST} is not what was written"
"""Fault of a checkpoint whose manifest cannot be read as one."""

TRAINING = "training/"
"""Folder in a checkpoint of the files that only a resume reads."""

SKIPPED = ".skipped"
"""Suffix of a checkpoint that a resume could not use, until the next one is written."""

STATE = f"{TRAINING}state.json"
"""File in a checkpoint that holds the trainer's counters."""


class RunFolder:
    """The paths and the content of a run folder.

    `facts`, `rows` and `evaluations` are read once; another `RunFolder` reads them again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.facts_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.report_file = self.path / "report.html"
        self.lock_file = self.path / "run.lock"
        self.weights = self.path / "weights"
        self.embeddings = self.path / "embeddings"
        self.hangs = self.path / HANGS

    @classmethod
    def of_checkpoint(cls, path: Path) -> RunFolder | None:
        """Return the run of a path `<run>/checkpoints/iteration-N`; None for any other path."""
        inside = path.parent.name == "checkpoints" and re.fullmatch(
            "iteration-[0-9]{6,9}", path.name
        )
        return cls(path.parent.parent) if inside else None

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run.

        Raises:
            UserError: its settings cannot be read.
        """
        return holds_file(self.config_file)

    @property
    def remains(self) -> list[str]:
        """The names of what a run has left in the folder; its settings, and what precedes
        `run.json`, apart.

        Raises:
            UserError: the folder cannot be read.
        """
        written = (
            "run.json",
            "metrics.jsonl",
            "checkpoints",
            "weights",
            "eval",
            "videos",
            "tensorboard",
            "report.html",
        )
        found = {path.name for path in entries(self.path)}
        return [name for name in written if name in found]

    @property
    def holds_record(self) -> bool:
        """Whether the folder holds what only a run writes; a folder of settings may hold `weights`
        too."""
        return any(
            holds_file(file) for file in (self.facts_file, self.metrics_file, self.lock_file)
        )

    def can_continue(self) -> bool:
        """Whether a run is here that can be continued. If not, a run that was to be resumed begins.

        Raises:
            UserError: a run has left files, and its settings are missing.
        """
        if not self.exists and holds_folder(self.path) and self.remains:
            self.check()  # a run without its settings is none that begins
        return self.exists

    def check_resumable(self) -> None:
        """Check that the folder holds a run to resume.

        Raises:
            UserError: it does not.
        """
        self.check(
            f"; output = {str(self.path)!r}: no run to resume there; leave --resume out to start "
            "one (in Python, resume=True)"
        )

    def check(self, otherwise: str = "") -> None:
        """Check that the folder holds a run.

        Args:
            otherwise: what else it could have been, for the message.

        Raises:
            UserError: it does not.
        """
        if self.exists:
            return
        if holds_folder(self.path) and (remains := self.remains):
            raise UserError(
                f"{str(self.path)!r}: config.yaml is missing, and {', '.join(remains)} of a run "
                "are there; put a copy of the run's config.yaml there, or choose another folder "
                "with --output; nothing was changed"
            )
        raise UserError(f"{str(self.path)!r} is no run folder: config.yaml is missing{otherwise}")

    def settings(self, overrides: Mapping[str, str] | None = None) -> Config:
        """Load `config.yaml` with `overrides`.

        Raises:
            UserError: the folder holds no run, another version has written settings that this one
                does not have, or as `load`.
        """
        self.check()
        try:
            load(self.config_file)
        except UserError as error:
            writer = self._written_by()
            advice = (
                f"; {writer} wrote the run: go on with that version, or begin another run"
                if writer
                else ""
            )
            raise UserError(f"{error}{advice}") from error
        return load(self.config_file, overrides)

    def settings_until(self, iteration: int) -> Path:
        """Return the file of the settings that an iteration was reached with, where a resume has
        changed them."""
        return self.path / f"config.until-{iteration:06d}.yaml"

    def earlier_settings(self) -> dict[int, Path]:
        """Return iteration -> `settings_until` for the files that are there, in the order of
        iterations."""
        found = {
            file: re.fullmatch(r"config\.until-(\d{6,9})\.yaml", file.name)
            for file in entries(self.path)
        }
        return dict(sorted((int(name[1]), file) for file, name in found.items() if name))

    def _written_by(self) -> str:
        """Return which version has written the run, as far as `run.json` knows; empty where it does
        not."""
        try:
            facts = self.facts
        except UserError:
            return ""
        version = facts.get("sage_fast")
        commit = facts.get("commit")
        if version is None and commit is None:
            return ""
        named = f"sage-fast {version}" if version else "another version of sage-fast"
        return f"{named}, commit {commit}" if commit else named

    @property
    def videos_folder(self) -> Path:
        return self.path / "videos"

    def videos(self, evaluation: str) -> Path:
        return self.videos_folder / evaluation

    def log_file(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank:03d}.log"

    # -- run.json and metrics.jsonl ----------------------------------------------------------------

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The content of `run.json`: command, commit, versions, device, schedule; empty without the
        file.

        Raises:
            UserError: a field does not hold what a run writes.
        """
        if not holds_file(self.facts_file):
            return {}
        facts = read_json(self.facts_file)
        wrong = _wrong_fact(facts)
        if wrong is not None:
            raise UserError(f"{self.facts_file}: {wrong!r} does not hold what it should")
        return facts

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one per iteration.

        Raises:
            UserError: the file cannot be read, or as `read_metrics`.
        """
        return read_metrics(self.metrics_file) if holds_file(self.metrics_file) else []

    # -- evaluations -------------------------------------------------------------------------------

    def evaluation(self, name: str) -> dict[str, Any] | None:
        """Read the scores of `before`, `iteration-000010` or `after`; None if there are none.

        Raises:
            UserError: the file is damaged, or cannot be read.
        """
        file = self.evaluation_file(name)
        return read_scores(file) if holds_file(file) else None

    def evaluation_file(self, name: str) -> Path:
        return self.path / "eval" / f"{name}.json"

    def write_evaluation(self, name: str, scores: Mapping[str, Any]) -> None:
        write_json(scores, self.evaluation_file(name))

    def evaluations_beyond(self, iteration: int) -> list[str]:
        """Return the names of evaluations, also of interrupted ones with videos alone, after an
        iteration."""
        scored = [file.stem for file in entries(self.path / "eval") if file.suffix == ".json"]
        shown = [folder.name for folder in entries(self.path / "videos")]
        found = []
        for name in dict.fromkeys([*scored, *shown]):
            if number := re.fullmatch(r"iteration-(\d{6,9})", name):
                made_at = int(number[1])
            elif name == "after" and name in self.evaluations[0]:
                made_at = self.evaluations[0][name]["iteration"]
            else:
                continue
            if made_at > iteration:
                found.append(name)
        return found

    @functools.cached_property
    def evaluations(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Name -> scores of all evaluations by iteration, and a note on each file that is damaged
        and left out.

        A continued run may be past its `after`.

        Raises:
            UserError: the folder of evaluations cannot be read.
        """
        found, notes = {}, []
        for file in entries(self.path / "eval"):
            if file.suffix != ".json":
                continue
            try:
                found[file.stem] = read_scores(file)
            except UserError as error:
                notes.append(f"left out, since it is damaged: {error}")
        return dict(
            sorted(found.items(), key=lambda item: (item[1]["iteration"], item[0] == "after"))
        ), notes

    def video_sets(self) -> dict[str, Any]:
        """Return name -> videos (`VideoSet`) of each evaluation that is not damaged, in the order
        of iterations.

        All composites are under the weights of the last one, since a resume may have changed the
        weights.
        """
        from sage_fast.eval.videoset import from_evaluation
        from sage_fast.util.videos import numbered

        found, _ = self.evaluations
        weights = [*found.values()][-1]["weights"] if found else None
        sets = {}
        for name, scores in found.items():
            label = f"iteration {scores['iteration']}" if name.startswith("iteration") else name
            sets[name] = from_evaluation(label, scores, numbered(self.videos(name)), weights)
        return sets

    # -- weights -----------------------------------------------------------------------------------

    def checkpoint(self, iteration: int) -> Path:
        return self.path / "checkpoints" / f"iteration-{iteration:06d}"

    def checkpoints(self) -> list[Path]:
        """Return the folders of complete checkpoints, oldest first.

        A checkpoint that is a link to nothing is left out.

        Raises:
            UserError: the folder of checkpoints cannot be read or is a link to nothing, or a
                checkpoint cannot be read.
        """
        named = [path for path in entries(self.path / "checkpoints") if self.of_checkpoint(path)]
        found = [path for path in named if not leads_nowhere(path) and holds_folder(path)]
        return sorted(found, key=iteration_of)

    def first_sound(self, folders: Iterable[Path], read: Callable[[Path], Found]) -> Found | None:
        """Return what `read` returns of the first folder in which it finds no fault; None if there
        are no folders.

        Each fault before it is a note.

        Raises:
            UserError: none can be used.
            OSError: as of `read`.
        """
        faults = []
        for folder in folders:
            try:
                return read(folder)
            except (UserError, RankError, SafetensorError) as error:
                faults.append(f"{folder.name}: {first_line(error)}")
                log.info(f"note: {folder.name} cannot be used and is skipped: {first_line(error)}")
        if faults:
            writer = self._written_by()
            raise UserError(
                f"run {str(self.path)!r}: no checkpoint can be used ({'; '.join(faults)}); put a "
                "sound copy there, or begin another "
                f"run{f'; {writer} wrote this one' if writer else ''}; nothing was changed"
            )
        return None

    def newest_weights(self) -> tuple[Path, int]:
        """Return the folder of the newest weights and their iteration.

        This is `weights/`, unless a checkpoint is newer because the run was resumed and stopped
        again. Both hold the averaged weights if the run averages. Damaged ones are skipped.

        Raises:
            UserError: the run has no weights yet, or all are damaged.
        """
        found: list[tuple[float, Path]] = [
            (iteration_of(folder), folder) for folder in self.checkpoints()
        ]
        if holds_folder(self.weights):
            found = sorted([*found, (iteration_of_weights(self.weights), self.weights)])
        iterations = {folder: iteration for iteration, folder in reversed(found)}

        def check(folder: Path) -> tuple[Path, int]:
            try:
                fault = fault_of_weights(folder)
            except OSError as error:
                raise UserError(reason(error)) from error
            if fault:
                raise UserError(fault)
            if iterations[folder] == math.inf:
                raise UserError(f"{MANIFEST} names no iteration")
            return folder, int(iterations[folder])

        if (newest := self.first_sound(iterations, check)) is None:
            raise UserError(f"run {str(self.path)!r} has neither a checkpoint nor weights yet")
        return newest


def _wrong_fact(facts: Mapping[str, Any]) -> str | None:
    """Return a field of `run.json` that does not hold what a run writes; None if all do."""
    kinds: dict[str, Any] = {"notes": str, "resumed": dict, "trackers": str}
    kinds |= dict.fromkeys(STEPS, int | float)
    for name, kind in kinds.items():
        values = facts.get(name) or []
        if not isinstance(values, list) or not _all(values, kind):
            return name
    for name in STEPS:
        if not all(math.isfinite(value) for value in facts.get(name) or []):
            return name

    if not isinstance(facts.get("contents", {}), dict):
        return "contents"
    if not isinstance(facts.get("checkpoint"), int | None):
        return "checkpoint"

    for start in (facts, *(facts.get("resumed") or [])):
        for name in ("date", "commit", "command", "method"):
            if not isinstance(start.get(name), str | None):
                return name
    return None


def read_scores(file: Path) -> dict[str, Any]:
    """Read an evaluation, `eval/*.json`.

    Raises:
        UserError: the file is cut off or is no evaluation.
    """
    scores = read_json(file)
    prompts = scores.get("prompts")
    parts = scores.get("parts")
    weights = scores.setdefault("weights", {})
    expected = f"{file}: expected a list of prompts, and objects of parts and weights"
    if not isinstance(prompts, list):
        raise UserError(expected)
    if not isinstance(parts, dict) or not isinstance(weights, dict):
        raise UserError(expected)

    score = float | int | None
    columns = {
        "prompts": (prompts, str),
        "seeds": (scores.get("seeds"), int),
        "reward": (scores.get("reward"), score),
    }
    columns |= {part: (values, score) for part, values in parts.items()}
    for name, (values, kind) in columns.items():
        if not isinstance(values, list) or len(values) != len(prompts) or not _all(values, kind):
            raise UserError(
                f"{file}: {name!r} does not hold one value for each of {len(prompts)} videos"
            )
    if not _all(weights.values(), float | int) or not isinstance(scores.get("iteration"), int):
        raise UserError(f"{file}: 'weights' and 'iteration' do not hold numbers")
    return scores


def _all(values: Iterable[object], kind: Any) -> bool:
    """Whether all values are of a type, and the finite numbers among them within float32."""
    return all(
        isinstance(value, kind)
        and not (isinstance(value, int | float) and FLOAT32_MAX < abs(value) < math.inf)
        for value in values
    )


# -- manifests of checkpoints and final weights ----------------------------------------------------


def check_weights(weights: str | None) -> None:
    """Check the weights that `model.weights` names, if a run wrote them: then they have a manifest.

    Raises:
        UserError: they are damaged.
    """
    if weights is None:
        return
    folder = Path(weights)
    final = folder.name == "weights" and RunFolder(folder.parent).exists
    of_run = final or RunFolder.of_checkpoint(folder) is not None
    if (of_run or holds_file(folder / MANIFEST)) and (fault := fault_of_weights(folder)):
        raise UserError(
            f"model.weights = {str(folder)!r}: damaged: {fault}; expected what the run wrote, or a "
            "copy"
        )


def iteration_of(folder: Path) -> int:
    """Return the iteration that a checkpoint continues with."""
    return int(folder.name.removeprefix("iteration-"))


def digest(file: Path) -> dict[str, Any]:
    """Return a file's manifest entry: size and SHA-256."""
    with reading(file), file.open("rb") as opened:
        return {
            "bytes": file.stat().st_size,
            "sha256": hashlib.file_digest(opened, "sha256").hexdigest(),
        }


def iteration_of_weights(folder: Path) -> float:
    """Return the iteration of `weights/`; infinity if its manifest is missing or damaged."""
    try:
        found = read_json(folder / MANIFEST).get("iteration")
    except (OSError, UserError):
        return math.inf
    return found if isinstance(found, int) else math.inf


def fault_of_weights(checkpoint: Path) -> str | None:
    """Return `fault_of` for the files that sampling and evaluation read."""
    return fault_of(
        checkpoint, lambda names: [name for name in names if not name.startswith(TRAINING)]
    )


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries: name of a file -> its size and SHA-256.

    Raises:
        UserError: the manifest is damaged.
    """
    files = read_json(folder / MANIFEST).get("files")
    if not isinstance(files, dict):
        raise UserError(NOT_WRITTEN)
    for entry in files.values():
        if not isinstance(entry, dict):
            raise UserError(NOT_WRITTEN)
        kinds = {key: type(value) for key, value in entry.items()}
        if kinds != {"bytes": int, "sha256": str}:
            raise UserError(NOT_WRITTEN)
    return files


def files_of(checkpoint: Path) -> list[str]:
    """Return the names of the files in `TRAINING` that the manifest lists."""
    return [name.removeprefix(TRAINING) for name in _files(checkpoint) if name.startswith(TRAINING)]


def fault_of(
    folder: Path, chosen: Callable[[list[str]], Iterable[str]], needed: str | None = None
) -> str | None:
    """Return why a checkpoint cannot be used; None if the manifest's `chosen` files match their
    checksums.

    Args:
        needed: a file that the manifest must list.
    """
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        expected = _files(folder)
    except UserError:
        return NOT_WRITTEN
    if needed not in {None, *expected}:
        return f"it has no {needed}: another version of sage-fast wrote it"
    for name in chosen(sorted(expected)):
        size = expected[name]["bytes"]
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
        if digest(file)["sha256"] != expected[name]["sha256"]:
            return f"{name} has changed since it was written (SHA-256)"
    return None
