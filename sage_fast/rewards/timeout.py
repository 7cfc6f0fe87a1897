"""A call that is not waited for beyond a limit.

It runs in a thread, since nothing else ends the wait for code that swallows exceptions or never returns from C. The
thread cannot be ended and may hang on; it keeps no process from ending. Code that never gives back Python's lock cannot
be timed out by anything inside the process.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch


class OverdueError(Exception):
    """A call that has not returned in time."""


class ExitError(Exception):
    """A call that wanted to end the process, by `sys.exit` or as if Ctrl-C had been pressed."""


def call_within(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns or raises.

    Every call is made by the same thread, for what a reward keeps by thread, with the caller's CUDA device and stream
    and with gradients on or off as the caller has them.

    Args:
        seconds: longest wait; 0 calls in the caller's own thread and waits for ever.

    Raises:
        OverdueError: the call takes longer.
        ExitError: it raised SystemExit, or in the thread, where no signal comes, KeyboardInterrupt.
    """
    if not seconds:
        try:
            return function(*arguments)
        except SystemExit as error:
            raise ExitError(f"it raised {error!r}") from error
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    with_gradients = torch.is_grad_enabled()

    def call() -> Any:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(with_gradients), torch.cuda.stream(stream):
            return function(*arguments)

    future: Future[Any] = Future()
    _worker().calls.put((future, contextvars.copy_context(), call))
    wait([future], seconds)
    if not future.done():
        _workers.clear()  # the next call is another run's
        raise OverdueError(f"no answer within {seconds:g} s")
    return future.result()


class _Worker(threading.Thread):
    """Makes one call after the other."""

    def __init__(self) -> None:
        super().__init__(name="reward", daemon=True)
        self.calls: queue.SimpleQueue[tuple[Future[Any], contextvars.Context, Callable[[], Any]]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            future, context, call = self.calls.get()
            try:
                future.set_result(context.run(call))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(ExitError(f"it raised {error!r}"))
            del future, context, call  # an idle thread would keep the last videos


_workers: list[_Worker] = []


def _worker() -> _Worker:
    """That of this process: a fork takes no thread along."""
    if not _workers or not _workers[-1].is_alive():
        _workers[:] = [_Worker()]
    return _workers[-1]
