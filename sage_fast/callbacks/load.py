"""Make the callbacks that the settings name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from sage_fast.algorithm.rows import find_row
from sage_fast.callbacks.dispatch import check_hooks
from sage_fast.callbacks.interface import Callback
from sage_fast.config.schema import CallbackEntry, Config
from sage_fast.config.secrets import from_environment, names_for_values
from sage_fast.rewards.failure_policy import failure
from sage_fast.util.errors import UserError, nearest

EXPECTED = "expected a class that derives from sage_fast.Callback, or an object of one"


def load_callbacks(config: Config) -> list[Callback]:
    """Import and make the callbacks of the setting `callbacks`.

    Raises:
        UserError: one is not there, fails, is no callback or takes other arguments.
    """
    return [_load(key, entry) for key, entry in config.keyed_callbacks.items()]


def check_callbacks(config: Config) -> None:
    """Check the callbacks of the setting `callbacks` without making them.

    Raises:
        UserError: one is not there, is no callback or takes other arguments.
    """
    for key, entry in config.keyed_callbacks.items():
        _find(key, entry)


def _find(key: str, entry: CallbackEntry) -> Any:
    """Return the class, or the object, that an entry names, checked with the entry's arguments."""
    where = f"{key} = {entry.name!r}"
    found: Any = find_row(entry.name, key, {}, _checked)
    if isinstance(found, type):
        _check_args(found, entry.args, where)
    elif entry.args:
        raise UserError(f"{where}: is not a class, so it takes no args; got {sorted(entry.args)}")
    check_hooks(found, where)
    return found


def _load(key: str, entry: CallbackEntry) -> Callback:
    found = _find(key, entry)
    if not isinstance(found, type):
        return found
    where = f"{key} = {entry.name!r}"
    args = from_environment(entry.args, f"{where}: args")
    try:
        return found(**args)
    except Exception as error:
        told = names_for_values(failure(error))
        raise UserError(f"{where}: {found.__name__}() failed: {told}") from error


def _checked(found: Any) -> Any:
    """Return a class of callbacks, or a callback.

    Raises:
        ValueError: it is neither.
    """
    is_class = isinstance(found, type) and issubclass(found, Callback)
    if not is_class and not isinstance(found, Callback):
        raise ValueError(EXPECTED)
    return found


def _check_args(kind: type, args: Mapping[str, Any], where: str) -> None:
    signature = inspect.signature(kind)
    try:
        signature.bind(**args)
    except TypeError as error:
        taken = list(signature.parameters)
        unknown = sorted(args.keys() - set(taken))
        if unknown and not taken:
            raise UserError(f"{where}: args: {kind.__name__} takes no arguments") from error
        if unknown:
            raise UserError(
                f"{where}: args: no {unknown[0]!r}; {nearest(unknown[0], taken)}"
            ) from error
        raise UserError(
            f"{where}: args: {error}; {kind.__name__} takes {', '.join(taken)}"
        ) from error
