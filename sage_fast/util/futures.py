"""Run a function into a future, on a thread of ours that a call that hangs may keep."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def fulfil(future: Future[Result], function: Callable[..., Result], *arguments: Any) -> None:
    """Call a function and put its result or exception into `future`."""
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks a cycle through the error's frames, which would keep the videos alive
