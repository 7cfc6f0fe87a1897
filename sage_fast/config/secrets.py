"""Secrets of rewards: files hold `${NAME}`, a reward gets the environment variable NAME, and no text shows its value.

Imports nothing heavy.
"""

from __future__ import annotations

import html
import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from sage_fast.util.errors import UserError

SHORTEST = 4
"""Shortest value of the environment that is masked in texts: any text holds shorter ones by chance."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_given: dict[str, str] = {}
"""Value, or how an answer may write it -> name of the variable that was read."""


def from_environment(value: Any, name: str) -> Any:
    """Replace each `${NAME}` in a value, at any depth, by the environment variable NAME.

    Args:
        name: of the value, for messages.

    Raises:
        UserError: there is no such variable.
    """
    if isinstance(value, Mapping):
        return {key: from_environment(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [from_environment(item, f"{name}.{place}") for place, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    for variable in _VARIABLE.findall(value):
        if variable not in os.environ:
            raise UserError(f"{name} = {value!r}: there is no environment variable {variable}")
    return _VARIABLE.sub(lambda found: secret(found[1]), value)


def secret(variable: str) -> str:
    """Read an environment variable whose value `names_for_values` then masks; return "" if it is not set."""
    bare = (value := os.environ.get(variable, "")).strip()
    data = bare.encode(errors="surrogateescape")
    quoted = repr(data)[2:-1], urllib.parse.quote(data), urllib.parse.quote(data, safe="")
    read = (bare, data.decode("latin-1"))
    written = (spell for text in read for spell in (text, json.dumps(text)[1:-1], repr(text)[1:-1], html.escape(text)))
    _given.update(dict.fromkeys((value, *quoted, *written), variable))
    return value


def names_for_values(text: str, *, whole: bool = False) -> str:
    """Put `${NAME}` back in place of the values of the environment in a text, such as the error of a reward.

    Letters may be of any case. Unless only `whole` values count, one may be cut off: `SHORTEST` letters at the end of
    the text, or twice as many at the end of a word.
    """
    for value in sorted((value for value in _given if len(value) >= SHORTEST), key=len, reverse=True):
        shown, done, end = "", 0, len(text)
        while end and not text[end - 1].isalnum():
            end -= 1
        for found in re.finditer(re.escape(value[:SHORTEST]), text, re.IGNORECASE):
            start = stop = found.start()
            while stop < len(text) and stop - start < len(value) and text[stop].lower() == value[stop - start].lower():
                stop += 1
            cut = stop >= end or (stop >= start + 2 * SHORTEST and not text[stop].isalnum())
            if start >= done and (stop == start + len(value) or (cut and not whole)):
                shown, done = f"{shown}{text[done:start]}${{{_given[value]}}}", stop
        text = shown + text[done:]
    return text


def masked(answer: Any) -> Any:
    """Apply `names_for_values` to every text of a JSON value from outside, names of fields included."""
    if isinstance(answer, dict):
        return {names_for_values(name, whole=True): masked(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [*map(masked, answer)]
    return names_for_values(answer) if isinstance(answer, str) else answer


def bare_address(address: str) -> str:
    """Return an address without user, query and fragment, which may hold secrets."""
    return re.sub(r"(?<=://)[^?#]*@|[?#].*", "", address)
