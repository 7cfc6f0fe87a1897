"""Find the row of a choice: in a table of the package, or in a module of the user's.

A choice such as `sampling.sampler` is a name of its table, or `package.module:name` of an object
like those that the table holds. Every table is read through `find_row`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sage_fast.rewards.failure_policy import failure
from sage_fast.util.errors import OWN_PLACE, UserError, first_line, nearest
from sage_fast.util.guard import guarded
from sage_fast.util.plugins import import_plugin, split_place

RowT = TypeVar("RowT")


def find_row(
    name: str, setting: str, table: Mapping[str, RowT], checked: Callable[[Any], RowT]
) -> RowT:
    """Return the row of a choice.

    Args:
        name: key of `table`, or `package.module:name`.
        setting: setting that holds the name, for messages.
        table: the choices that come with the package.
        checked: returns the row that a user's object stands for, or raises ValueError that says
            what was expected of it.

    Raises:
        UserError: there is no such choice, or the user's module fails or holds something else.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise UserError(f"{setting} = {name!r}: {nearest(name, table, OWN_PLACE)}")
    where = f"{setting} = {name!r}"
    found = _imported(name, where)
    try:
        with guarded(where):
            return checked(found)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def of_table(table: Mapping[str, RowT], name: str, argument: str) -> RowT:
    """Return the row of a name that only the package's own table can hold.

    Args:
        argument: argument or setting that holds the name, for messages.

    Raises:
        UserError: there is no such name.
    """
    if name not in table:
        raise UserError(f"{argument} = {name!r}: {nearest(str(name), table)}")
    return table[name]


@functools.cache
def _imported(place: str, setting: str) -> Any:
    """Import what a place names.

    Raises:
        UserError: there is no such module or name in it, or the module fails.
    """
    try:
        with guarded(setting):
            found = import_plugin(place, setting)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{setting}: {first_line(failure(error))}") from error
    if found is None:
        _, module, name = split_place(place)
        public = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
        raise UserError(f"{setting}: module {module} has no {name!r}; {nearest(name, public)}")
    return found


def called(function: Callable[..., Any], *arguments: Any, form: str) -> Any:
    """Call a user's function.

    Args:
        form: what it takes and returns, for the message.

    Raises:
        ValueError: it failed; says where and why in one line, and what was expected.
    """
    try:
        return function(*arguments)
    except Exception as error:
        raise ValueError(f"{first_line(failure(error))}; expected {form}") from error
