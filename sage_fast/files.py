"""Reading and writing files: errors that name them, and permissions that let colleagues read what is written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sage_fast.errors import UserError

_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name `path` in an error of writing that names no file itself, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _OF_WRITING:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Around `torch.save` and safetensors: what they raise becomes an OSError, since all that can go wrong there is the
    writing, and what they leave at `path`, a file or a folder, can be read by colleagues.
    """
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        why = f"cannot be written, {free / 2**20:,.1f} MiB are free there: {str(error).splitlines()[0]}"
        raise OSError(errno.EIO, why, str(path)) from error
    _share(path)


def _share(path: Path) -> None:
    """Give a file, or all files below a folder, the permissions of any new file: 0644 under the usual umask.

    safetensors writes through a temporary file of mode 0600, which colleagues cannot read.
    """
    umask = os.umask(0)
    os.umask(umask)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """A result file, readable by a person; it appears whole, or stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout, or a pipe
        with writing(path):
            path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        UserError: it holds no JSON object, as after a write that was cut off.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`; none without a file. A last line cut off by a kill is dropped.

    Raises:
        UserError: a complete line is no JSON object with an integer `iteration`.
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
                f"{path}, line {number}: not a row of metrics: {line[:40]!r}: {error}; remove it to go on"
            ) from error
        rows.append(row)
    return rows
