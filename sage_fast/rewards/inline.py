"""Reward backend in this process."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
from torch import Tensor

from sage_fast.rewards.errors import RewardFailure, failure, fulfil
from sage_fast.rewards.interface import Metadata
from sage_fast.rewards.load import called
from sage_fast.util.errors import RewardError


class InProcess:
    """Calls a reward on a separate thread, so that the wait can end at the time limit.

    Nothing else ends the wait for code that swallows exceptions or never returns from C. The thread itself cannot be
    killed. Without a limit, the reward runs on the caller's thread.

    Args:
        name: name of the reward, for messages.
        device: device the videos are moved to; None: none.
    """

    in_background, patience = False, 0.0
    _thread: ClassVar[threading.Thread | None] = None
    _calls: ClassVar[queue.SimpleQueue[Any]]

    def __init__(self, name: str, reward: Any, device: str | None = None) -> None:
        self.name, self.reward, self.device = name, reward, device

    def score(
        self, videos: Tensor, prompts: list[str], metadata: list[Metadata], seconds: float, name: str
    ) -> dict[str, Tensor]:
        gpu = torch.cuda.is_available()
        device, stream = (torch.cuda.current_device(), torch.cuda.current_stream()) if gpu else (-1, None)

        def call() -> dict[str, Tensor]:
            with torch.cuda.device(device), torch.cuda.stream(stream):  # restores both if the reward changes them
                given = videos if self.device is None else videos.to(self.device)
                version = given._version
                parts = called(self.reward, given, prompts, metadata)
            if given._version != version:
                raise RewardFailure("changes the videos in place; it has to work on a copy, videos.clone()")
            return parts

        try:
            return self._within(seconds, call, prompts) if seconds else call()
        except RewardError:
            raise
        except (Exception, SystemExit) as error:
            raise RewardFailure(failure(error)) from error

    def _within(self, seconds: float, call: Callable[[], dict[str, Tensor]], prompts: list[str]) -> dict[str, Tensor]:
        future: Future[dict[str, Tensor]] = Future()
        self._queue().put((future, contextvars.copy_context().run, call))
        try:
            error = future.exception(seconds)
        except TimeoutError as overdue:
            InProcess._thread = None  # it may hang forever; the next call starts another
            raise RewardError(
                f"reward {self.name!r} gave no answer within reward.timeout_seconds = {seconds:g} for {len(prompts)} "
                f"prompts that begin with {prompts[0]!r}; a larger value, or 0, waits longer, and reward.workers = 1 "
                "gives it a process of its own, which can be ended and started again"
            ) from overdue
        if error is not None:  # even KeyboardInterrupt: Ctrl-C never reaches this thread, so the reward raised it
            raise RewardFailure(failure(error)) from error
        return future.result()

    def close(self) -> None:
        pass

    @classmethod
    def _queue(cls) -> queue.SimpleQueue[Any]:
        """Return the queue of a live thread; start one if needed, as after a fork, which copies no threads."""
        if cls._thread is None or not cls._thread.is_alive():
            cls._calls = queue.SimpleQueue()
            cls._thread = threading.Thread(target=_serve, args=(cls._calls,), daemon=True)
            cls._thread.start()
        return cls._calls


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while True:
        fulfil(*calls.get())
