"""The errors that are raised on purpose: the command shows them in one line, and everything else with its traceback.

Imports nothing heavy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something that a user gave is wrong: a setting, a file, an option. Exit status 2."""


class RunError(RuntimeError):
    """A run cannot go on although its settings are valid. Exit status 1."""


class NonFiniteError(RunError):
    """A loss or gradient that is not finite; nothing was updated with it."""


class ParityError(RunError):
    """Training does not reproduce the log-probs of the rollout."""


class RewardError(RunError):
    """A reward that failed, or that is not finite."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """`expected one of a, b, c; did you mean 'b'?`, the question only if something is close."""
    choices = list(choices)
    close = difflib.get_close_matches(str(value), choices, n=1)
    question = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(choices)}{question}"


def reason(error: OSError) -> str:
    """`'path': No space left on device`, as far as the error knows them."""
    if error.strerror is None:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return error.strerror if error.filename is None else f"{str(error.filename)!r}: {error.strerror}"
