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


def names_for_values(text: str, *, is_name: bool = False) -> str:
    """Put `${NAME}` back in place of the values of the environment in a text, such as the error of a reward.

    Letters may be of any case. A value may be cut off: twice `SHORTEST` letters at the end of a word, or `SHORTEST` at
    the end of a text that is not the name of a field.
    """
    values = [value for value in _given if len(value) >= SHORTEST]
    heads = "|".join({re.escape(value[:SHORTEST]) for value in values}) or "$."
    shown, done, end = "", 0, len(re.match(r".*\w|", text, re.DOTALL)[0])  # type: ignore[index]
    for start in (found.start() for found in re.finditer(f"(?={heads})", text, re.IGNORECASE)):
        best = start, ""
        for value in values:
            pair = [text[start : start + len(value)].lower(), value.lower()]
            stop = start + len(os.path.commonprefix(pair))  # noqa: RUF071
            enough = start + SHORTEST * (1 if stop >= end and not is_name else 2)
            if stop >= start + len(value) or (stop >= enough and not text[stop : stop + 1].isalnum()):
                best = max(best, (stop, value))
        if start >= done and best[1]:
            shown, done = f"{shown}{text[done:start]}${{{_given[best[1]]}}}", best[0]
    return shown + text[done:]


def masked(answer: Any) -> Any:
    """Apply `names_for_values` to every text of a JSON value from outside, names of fields included."""
    if isinstance(answer, dict):
        return {names_for_values(name, is_name=True): masked(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [*map(masked, answer)]
    return names_for_values(answer) if isinstance(answer, str) else answer


def bare_address(address: str) -> str:
    """Return an address without user, query and fragment, which may hold secrets."""
    return re.sub(r"(?<=://)[^?#]*@|[?#].*", "", address)
