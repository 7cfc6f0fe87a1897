"""A reward call that failed, and the text of a failure, with the reward's own traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from sage_fast.config.secrets import names_for_values
from sage_fast.util import plugins

Result = TypeVar("Result")

FRAMES = 8
"""Maximum number of traceback frames shown, innermost last."""

_OURS = {
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("backends", "caller", "calls", "composite", "failure_policy", "failures", "inline", "process")
} | {plugins.__file__}
_PYTHONS = ("<frozen ", "importlib/__init__.py", "concurrent/futures/_base.py")


class RewardFailure(Exception):
    """A call without scores: the reward failed, or crashed, hung, could not start or was not reached.

    Args:
        text: as formatted by `failure`: one line that says what happened, then frames if there are any. It shows no
            value of a secret.
    """

    def __init__(self, text: str) -> None:
        super().__init__(names_for_values(text))


class SomeFailed(RewardFailure):
    """The reward failed on some videos of a call.

    Args:
        errors: video -> why it has no scores.
        parts: scores of all videos, NaN for those.
    """

    def __init__(self, errors: dict[int, str], parts: dict[str, Tensor]) -> None:
        super().__init__(next(iter(errors.values())))
        self.errors, self.parts = {i: names_for_values(text) for i, text in errors.items()}, parts


def failure(error: BaseException) -> str:
    """Format an error: file, line, type and message first; then the reward's own frames, as in a traceback."""
    if isinstance(error, RewardFailure):
        return str(error)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)][-FRAMES:]
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""  # none: such as a wrong number of arguments
    first, *rest = names_for_values(f"{where}{type(error).__name__}: {error}").strip().splitlines()
    return "\n".join([first, *"".join(traceback.format_list(own)).splitlines(), *rest])


def fulfil(future: Future[Result], function: Callable[..., Result], *arguments: Any) -> None:
    """Call a function and put its result or exception into `future`."""
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks a cycle through the error's frames, which would keep the videos alive


def _is_ours(file: str) -> bool:
    return file in _OURS or file.startswith(_PYTHONS[0]) or file.endswith(_PYTHONS[1:])
