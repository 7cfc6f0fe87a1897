"""Take a run folder for this process: whether it may, its lock and claim, its settings and its
facts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from sage_fast.config.fields import settings_of
from sage_fast.config.loader import dump
from sage_fast.config.schema import Config
from sage_fast.run.preflight import check_new
from sage_fast.run.resume import check_kept
from sage_fast.run_folder import SKIPPED, RunFolder, iteration_of, iteration_of_weights
from sage_fast.util.console import wrapped
from sage_fast.util.errors import RunError, UserError, reason
from sage_fast.util.files import (
    PARTIAL,
    WRITE_ERRORS,
    FolderLock,
    discard,
    only_safer,
    probe,
    put_in_place,
    take_away,
    write_atomic,
    write_json,
    writing,
)
from sage_fast.util.presence import check_readable, holds_file
from sage_fast.util.ranks import barrier, broadcast_object, fail_together, rank
from sage_fast.util.text import counted

log = logging.getLogger(__name__)


def check_output(config: Config, *, resume: bool) -> None:
    """Check the output folder without touching it.

    Raises:
        UserError: without `resume`, the folder holds a run or other files. With `resume`, it holds
            no run, a run that began with other values of settings it must keep, a run past
            `train.iterations`, or one without its metrics or its checkpoints.
    """
    run = RunFolder(config.output)
    if resume:
        run.check_resumable()
        check_kept(config)
        check_checkpoints(run)
        saved = [iteration_of(folder) for folder in run.checkpoints()] or [0]
        done = saved[-1]
        if done > config.train.iterations:
            raise UserError(
                f"train.iterations = {config.train.iterations}: the run in {config.output!r} has "
                f"done {done} already; nothing was changed"
            )
        check_metrics(run, saved[0])  # later checkpoints may be damaged, and skipped
    else:
        check_new(config.output)


def check_checkpoints(run: RunFolder) -> None:
    """Check that what a resume continues is there: the newest checkpoint, if the run has written
    one, and `run.json`.

    A run that was stopped before its first checkpoint has none, and begins again.

    Raises:
        UserError: a checkpoint has been written and none can be seen, or a file or folder that a
            resume needs is missing or cannot be read.
    """
    check_readable(run.path / "eval")
    checkpoints = run.checkpoints()
    began = [name for name in run.remains if name != run.facts_file.name]
    if began and not run.facts and not holds_file(run.facts_file):
        raise UserError(
            f"{str(run.facts_file)!r} is missing, and {', '.join(began)} are there; put a copy of "
            "the file there, or begin another run with another --output and no --resume; nothing "
            "was changed"
        )
    if checkpoints:
        check_readable(checkpoints[-1])
    elif lost := _trace_of_checkpoints(run):
        raise UserError(
            f"{str(run.path / 'checkpoints')!r}: no checkpoint can be seen, but {lost}; put the "
            "checkpoints back, or begin another run with another --output and no --resume; "
            "nothing was changed"
        )


def _trace_of_checkpoints(run: RunFolder) -> str | None:
    """Return what says that a run has written a checkpoint; None if it has not."""
    if (newest := run.facts.get("checkpoint")) is not None:
        return f"the run has written one after {counted(newest, 'iteration')}"
    if "weights" in run.remains:
        return "weights/ holds what the run has trained"
    if holds_file(run.path / "eval" / "after.json"):
        return "eval/after.json is of the trained weights"
    if run.rows and "checkpoint" not in run.facts:  # of a version that did not write it down
        return f"metrics.jsonl has the lines of {counted(len(run.rows), 'iteration')}"
    return None


def check_metrics(run: RunFolder, done: int) -> None:
    """Check that `metrics.jsonl` begins with the lines of iterations 0 to `done` - 1.

    Raises:
        UserError: one is missing, or not in its place.
    """
    found = [row["iteration"] for row in run.rows]
    for iteration in range(done):
        if found[iteration : iteration + 1] != [iteration]:
            raise UserError(
                f"{str(run.metrics_file)!r}: the line of iteration {iteration} is missing; put a "
                "copy of the file there, or start another run with --output and no --resume; "
                "nothing was changed"
            )


class ClaimLost(RunError):
    """Another run has taken the run folder over. Nothing may be written there any more."""

    on_all_ranks = True


class Claim:
    """This process's claim to a run folder: a line in `run.lock`, which the next run that begins
    there replaces.

    A lock may act within one host only, or not at all, so that a run on another host can take a
    folder that is in use. The run that came later keeps it. The earlier one finds its claim
    replaced before it writes again, and stops.

    `run.lock` has two lines: the process that locked it last, and the claim of the run that took
    the folder last. A process that is refused after it has locked the file leaves the second line
    as it was.

    Attributes:
        lost: whether another run has taken the folder over.
    """

    def __init__(self, file: Path) -> None:
        self.lost = False
        self._file = file
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._line = ""

    def lock(self, lock: FolderLock) -> str | None:
        """Lock the file and write into it who has it; return why not, as `_make`, if another
        process has it."""
        if not lock.acquire():
            user = self._lines()[0][:200]
            user = user or "it has just begun"
            return f"another run is using it ({user}); wait for its end, or"
        self._write(self._lines()[1])
        return None

    def take(self) -> None:
        """Make the folder this run's.

        On rank 0, before it changes anything that an earlier run has written.
        """
        self._line = f"claim {secrets.token_hex(8)} of {self._process}"
        self._write(self._line)

    def check(self) -> None:
        """Check that the folder is still this run's, before something is written there. Collective.

        Raises:
            ClaimLost: on all ranks.
        """
        other = broadcast_object(self._replaced_by() if rank() == 0 else None, 0)
        if other is not None:
            self.lost = True
            raise ClaimLost(
                f"{str(self._file)!r}: another run has taken the folder over ({other}); this one "
                "stops and leaves it as it is"
            )

    def _replaced_by(self) -> str | None:
        """Return which process has replaced the claim; None if none has, or none is known.

        A line that is missing or incomplete tells nothing: the file may be just being written, or
        have been removed.
        """
        if not self._line:
            return None
        found = self._lines()[1]
        match = re.fullmatch("claim [0-9a-f]{16} of (.+)", found)
        return None if match is None or found == self._line else match[1][:200]

    def _lines(self) -> tuple[str, str]:
        """Return the two lines of the file; each is empty if it is missing or incomplete."""
        text = ""
        with contextlib.suppress(FileNotFoundError), only_safer("claim", self._file):
            text = self._file.read_text(encoding="utf-8", errors="replace")
        whole = text.split("\n")[:-1]
        process, claim, *_ = [*whole, "", ""]
        return process, claim

    def _write(self, line: str) -> None:
        """Write both lines in place: the lock is on this file, whatever its name is."""
        with writing(self._file):
            self._file.write_text(f"{self._process}\n{line}\n", encoding="utf-8")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Claim]:
    """Lock the folder against other runs, and try there what a run needs of a file system.
    Collective.

    Rank 0 holds the lock. If no run begins in the block, the folder is restored to its previous
    state.

    Args:
        folder: created if missing.

    Yields:
        The claim to the folder, which is still to be taken.

    Raises:
        UserError: on all ranks, if another run uses the folder.
        OSError: the file system lacks what a run needs, or is full.
    """
    run = RunFolder(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FolderLock(run.lock_file)
    claim = Claim(run.lock_file)

    refused = None
    failure = None
    if rank() == 0:
        try:
            refused = _make(folder)
            if refused is None:
                refused = claim.lock(lock)
        except OSError as error:  # raised only after the broadcast that the other ranks wait for
            failure = error
            refused = f"cannot be locked: {error}"
    is_locked_here = rank() == 0 and refused is None
    refused = broadcast_object(refused, 0)
    try:
        if failure is not None:
            raise failure
        if refused is not None:
            raise UserError(
                f"output = {str(folder)!r}: {refused} choose another folder with --output; nothing "
                "was changed"
            )
        probe_run_folder(run)
        yield claim
    finally:
        if is_locked_here and not run.exists:
            discard(run.lock_file)
            with contextlib.suppress(OSError):  # no longer empty
                for path in made:
                    path.rmdir()
        lock.release()


def _make(folder: Path) -> str | None:
    """Make the output folder; return why none can be there, as the first half of a sentence that
    ends with `choose another folder`.

    Raises:
        OSError: the disk is full, read-only or broken, or its quota used up.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in WRITE_ERRORS:
            raise
        return f"cannot be made: {error.strerror};"
    return None


def probe_run_folder(run: RunFolder) -> None:
    """Try on every rank what a run does with files, before anything is loaded: a first checkpoint
    comes late.

    Folders in a run folder may be links to other disks.

    Raises:
        OSError: as of `probe`.
        RankError: another rank cannot do it.
    """
    with fail_together():
        run.path.mkdir(parents=True, exist_ok=True)
        for folder in (run.path, run.path / "checkpoints", run.path / "eval"):
            if folder.is_dir():
                probe(folder)


def claim_output(claim: Claim, folder: Path, settings: str) -> None:
    """Take the folder of a new run, created if missing, and write its settings, as `dump` has them.
    Collective.

    Raises:
        UserError: another run has claimed the folder since `check_output`.
    """
    run = RunFolder(folder)
    barrier()  # every rank has checked before rank 0 writes
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if run.exists:
            raise UserError(
                f"output = {str(folder)!r}: another run began there while this one was loading"
            )
        claim.take()
        write_atomic(run.config_file, settings)
    barrier()


def replace_settings(config: Config, done: int) -> None:
    """Write the settings of a run that is resumed after `done` iterations, and report the changes.
    Collective.

    The settings of the iterations until then stay in `config.until-<done>.yaml`.
    """
    run = RunFolder(config.output)
    before = run.settings()
    barrier()  # every rank has read the old settings

    changed = False
    for name in settings_of(Config):
        old = attrgetter(name)(before)
        new = attrgetter(name)(config)
        if old != new:
            changed = True
            log.info(f"{name} = {new!r} from here on; it was {old!r}")
    if rank() == 0:
        until = run.settings_until(done)
        later = [file for iteration, file in run.earlier_settings().items() if iteration >= done]
        if later and later[0] != until:  # they had changed after the iteration that is resumed from
            write_atomic(until, later[0].read_bytes())
        elif changed and not later:
            write_atomic(until, run.config_file.read_bytes())
        if changed:
            write_atomic(run.config_file, dump(config))
        for file in later:
            if file != until:
                take_away(file)
    barrier()


def forget_beyond(run: RunFolder, done: int) -> None:
    """Undo what a run has written beyond the iteration that it is resumed from, and say so in a
    line.

    Evaluations, their videos and the page go: they are made again. The lines of metrics.jsonl are
    for the writer to drop. Checkpoints, which the resume has skipped, and final weights are kept
    under other names, which nothing reads.

    Args:
        run: the run folder, of a resume that has passed all its checks.
        done: complete iterations.
    """
    undone = [
        f"the line of iteration {row['iteration'] + 1}"
        for row in run.rows
        if row["iteration"] >= done
    ]
    if len(undone) > 1:
        undone = [f"the lines of {counted(len(undone), 'iteration')}"]
    for name in run.evaluations_beyond(done):
        undone.append(f"the evaluation {name}")
        take_away(run.evaluation_file(name))
        take_away(run.videos(name))
    for checkpoint in run.checkpoints():
        if iteration_of(checkpoint) > done:
            skipped = checkpoint.with_name(checkpoint.name + SKIPPED)
            put_in_place(checkpoint, skipped)
            undone.append(
                f"{checkpoint.name}, which is {skipped.name} until the next checkpoint is written"
            )
    if (
        "weights" in run.remains
        and done < (trained := iteration_of_weights(run.weights)) < math.inf
    ):
        aside = _unused(run.path / f"weights.until-{int(trained):06d}")
        put_in_place(run.weights, aside)
        undone.append(f"the final weights, which are now in {aside.name}")
    if undone:
        take_away(run.report_file)
        after = counted(done, "iteration")
        log.info(wrapped(f"note: the run continues after {after}; undone: {', '.join(undone)}"))


def _unused(path: Path) -> Path:
    """Return a path at which nothing is: this one, or with -2, -3 and so on."""
    found = path
    for number in itertools.count(2):
        if not os.path.lexists(found):
            break
        found = path.with_name(f"{path.name}-{number}")
    return found


def record_checkpoint(run: RunFolder, iteration: int) -> None:
    """Write into `run.json` that there is a checkpoint, so that a resume which sees none knows that
    one is lost.

    A failure is a note: the checkpoint itself is whole.
    """
    try:
        write_json({**run.facts, "checkpoint": iteration}, run.facts_file)
    except (OSError, UserError) as error:
        log.info(wrapped(f"note: the checkpoint is not named in run.json: {reason(error)}"))


def record_stop(run: RunFolder, reason_given: str) -> None:
    """Write into `run.json` why a callback has ended the run; a failure is a note."""
    try:
        write_json({**run.facts, "stopped": reason_given}, run.facts_file)
    except (OSError, UserError) as error:
        log.info(wrapped(f"note: the reason is not in run.json: {reason(error)}"))


def remove_partials(folder: Path) -> None:
    """Remove the partial files of a killed run.

    Call with the lock held, before writing anything.
    """
    for path in sorted(folder.rglob(f"*{PARTIAL}")):
        discard(path)


def run_facts(run: Path, facts: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Return the content of `run.json` for a run that starts or resumes at `iteration`.

    The run id, and the date, commit and command of the first start are kept; those of each resume
    are listed under `resumed`, as far as their iterations have not been undone; `trackers` has all
    that the run had. All other facts come from the newest start. A note says which setting names
    other contents than before.
    """
    first = RunFolder(run).facts
    if not first:
        return {"run_id": secrets.token_hex(4), **facts}

    for name, before in first.get("contents", {}).items():
        now = facts["contents"].get(name, before)
        if now != before:
            log.info(wrapped(f"note: {name} holds {now} from here on; it held {before}"))

    start = {key: facts[key] for key in ("date", "commit", "command")}
    kept: dict[str, Any] = {"run_id": secrets.token_hex(4)}
    for key in ("run_id", *start):
        if key in first:
            kept[key] = first[key]

    trackers = [*first.get("trackers", []), *facts.get("trackers", [])]
    kept["trackers"] = list(dict.fromkeys(trackers))

    resumed = []
    for earlier in first.get("resumed", []):
        if earlier.get("iteration", 0) <= iteration:
            resumed.append(earlier)
    resumed.append({"iteration": iteration, **start})
    return {**facts, **kept, "resumed": resumed}
