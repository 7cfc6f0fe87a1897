"""Tell what is not there from what cannot be read: `Path.exists`, `Path.is_file` and `Path.glob` do
not.

A folder whose disk is gone, whose rights were lost on one machine, or which is a link to nothing
looks empty to them. What takes an empty folder for a new one asks here. Imports nothing heavy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from sage_fast.util.errors import UserError


def entries(folder: Path) -> list[Path]:
    """Return what a folder holds, by name; nothing if there is no folder.

    Raises:
        UserError: the folder cannot be read, is a link to nothing, or is no folder.
    """
    try:
        with os.scandir(folder) as found:
            return sorted(folder / entry.name for entry in found)
    except OSError as error:
        if _is_missing(folder, error):
            return []
        raise _unreadable(folder, error) from error


def holds_file(path: Path) -> bool:
    """Return whether there is a regular file; False if nothing is there, or something else.

    Raises:
        UserError: the file cannot be read, or is a link to nothing.
    """
    return _is(stat.S_ISREG, path)


def holds_folder(path: Path) -> bool:
    """Return whether there is a folder; False if nothing is there, or something else.

    Raises:
        UserError: the folder cannot be read, or is a link to nothing.
    """
    return _is(stat.S_ISDIR, path)


def check_readable(folder: Path) -> None:
    """Check that every file in a folder can be opened.

    Raises:
        UserError: a file, or a folder in it, cannot be read.
    """
    for path in entries(folder):
        if holds_folder(path):
            check_readable(path)
        elif holds_file(path):
            try:
                path.open("rb").close()
            except OSError as error:
                raise _unreadable(path, error) from error


def leads_nowhere(path: Path) -> bool:
    """Return whether a path is a link to nothing."""
    return path.is_symlink() and not os.path.lexists(os.path.realpath(path))


def _is_missing(path: Path, error: OSError) -> bool:
    """Return whether an error says that nothing is at a path, not even a link; below a file,
    nothing is."""
    return isinstance(error, FileNotFoundError | NotADirectoryError) and not os.path.lexists(path)


def _is(has_kind: Callable[[int], bool], path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if _is_missing(path, error):
            return False
        raise _unreadable(path, error) from error
    return has_kind(mode)


def _unreadable(path: Path, error: OSError) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(
            f"{str(path)!r} is a link to nothing: {os.readlink(path)!r}; put back what it leads to"
        )
    return UserError(f"{str(path)!r} cannot be read: {error.strerror}")
