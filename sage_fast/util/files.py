"""Read and write files: errors name the file, writes are atomic, and colleagues may read what is
written.

All calls on files that not every file system has go through this module. Most are needed: their
error is raised, and `probe` finds it before any work. Those that only add safety are the rows of
`ONLY_SAFER`: where a file system does not have one, a note says so once, and the run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError, first_line

log = logging.getLogger(__name__)

PARTIAL = ".partial"
"""Suffix of a file or folder that is being written.

If a kill leaves one behind, it may be removed.
"""

VIDEOS = "videos.csv"
"""File that marks a folder of videos to score and compare; see `sage_fast.eval.videoset`."""
HANGS = "hangs"
"""Folder of what the ranks were doing when one failed; see `sage_fast.run.hang_dump`."""

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk that is full, read-only or broken, or of a quota."""


# -- calls that only add safety --------------------------------------------------------------------


class SafetyCall(NamedTuple):
    """A kind of system call without which nothing that is written is wrong.

    Attributes:
        doing: what the call does, for the note.
        lost: what the run does without.
        errnos: errors by which a file system says that it does not have the call; any other is
            raised. None: every error, since the run needs nothing of the call.
    """

    doing: str
    lost: str
    errnos: frozenset[int] | None


_ABSENT = frozenset(
    {
        errno.EINVAL,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.ENOTTY,
        errno.EBADF,
        errno.EPERM,
        errno.EACCES,
    }
)
"""How network, object-store and FUSE file systems say that they do not have a call, or do not allow
it.

A failed disk (EIO), a full one (ENOSPC), a used-up quota (EDQUOT) and a server that is gone
(ESTALE, ETIMEDOUT, ENOTCONN) are not among them: what such a flush was for may be lost.
"""

ONLY_SAFER = {
    "flush": SafetyCall(
        "flush a file to the disk", "a loss of power may damage the files written last", _ABSENT
    ),
    "flush_folder": SafetyCall(
        "flush a folder to the disk",
        "a loss of power may undo the last renames",
        _ABSENT | {errno.EISDIR},  # from file systems that cannot open a folder
    ),
    "permissions": SafetyCall(
        "set permissions", "colleagues may be unable to read the weights", None
    ),
    "lock": SafetyCall("lock a file", "make sure that only one process uses it", None),
    "unlock": SafetyCall("unlock a file", "its lock ends with the process", None),
    "claim": SafetyCall("read run.lock", "make sure that only one run uses the folder", None),
    "remove": SafetyCall("remove what is no longer needed", "it takes space", None),
    "free_space": SafetyCall("ask for the free space", "an error does not name it", None),
}
"""Kind of call -> what a run does without it."""

_noted = set[str]()
"""Kinds of calls that a note has named in this process."""


@contextlib.contextmanager
def only_safer(kind: str, path: str | Path) -> Iterator[None]:
    """Run a call of a kind in `ONLY_SAFER`; where the file system does not have it, say so once and
    go on.

    Raises:
        OSError: the call fails for another reason; the error names `path`.
    """
    call = ONLY_SAFER[kind]
    try:
        yield
    except OSError as error:
        if call.errnos is not None and error.errno not in call.errnos:
            error.filename = error.filename or str(path)
            raise
        if kind not in _noted:
            _noted.add(kind)
            why = error.strerror or first_line(error)
            log.info(
                wrapped(
                    f"note: the file system cannot {call.doing} ({why}): {call.lost}; first for "
                    f"{path}"
                )
            )


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    kind = "flush_folder" if path.is_dir() else "flush"
    with only_safer(kind, path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_opened(file: BinaryIO) -> None:
    """Flush a file that is opened for writing to disk (fsync)."""
    with only_safer("flush", file.name):
        os.fsync(file.fileno())


def set_default_permissions(file: Path) -> None:
    """Give a file the permissions that a new one has: 0644 under the usual umask."""
    umask = os.umask(0)
    os.umask(umask)
    with only_safer("permissions", file):
        file.chmod(0o666 & ~umask)


def discard(path: Path) -> None:
    """Remove what nobody needs any more. A file that a network file system keeps busy stays."""
    if os.path.lexists(path):
        with only_safer("remove", path):
            remove(path)


class FolderLock:
    """A lock on a file (flock), which the kernel releases if the process dies. The file stays.

    It acts where the file system has locks: possibly within one host only, or not at all.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = FileLock(file, timeout=0, fallback_to_soft=False)

    def acquire(self) -> bool:
        """Return False if another process holds the lock.

        Raises:
            OSError: the file cannot be made.
        """
        # needed, as opposed to the lock
        os.close(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666))
        with only_safer("lock", self._file):
            try:
                self._lock.acquire()
            except Timeout:
                return False
        return True

    def release(self) -> None:
        with only_safer("unlock", self._file):
            self._lock.release()


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in such a block on `file`; its content
    stays."""
    with contextlib.ExitStack() as held:
        with only_safer("lock", file):
            opened = held.enter_context(file.open("ab"))
            fcntl.flock(opened, fcntl.LOCK_EX)
            held.callback(_unlock, opened.fileno(), file)
        yield


def _unlock(descriptor: int, file: Path) -> None:
    """Unlock a file: closing it is not enough, since a forked child has it open too."""
    with only_safer("unlock", file):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


# -- writing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Add `path` to a write error that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in WRITE_ERRORS:
            error.filename = str(path)
        raise


def save_tensors(file: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with the default permissions: 0644 under the usual umask.

    safetensors itself writes through a temporary file with mode 0600, which colleagues cannot read.

    Raises:
        OSError: it cannot be written; safetensors has an error of its own.
    """
    from safetensors.torch import save_file  # imports PyTorch

    try:
        save_file(dict(tensors), file, dict(metadata))
    except SafetensorError as error:
        free = ""
        with only_safer("free_space", file.parent):
            free = f", {shutil.disk_usage(file.parent).free / 2**20:,.1f} MiB are free there"
        raise OSError(
            errno.EIO, f"cannot be written{free}: {first_line(error)}", str(file)
        ) from error
    set_default_permissions(file)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder; on exit fsync it and rename it to `path`.

    A kill, a full disk or a loss of power never leaves a part of it at `path`.

    Args:
        path: regular file or folder, replaced if it exists; its parent folder exists.

    Raises:
        OSError: names `path`, whose content is unchanged.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        for written in [*partial.rglob("*"), partial]:
            sync(written)
        put_in_place(partial, path)
    except OSError as error:
        if error.filename is None or str(error.filename) == str(partial):
            error.filename = str(path)
        raise
    finally:
        discard(partial)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically through `atomic_path`; text is encoded as UTF-8."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        # A path may hold bytes that are no UTF-8, which Python keeps as lone surrogates: they are
        # written as escapes.
        file.write(
            content.encode(errors="backslashreplace") if isinstance(content, str) else content
        )


def why_no_file(path: str | Path) -> str:
    """Return in words what is at a path where a file was expected: nothing, a folder, a link to
    nothing or a pipe."""
    if os.path.isdir(path):
        return "a folder, not a file"
    if os.path.exists(path):
        return "no regular file"
    return "a link to nothing" if os.path.islink(path) else "no such file"


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder; a missing path is a no-op."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a folder into a new one, without their permissions and times, which not
    every disk can set."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        copied = target / path.relative_to(source)
        if path.is_dir():
            copied.mkdir()
        else:
            shutil.copyfile(path, copied)


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder; a file at `target` is replaced.

    A network file system may have renamed it although the call fails, if the answer was lost and it
    asked again.
    """
    inode = source.lstat().st_ino
    try:
        source.replace(target)
    except FileNotFoundError:
        if not target.exists() or target.lstat().st_ino != inode:
            raise


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a file or a folder to its final name.

    A folder that is there is replaced, or stays if that fails.
    """
    aside = set_aside(path) if path.is_dir() else None  # rename does not replace a folder
    try:
        rename(partial, path)
    except OSError:
        if aside is not None:
            rename(aside, path)
        raise
    sync(path.parent)
    if aside is not None:
        discard(aside)


def set_aside(folder: Path) -> Path:
    """Rename a folder to a name with `PARTIAL`, and return it.

    Of a link, the target keeps its name.
    """
    for number in itertools.count():
        aside = folder.with_name(f"{folder.name}.old{number or ''}{PARTIAL}")
        discard(aside)
        if not os.path.lexists(aside):  # it may be busy on a network file system
            break
    rename(folder, aside)
    return aside


def remove_folder(folder: Path) -> None:
    """Rename a folder, then remove it: a kill leaves no half of it under its name.

    The target of a link stays.
    """
    discard(set_aside(folder))


def take_away(path: Path) -> None:
    """Remove a file or a folder, if it is there, so that nothing reads it: it has another name even
    if it stays."""
    if os.path.lexists(path):
        discard(set_aside(path))


def probe(folder: Path) -> None:
    """Make every call on files that a run needs of a file system once, in a folder that exists.
    Nothing is left.

    Raises:
        OSError: a call failed; the error names the folder and what a run cannot do there.
    """
    scratch = folder / f"probe-{secrets.token_hex(4)}{PARTIAL}"
    file, inner, final = scratch / "file", scratch / "new", scratch / "folder"
    tensors = inner / "weights.safetensors"
    try:
        with _needed("make a folder", folder):
            scratch.mkdir()
        with _needed("write a file", folder), file.open("wb") as opened:
            opened.write(b"\0" * 2**16)
            opened.flush()
            sync_opened(opened)
        with _needed("append to a file", folder), file.open("ab", buffering=0) as opened:
            append_line(opened, "")
        with _needed("replace a file by renaming another", folder):
            write_atomic(file, "second")
        for _ in range(2):  # the second one replaces the first
            with _needed("write weights and read them", folder):
                inner.mkdir()
                _write_and_read(tensors)
            with _needed("rename a folder", folder):
                put_in_place(inner, final)
    finally:
        discard(scratch)


def _write_and_read(file: Path) -> None:
    import torch

    save_tensors(file, {"probe": torch.zeros(1)}, {})
    sync(file)
    try:
        with safe_open(file, "pt") as opened:
            opened.get_tensor("probe")
    except SafetensorError as error:  # a file system whose files cannot be mapped into memory
        raise OSError(errno.EIO, f"cannot be read: {first_line(error)}", str(file)) from error


@contextlib.contextmanager
def _needed(doing: str, folder: Path) -> Iterator[None]:
    """Say in an error of a probe what cannot be done in which folder."""
    try:
        yield
    except OSError as error:
        why = (
            f"{error.strerror or first_line(error)}: a run cannot {doing} there; nothing was "
            "changed"
        )
        raise OSError(error.errno, why, str(folder)) from error


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """Write an indented JSON file atomically; write to a pipe or device such as /dev/stdout
    directly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout, or a pipe
        with writing(path):
            path.write_text(text, encoding="utf-8")
    else:
        write_atomic(path, text)


def check_new_folder(folder: Path, option: str = "--folder") -> None:
    """Check that a folder of an option is new or empty. The dumps of a start that failed may stay.

    Raises:
        UserError: it is a file, or holds files.
    """
    if folder.exists() and (
        not folder.is_dir() or any(path.name != HANGS for path in folder.iterdir())
    ):
        raise UserError(
            f"{option} {str(folder)!r}: expected a new or an empty folder; nothing was changed"
        )


def make_folder_of(file: Path | None, option: str = "--json") -> None:
    """Create the parent folder of the file of an option. A path that cannot be written fails here,
    before the work.

    Raises:
        UserError: `file` is a folder.
    """
    if file is not None:
        if file.is_dir():
            raise UserError(f"{option} {str(file)!r}: a folder; expected a file")
        file.parent.mkdir(parents=True, exist_ok=True)


def fingerprint(content: bytes, *paths: str | Path) -> str:
    """Return the first digits of the SHA-256 of `content` and of the files at `paths`, or in
    them."""
    found = hashlib.sha256(content)
    for path in map(Path, paths):
        for file in [path, *sorted(path.rglob("*"))]:
            if file.is_file():
                with file.open("rb") as opened:
                    found.update(hashlib.file_digest(opened, "sha256").digest())
    return f"SHA-256 {found.hexdigest()[:12]}"


def cut_off(file: BinaryIO, size: int) -> None:
    """Cut off what a file, opened for writing and unbuffered, holds beyond a number of bytes."""
    with writing(file.name):
        file.truncate(size)


def append_line(file: BinaryIO, line: str) -> None:
    """Append a line in one write; if the disk is full, truncate the partial line.

    Args:
        file: opened for appending, unbuffered.
        line: without the newline.

    Raises:
        OSError: the file is as it was, or if it cannot be truncated either, ends with a part of the
            line.
    """
    content = line.encode() + b"\n"
    size = os.fstat(file.fileno()).st_size
    with writing(file.name):
        try:
            written = file.write(content)
            if written < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                file.truncate(size)
            raise


def json_value(value: Any) -> Any:
    """Return a value for JSON: None instead of a float that is not finite, which JSON cannot
    hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Add `path` to a read error that names no file, such as that of a failed disk or a server that
    is gone."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_text(path: Path) -> str:
    """Read a text file of any program, in UTF-8; a byte-order mark, which Windows' editors write,
    is no part of it.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        OSError: it cannot be read; the error names it.
    """
    with reading(path):
        return path.read_text(encoding="utf-8-sig")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file holds no JSON object, as after an interrupted write.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: no regular file")  # a pipe would block
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`; [] if there is no file. An incomplete last line, as after
    a kill, is dropped.

    Raises:
        UserError: a complete line is not a JSON object with an integer `iteration`.
    """
    with reading(path):
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
            iteration = row.get("iteration") if isinstance(row, dict) else None
            if not isinstance(iteration, int) or not 0 <= iteration < 2**53:
                raise UserError("expected an object with an integer 'iteration' from 0")
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: not a row of metrics: {line[:40]!r}: {error}; put a copy "
                "of the file there"
            ) from error
        rows.append(row)
    return rows
