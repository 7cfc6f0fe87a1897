"""The two ways in which a call of a reward fails, and how a failure reads: with the reward's own traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

FRAMES = 8
"""Number of frames shown of a traceback, the innermost ones."""

_OURS = {
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("composite", "errors", "failure_policy", "inline", "load", "process", "source")
}
_PYTHONS = ("<frozen ", "importlib/__init__.py", "concurrent/futures/_base.py")


class RewardFailure(Exception):
    """The reward itself failed.

    Args:
        text: as `failure` makes it: one line that says what happened, then frames if there are any.
    """


class TransportFailure(RewardFailure):
    """No answer from the reward: it crashed, hung, could not start or was not reached."""


def failure(error: BaseException) -> str:
    """File, line, type and message in the first line; then the reward's own frames, as a traceback shows them."""
    if isinstance(error, RewardFailure):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = list(traceback.extract_tb(error.__traceback__))
    own = frames[next((i for i, frame in enumerate(frames) if not _is_ours(frame.filename)), len(frames)) :]
    what = f"{type(error).__name__}: {error}".strip().splitlines()
    if not own:  # raised by our call itself, such as one with too few arguments
        return what[0]
    first = f"{own[-1].filename}:{own[-1].lineno}: {what[0]}"
    return "\n".join([first, *"".join(traceback.format_list(own[-FRAMES:])).splitlines(), *what[1:]])


def fulfil(future: Future[Result], function: Callable[..., Result], *arguments: Any) -> None:
    """Call a function, and keep what it returns or raises."""
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
        del future  # a cycle through the error's frames would keep the videos


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def _is_ours(file: str) -> bool:
    return file in _OURS or file.startswith(_PYTHONS[0]) or file.endswith(_PYTHONS[1:])
