"""Paths as people type them, with `~` and variables of the environment. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any, overload

from sage_fast.util.errors import UserError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


class TypedPath(str):
    """The type of an option that holds a path and that its command takes as text."""

    __slots__ = ()


class TypedFile(str):
    """The type of an option that holds a path and that its command takes as a Path, which would
    drop a `./`."""

    __slots__ = ()


def expanded(path: str) -> str:
    """Return a path with a `~` at its beginning and every `$NAME` and `${NAME}` replaced.

    An absolute path of something that is there stays: a run's own settings hold the whole paths of
    folders that may be called so.

    Raises:
        UserError: there is no such user or variable, a variable is empty, a part of the path would
            be called `~`, or it holds a character that none can.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not os.environ.get(name):
            problem = "is empty" if name in os.environ else "is not set"
            raise UserError(
                f"{path!r}: the environment variable {name} {problem}; set it, or write the path "
                "out"
            )
        return os.environ[name]

    if "\0" in path:
        raise UserError(f"{path!r}: no path holds the character of number 0")
    if os.path.isabs(path) and os.path.lexists(path):
        return path
    home = os.path.expanduser(path)
    if home.startswith("~"):
        user = path.partition("/")[0]
        raise UserError(
            f"{path!r}: there is no user {user[1:]!r}; write the path out, or ./{path} for such a "
            "name"
        )
    whole = _VARIABLE.sub(value, home)
    if "${" in whole:
        raise UserError(f"{path!r}: expected ${{NAME}}, the name of an environment variable")
    if "~" in whole.split("/"):
        raise UserError(
            f"{path!r}: would name a file or folder '~', which a shell takes for your home folder"
        )
    return whole


@overload
def as_path(path: str | os.PathLike[str]) -> Path: ...


@overload
def as_path(path: None) -> None: ...


def as_path(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the path that a call from Python names; a text is `expanded`, as on the command line.

    Raises:
        UserError: as `expanded`, or it is no path.
    """
    if path is None or isinstance(path, Path):
        return path
    if isinstance(path, str):
        return Path(expanded(path))
    try:
        return Path(path)
    except TypeError:
        raise UserError(f"{path!r}: expected a path") from None


def located(path: str, folder: Path) -> str:
    """Return `expanded` as an absolute path; a relative one is in `folder`."""
    return without_dots(folder / expanded(path))


def without_dots(path: Path) -> str:
    """Return an absolute path without `..`, unless a link makes that another place."""
    whole = str(path.absolute())
    short = os.path.normpath(whole)
    return short if os.path.realpath(short) == os.path.realpath(whole) else whole


def expand_options(options: argparse.Namespace) -> None:
    """Expand the paths among a command's parsed options: values, or lists of them, of `TypedPath`
    and `TypedFile`.

    Raises:
        UserError: as `expanded`.
    """
    for name, value in vars(options).items():
        setattr(options, name, _expanded_option(value))


def _expanded_option(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded_option(item) for item in value]
    if isinstance(value, TypedFile):
        return Path(expanded(value))
    return expanded(value) if isinstance(value, TypedPath) else value
