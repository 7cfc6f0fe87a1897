"""Secrets of rewards: files hold `${NAME}`, a reward gets the environment variable NAME, and no
text shows its value.

Imports nothing heavy.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from sage_fast.util.errors import UserError

SHORTEST = 4
"""Shortest value of the environment that is masked in texts: any text holds shorter ones by chance.
"""
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
    lacking = [variable for variable in _VARIABLE.findall(value) if variable not in os.environ]
    if lacking:
        raise UserError(f"{name} = {value!r}: there is no environment variable {lacking[0]}")
    return _VARIABLE.sub(lambda found: secret(found[1]), value)


def secret(variable: str) -> str:
    """Read an environment variable whose value `names_for_values` then masks; return "" if it is
    not set."""
    value = os.environ.get(variable, "")
    bare = value.strip()
    data = bare.encode(errors="surrogateescape")
    as_written = [
        value,
        bare,
        json.dumps(bare)[1:-1],
        repr(bare)[1:-1],
        repr(data)[2:-1],
        data.decode("latin-1"),
        html.escape(bare),
        urllib.parse.quote(data),
        urllib.parse.quote(data, safe=""),
    ]
    for text in as_written:
        _given[text] = variable
    return value


def names_for_values(text: str) -> str:
    """Put `${NAME}` back in place of the values of the environment in a text, such as the error of
    a reward.

    Letters may be of any case. At the end of a text, where an answer may be cut, `2 * SHORTEST` of
    them are enough.
    """
    masked = [value for value in _given if len(value) >= SHORTEST]
    # the longest first: one may hold another
    for value in sorted(masked, key=len, reverse=True):
        text = _pattern(value).sub(f"${{{_given[value]}}}", text)
    return text


@functools.cache
def _pattern(value: str) -> re.Pattern[str]:
    """Return the pattern of a value, or of its beginning at the end of a text."""
    lengths = range(len(value) - 1, 2 * SHORTEST - 1, -1)
    cuts = [re.escape(value[:length]) + "$" for length in lengths]
    return re.compile("|".join([re.escape(value), *cuts]), flags=re.IGNORECASE)


def bare_address(address: str) -> str:
    """Return an address without user, query and fragment, which may hold secrets."""
    return re.sub(r"(?<=://)[^?#]*@|[?#].*", "", address)
