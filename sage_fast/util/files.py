"""Read and write files: errors name the file, writes are atomic, and colleagues may read what is written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from sage_fast.util.errors import UserError, first_line

PARTIAL = ".partial"
"""Suffix of a file or folder that is being written. If a kill leaves one behind, it may be removed."""

VIDEOS = "videos.csv"
"""File that marks a folder of videos to score and compare; see `sage_fast.eval.videoset`."""

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Add `path` to a write error that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _WRITE_ERRORS:
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
        free = shutil.disk_usage(file.parent).free
        why = f"cannot be written, {free / 2**20:,.1f} MiB are free there: {first_line(error)}"
        raise OSError(errno.EIO, why, str(file)) from error
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


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
        if path.is_dir():  # rename does not replace a folder
            remove_folder(path)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        if error.filename is None or str(error.filename) == str(partial):
            error.filename = str(path)
        raise
    finally:
        remove(partial)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically through `atomic_path`; text is encoded as UTF-8."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        # A path may hold bytes that are no UTF-8, which Python keeps as lone surrogates: they are written as escapes.
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def why_no_file(path: str | Path) -> str:
    """Return in words what is at a path where a file was expected: nothing, a folder, a link to nothing or a pipe."""
    if os.path.isdir(path):
        return "a folder, not a file"
    if os.path.exists(path):
        return "no regular file"
    return "a link to nothing" if os.path.islink(path) else "no such file"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder; a missing path is a no-op."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then remove it: a kill leaves no half of it under its name. The target of a link stays."""
    old = folder.with_name(f"{folder.name}.old{PARTIAL}")
    remove(old)
    folder.replace(old)
    remove(old)


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """Write an indented JSON file atomically; write to a pipe or device such as /dev/stdout directly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout, or a pipe
        with writing(path):
            path.write_text(text, encoding="utf-8")
    else:
        write_atomic(path, text)


def check_new_folder(folder: Path, option: str = "--folder") -> None:
    """Check that a folder of an option is new or empty.

    Raises:
        UserError: it is a file, or holds files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{option} {str(folder)!r}: expected a new or an empty folder; nothing was changed")


def make_folder_of(file: Path | None, option: str = "--json") -> None:
    """Create the parent folder of the file of an option. A path that cannot be written fails here, before the work.

    Raises:
        UserError: `file` is a folder.
    """
    if file is not None:
        if file.is_dir():
            raise UserError(f"{option} {str(file)!r}: a folder; expected a file")
        file.parent.mkdir(parents=True, exist_ok=True)


def fingerprint(content: bytes, *paths: str | Path) -> str:
    """Return the first digits of the SHA-256 of `content` and of the files at `paths`, or in them."""
    found = hashlib.sha256(content)
    for path in map(Path, paths):
        for file in [path, *sorted(path.rglob("*"))]:
            if file.is_file():
                with file.open("rb") as opened:
                    found.update(hashlib.file_digest(opened, "sha256").digest())
    return f"SHA-256 {found.hexdigest()[:12]}"


def append_line(file: BinaryIO, line: str) -> None:
    """Append a line in one write; if the disk is full, truncate the partial line.

    Args:
        file: opened for appending, unbuffered.
        line: without the newline.
    """
    content, size = line.encode() + b"\n", os.fstat(file.fileno()).st_size
    with writing(file.name):
        try:
            written = file.write(content)
            if written < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def json_value(value: Any) -> Any:
    """Return a value for JSON: None instead of a float that is not finite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_text(path: Path) -> str:
    """Read a text file of any program, in UTF-8; a byte-order mark, which Windows' editors write, is no part of it.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
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
    """Read the rows of a `metrics.jsonl`; [] if there is no file. An incomplete last line, as after a kill, is dropped.

    Raises:
        UserError: a complete line is not a JSON object with an integer `iteration`.
    """
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
                f"{path}, line {number}: not a row of metrics: {line[:40]!r}: {error}; put a copy of the file there"
            ) from error
        rows.append(row)
    return rows
