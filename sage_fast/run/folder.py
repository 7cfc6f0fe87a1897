"""The files of a run folder that are not metrics or checkpoints.

<run>/config.yaml run.json metrics.jsonl tensorboard/ wandb/ embeddings/ checkpoints/ weights/ eval/ videos/ logs/
<run>/comparison.png report.html run.lock launchers
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sage_fast.config.load import dump, load
from sage_fast.config.schema import Config
from sage_fast.console import Say, say_wrapped
from sage_fast.distributed import all_gather_object, barrier, broadcast_object, initialize, rank
from sage_fast.errors import UserError, reason
from sage_fast.files import PARTIAL, aside, read_json, read_metrics, remove, write_atomic
from sage_fast.report.videos import contact_sheet, numbered, video_suffix, write_video
from sage_fast.run.resume import LAUNCHERS, began_here, check_kept, check_run, differences, launcher
from sage_fast.run.weights import checkpoints, iteration_of

LOCK = "run.lock"


def check_output(config: Config, *, resume: bool) -> None:
    """Look at the output folder without touching it.

    Raises:
        UserError: it holds another run or other files (without `resume`); or no run, one begun with settings that it
            has to keep, or one that has done more iterations already (with it).
    """
    run = Path(config.output)
    if resume:
        check_run(run)
        check_kept(config)
        done = max(map(iteration_of, checkpoints(run)), default=0)
        if done > config.train.iterations:
            raise UserError(
                f"train.iterations = {config.train.iterations}: the run in {config.output!r} has done {done} already; "
                "nothing was changed"
            )
    elif run.exists() and (not run.is_dir() or any(not _is_trace(path) for path in run.iterdir())):
        holds_run = (run / "config.yaml").exists()
        found = "a run: continue it with --resume" if holds_run else "other files: it must be new or empty"
        raise UserError(
            f"output = {config.output!r} already holds {found}, or choose another folder with --output; "
            "nothing was changed"
        )


def _is_trace(path: Path) -> bool:
    """Whether a run that was killed before it began has left this file."""
    return path.name == LOCK or path.suffix == PARTIAL


@contextlib.contextmanager
def locked(run: Path, tell: Say) -> Iterator[None]:
    """Keep every other run out of the folder; the first rank holds the lock, and the kernel gives it back if it dies.

    A folder in which no run began is left as it was found.

    Args:
        run: made if it does not exist.
        tell: told if the file system knows no locks.

    Raises:
        UserError: on all ranks: another run uses the folder.
    """
    made = [path for path in (run, *run.parents) if not path.exists()]
    lock, user, failure = None, None, None
    if rank() == 0:
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock, user = _lock(run / LOCK, tell)
        except OSError as error:  # the others wait to be told
            failure = error
    refused = broadcast_object(user if failure is None else f"cannot be locked: {failure}", 0)
    try:
        if failure is not None:
            raise failure
        if refused is not None:
            raise UserError(
                f"output = {str(run)!r}: {refused}; wait for its end, or choose another folder with --output; nothing "
                "was changed"
            )
        yield
    finally:
        if lock is not None:
            if not (run / "config.yaml").exists():
                (run / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty: something else is there now
                    for folder in made:
                        folder.rmdir()
            lock.close()


def _lock(file: Path, tell: Say) -> tuple[BinaryIO | None, str | None]:
    """The open lock file, or in words who holds it."""
    while True:
        opened = file.open("a+b", buffering=0)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.seek(0)
            user = opened.read(200).decode(errors="replace").strip()
            opened.close()
            return None, f"another run is using it ({user or 'it has just begun'})"
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            tell(
                f"note: no locks on this file system ({error.strerror}): see to it that only one run uses {file.parent}"
            )
            return opened, None
        if file.exists() and os.path.samestat(os.fstat(opened.fileno()), file.stat()):
            break
        opened.close()  # a run that was refused has just removed it
    opened.truncate(0)
    opened.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return opened, None


def claim_output(config: Config) -> None:
    """Make the folder of a new run and write its settings.

    Raises:
        UserError: another run has claimed it since `check_output`.
    """
    run = Path(config.output)
    launchers = all_gather_object(launcher())  # all ranks have looked before the first one writes
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        if (run / "config.yaml").exists():
            raise UserError(f"output = {config.output!r}: another run began there while this one was loading")
        if named := sorted({name for name in launchers if name is not None}):
            write_atomic(run / LAUNCHERS, "".join(f"{name}\n" for name in named))
        write_atomic(run / "config.yaml", dump(config))
    barrier()


def is_restart(config: Config) -> bool:
    """Whether torchrun has started these ranks before, and they began the run in `config.output`; all ranks call."""
    if launcher() is None:
        return False
    initialize(config.timeout_minutes)
    return any(all_gather_object(began_here(Path(config.output))))


def replace_settings(config: Config, tell: Say) -> None:
    """Write the settings of a run that is resumed, and tell what is new; those before are kept under another name."""
    run = Path(config.output)
    settings = run / "config.yaml"
    changed = differences(load(settings), config)
    barrier()  # all ranks have read them
    for line in changed:
        tell(line)
    if rank() == 0 and changed:
        before = settings.read_text(encoding="utf-8")
        write_atomic(run / f"config.until-{len(read_metrics(run / 'metrics.jsonl')):06d}.yaml", before)
        write_atomic(settings, dump(config))
    barrier()


def remove_partials(run: Path, tell: Say) -> None:
    """Remove what a killed run was writing; the one that holds the lock calls, before it writes.

    Args:
        tell: told of what cannot be removed.
    """
    for path in sorted(run.rglob(f"*{PARTIAL}")):
        try:
            remove(path)
        except OSError as error:
            say_wrapped(f"note: what a killed run left cannot be removed: {reason(error)}", tell)


def save_videos(videos: Sequence[torch.Tensor], prompts: Sequence[str], folder: Path, fps: float) -> list[Path]:
    """One file a video, and a contact sheet of all of them, named by the number of its first video.

    Nothing is overwritten: the numbers go on from the highest one in `folder`.

    Args:
        videos: float `[F, 3, H, W]` in [0, 1] each.
        prompts: one for each video; further ones are ignored.
        folder: made if it does not exist.
        fps: frames per second.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = max(numbered(folder), default=-1) + 1
    paths = []
    for place, (video, prompt) in enumerate(zip(videos, prompts), start=first):
        paths.append(save_video(video, prompt, folder, place, fps))
    if videos:
        with aside(folder / f"contact-sheet-{first:02d}.png") as file:
            contact_sheet(videos, prompts[: len(videos)]).save(file, "PNG")
    return paths


def save_video(video: torch.Tensor, prompt: str, folder: Path, number: int, fps: float) -> Path:
    """An MP4 (see `video_suffix`) of float `[F, 3, H, W]` in [0, 1], named by number and prompt."""
    slug = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:60]
    path = folder / f"{number:02d}-{slug}{video_suffix()}"
    write_video(path, video, fps)
    return path


def run_facts(run: Path, facts: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """What `run.json` says of a run that starts, or goes on, at `iteration`.

    The id of the run, and date, commit and command of its first start stay; those of every later start are listed
    under `resumed`. All other facts are those of the newest start.
    """
    start = {key: facts[key] for key in ("date", "commit", "command")}
    file = run / "run.json"
    if not file.is_file():
        return {"run_id": secrets.token_hex(4), **facts}
    first = read_json(file)
    kept = {"run_id": secrets.token_hex(4)} | {key: first[key] for key in ("run_id", *start) if key in first}
    return {**facts, **kept, "resumed": [*first.get("resumed", []), {"iteration": iteration, **start}]}
