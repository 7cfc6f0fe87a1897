"""Take a run folder for this process: whether it may, its lock, its settings and its facts."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sage_fast.config.fields import settings_of
from sage_fast.config.loader import dump
from sage_fast.config.schema import Config
from sage_fast.run.folder import RunFolder, iteration_of
from sage_fast.run.preflight import check_new
from sage_fast.run.resume import check_kept
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError, reason
from sage_fast.util.files import PARTIAL, remove, write_atomic
from sage_fast.util.ranks import barrier, broadcast_object, rank

log = logging.getLogger(__name__)


def check_output(config: Config, *, resume: bool) -> None:
    """Check the output folder without touching it.

    Raises:
        UserError: without `resume`, the folder holds a run or other files. With `resume`, it holds no run, a run that
            began with other values of settings it must keep, a run past `train.iterations`, or one without its metrics.
    """
    run = RunFolder(config.output)
    if resume:
        run.check_resumable()
        check_kept(config)
        saved = [*map(iteration_of, run.checkpoints())] or [0]
        done = saved[-1]
        if done > config.train.iterations:
            raise UserError(
                f"train.iterations = {config.train.iterations}: the run in {config.output!r} has done {done} already; "
                "nothing was changed"
            )
        check_metrics(run, saved[0])  # later checkpoints may be damaged, and skipped
    else:
        check_new(config.output)


def check_metrics(run: RunFolder, done: int) -> None:
    """Check that `metrics.jsonl` begins with the lines of iterations 0 to `done` - 1.

    Raises:
        UserError: one is missing, or not in its place.
    """
    found = [row["iteration"] for row in run.rows]
    if missing := [i for i in range(done) if found[i : i + 1] != [i]]:
        raise UserError(
            f"{str(run.metrics_file)!r}: the line of iteration {missing[0]} is missing; put a copy of the file "
            "there, or start another run with --output and no --resume; nothing was changed"
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other runs. Rank 0 holds the lock; the kernel releases it if the process dies.

    If no run begins in the block, the folder is restored to its previous state.

    Args:
        folder: created if missing.

    Raises:
        UserError: on all ranks, if another run uses the folder.
    """
    run, made = RunFolder(folder), [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(run.lock_file, timeout=0, fallback_to_soft=False)
    refused, failure = None, None
    if rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refused = _acquire(lock, run.lock_file)
        except OSError as error:  # raised only after the broadcast that the other ranks wait for
            failure, refused = error, f"cannot be locked: {error}"
    held, refused = rank() == 0 and refused is None, broadcast_object(refused, 0)
    try:
        if failure is not None:
            raise failure
        if refused is not None:
            raise UserError(
                f"output = {str(folder)!r}: {refused}; wait for its end, or choose another folder with --output; "
                "nothing was changed"
            )
        yield
    finally:
        if held and not run.exists:
            run.lock_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # no longer empty
                for path in made:
                    path.rmdir()
        lock.release()


def _acquire(lock: FileLock, file: Path) -> str | None:
    """Acquire the lock of a file and write into it who has it; return who has it already, if anyone."""
    try:
        lock.acquire()
    except Timeout:
        user = file.read_text(encoding="utf-8", errors="replace")[:200].strip() if file.exists() else ""
        return f"another run is using it ({user or 'it has just begun'})"
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        log.info(
            f"note: no locks on this file system ({error.strerror}): make sure that only one run uses {file.parent}"
        )
    file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    return None


def claim_output(folder: Path, settings: str) -> None:
    """Create the folder of a new run and write its settings, as `dump` returns them. Collective.

    Raises:
        UserError: another run has claimed the folder since `check_output`.
    """
    run = RunFolder(folder)
    barrier()  # every rank has checked before rank 0 writes
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if run.exists:
            raise UserError(f"output = {str(folder)!r}: another run began there while this one was loading")
        write_atomic(run.config_file, settings)
    barrier()


def replace_settings(config: Config) -> None:
    """Write the settings of a resumed run, report the changes and keep the old file under another name. Collective."""
    run = RunFolder(config.output)
    pairs = {name: [*map(attrgetter(name), (run.settings(), config))] for name in settings_of(Config)}
    barrier()  # every rank has read the old settings
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for name, (old, new) in changed.items():
        log.info(f"{name} = {new!r} from here on; it was {old!r}")
    if rank() == 0 and changed:
        write_atomic(run.path / f"config.until-{len(run.rows):06d}.yaml", run.config_file.read_bytes())
        write_atomic(run.config_file, dump(config))
    barrier()


def remove_partials(folder: Path) -> None:
    """Remove the partial files of a killed run. Call with the lock held, before writing anything."""
    for path in sorted(folder.rglob(f"*{PARTIAL}")):
        try:
            remove(path)
        except OSError as error:
            log.info(wrapped(f"note: a partial file of a killed run cannot be removed: {reason(error)}"))


def run_facts(run: Path, facts: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Return the content of `run.json` for a run that starts or resumes at `iteration`.

    The run id, and the date, commit and command of the first start are kept; those of each resume are listed under
    `resumed`. All other facts come from the newest start. A note says which setting names other contents than before.
    """
    start = {key: facts[key] for key in ("date", "commit", "command")}
    if not (first := RunFolder(run).facts):
        return {"run_id": secrets.token_hex(4), **facts}
    for name, held in first.get("contents", {}).items():
        if (holds := facts["contents"].get(name, held)) != held:
            log.info(wrapped(f"note: {name} holds {holds} from here on; it held {held}"))
    kept = {"run_id": secrets.token_hex(4)} | {key: first[key] for key in ("run_id", *start) if key in first}
    return {**facts, **kept, "resumed": [*first.get("resumed", []), {"iteration": iteration, **start}]}
