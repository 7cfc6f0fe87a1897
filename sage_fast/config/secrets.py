"""Secrets in the arguments of rewards: files hold `${NAME}`, a reward gets the environment variable NAME.

Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_plus

from sage_fast.util.errors import UserError

SHORTEST = 4
"""Shortest value of the environment that is looked for in texts: any text holds shorter ones by chance."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_WORD = (
    r"(?:^|[-_ .?&]|(?=[A-Z]))"
    r"(?i:token|bearer|authorization|passwd|passphrase|pwd|(?:(?:api)?key|secret|password|credential)s?"
    r"|(?:access|api|auth|bearer|hf|hub|refresh|session)[-_ ]?tokens)"
)
"""Last word of a name for secrets: `api_key`, `apiKey` and `access_tokens`, but not `num_tokens`, which is a count."""
_SECRET = re.compile(rf"{_WORD}(?:\.|$)")
_ADDRESS = re.compile(
    rf"://(?:(?![^/\s@]*{_VARIABLE.pattern})[^/\s@]+@"
    rf"|\S*[?&][^=&\s]*(?:{_WORD}|(?i:\bsig|signature))=(?![^&\s]*{_VARIABLE.pattern}))"
)
"""An address with a user, or with a secret or a signature in its query, and no variable there."""
_given: dict[str, str] = {}
"""Value -> name of the variables that `from_environment` has read."""


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
        _given[os.environ[variable]] = variable
    return _VARIABLE.sub(lambda found: os.environ[found[1]], value)


def names_for_values(text: str) -> str:
    """Put `${NAME}` back in place of the values of the environment in a text, such as the error of a reward."""
    for value in sorted(_given, key=len, reverse=True):
        for form in _forms(value) if len(value) >= SHORTEST else ():
            text = text.replace(form, f"${{{_given[value]}}}")
    return text


def _forms(value: str) -> list[str]:
    """Return a value as it is, as in a Python literal, JSON, an address, and in base64 after any other text."""
    raw = os.fsencode(value)
    coded = [b64encode(bytes(k) + raw).decode()[(8 * k + 5) // 6 : 8 * (k + len(raw)) // 6] for k in range(3)]
    return [value, repr(value)[1:-1], json.dumps(value)[1:-1], quote_plus(value), *coded]


def bare_address(address: str) -> str:
    """Return an address without user, query and fragment, which may hold secrets."""
    return re.sub(r"(?<=://)[^?#]*@|[?#].*", "", address)


def refuse_secrets(value: Any, name: str) -> None:
    """Check that no secret is written out in a value, at any depth, since settings are kept and shown.

    Raises:
        UserError: an entry is named like a secret, or an address holds one; does not repeat the value.
    """
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            refuse_secrets(item, f"{name}.{key}")
        return
    written = value and not isinstance(value, bool) and not _VARIABLE.search(str(value))
    if (written and _SECRET.search(name)) or _ADDRESS.search(str(value)):
        raise UserError(
            f"{name}: the run folder would keep a secret; write '${{NAME}}' and set the environment variable NAME"
        )
