"""Who calls a reward: this process between two rollouts, or threads that each look after one worker beside them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sage_fast.config.schema import RewardEntry
from sage_fast.errors import RewardError
from sage_fast.rewards.failure import NoAnswer, RewardFailure, failure
from sage_fast.rewards.load import score_of
from sage_fast.rewards.score import Call, checked
from sage_fast.rewards.timeout import OverdueError, call_within

Result = TypeVar("Result")
Jobs = queue.Queue[tuple[Callable[[Call], Any], Future[Any]] | None]

FALLS = 5
"""Calls in a row without an answer after which a worker rests."""
FIRST_REST, LONGEST_REST = 60.0, 1800.0
"""Seconds of a rest: the first, doubled each time up to the longest, until there is an answer."""
SECONDS_TO_LOOK = 0.2
"""After which a worker that rests looks again whether another one works; if none does, it takes jobs, which fail."""


class Caller(Protocol):
    """Takes work, a function of the call that scores, and gives its result later."""

    def submit(self, work: Callable[[Call], Result]) -> Future[Result]: ...


class Inline:
    """A reward in this process, called at once.

    Args:
        entry: its settings.
        reward: as of `load_reward`.
        timeout: seconds of a call; 0: no limit.
        device: that it gets the videos on; None: where they are.
    """

    def __init__(self, entry: RewardEntry, reward: Any, timeout: float, device: str | None = None) -> None:
        self.entry, self.reward, self.timeout, self.device = entry, reward, timeout, device

    def submit(self, work: Callable[[Call], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_result(work(self))
        return future

    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """
        Raises:
            RewardError: it gives no answer in time.
            RewardFailure: it returned something else than parts, or changed the videos, which others see after it.
        """
        if self.device is not None:
            videos = videos.to(self.device)
        version = videos._version
        try:
            with _same_device(), torch.no_grad():
                returned = call_within(self.timeout, score_of(self.reward), videos, list(prompts))
        except OverdueError as error:
            raise RewardError(
                f"reward {self.entry.name!r} gave no answer within reward.timeout_seconds = {self.timeout:g} for "
                f"{len(prompts)} prompts that begin with {prompts[0]!r}; a larger value, or 0, waits longer, and "
                "reward.workers = 1 gives it a process of its own, which can be ended and started again"
            ) from error
        if videos._version != version:
            raise RewardFailure("changes the videos in place; it has to work on a copy, videos.clone()")
        return checked(returned, len(prompts))


class Beside:
    """Workers that score beside the rollout, each in the hands of one thread, fed through one bounded queue.

    Args:
        calls: one for each worker; with `prepare` and `close` if it has them.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._jobs: Jobs = queue.Queue(maxsize=len(calls))
        self._workers = [Worker(call) for call in calls]
        for place, worker in enumerate(self._workers):
            # A daemon: a call that hangs keeps no process from ending.
            arguments = (self._jobs, worker, self._workers)
            threading.Thread(target=_serve, args=arguments, name=f"reward-{place}", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._jobs, list(calls), os.getpid())

    def submit(self, work: Callable[[Call], Result]) -> Future[Result]:
        """Waits while there is a job in the queue for each worker beside the one in its hands."""
        future: Future[Result] = Future()
        self._jobs.put((work, future))
        return future


class Worker:
    """A call that rests for a while after `FALLS` of them in a row without an answer: what makes it fail, such as a GPU
    without memory, may pass, and calls that hang must not add up to the longest wait of the other ranks."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._falls, self._rests_until = 0, 0.0

    @property
    def rests(self) -> bool:
        return time.monotonic() < self._rests_until

    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """
        Raises:
            NoAnswer: it rests; or as the call, with a word in the first line if it rests now.
        """
        if self.rests:
            left = self._rests_until - time.monotonic()
            raise NoAnswer(f"no answer {self._falls} times in a row; it is called again after {left:.0f} s")
        try:
            parts = self.call(videos, prompts)
        except Exception as error:
            if isinstance(error, RewardFailure) and not isinstance(error, NoAnswer):
                self._falls = 0
                raise
            self._falls += 1
            if self._falls < FALLS:
                raise
            rest = min(FIRST_REST * 2 ** min(self._falls - FALLS, 9), LONGEST_REST)
            self._rests_until = time.monotonic() + rest
            what, line, frames = failure(error).partition("\n")
            told = f"{what}; no answer {self._falls} times in a row: it is called again after {rest:.0f} s"
            raise NoAnswer(told + line + frames) from error
        self._falls = 0
        return parts


def _serve(jobs: Jobs, worker: Worker, workers: list[Worker]) -> None:
    prepare = getattr(worker.call, "prepare", None)
    if prepare is not None:
        prepare()
    while True:
        rests = worker.rests
        if rests and not all(other.rests for other in workers):
            time.sleep(SECONDS_TO_LOOK)
            continue
        try:
            job = jobs.get(timeout=SECONDS_TO_LOOK if rests else None)
        except queue.Empty:
            continue
        if job is None:
            return
        work, future = job
        try:
            future.set_result(work(worker))
        except BaseException as error:
            future.set_exception(error)
        del job, work, future  # an idle thread would keep the last videos


def _close(jobs: Jobs, calls: Sequence[Any], process: int) -> None:
    """With the last reference to a `Beside`, or when the process ends; not in a fork, whose workers they are not."""
    if os.getpid() != process:
        return
    for call in calls:
        if hasattr(call, "close"):
            call.close()
        with contextlib.suppress(queue.Full):
            jobs.put_nowait(None)


@contextlib.contextmanager
def _same_device() -> Iterator[None]:
    """A reward that chooses another GPU chooses it for itself."""
    before = torch.cuda.current_device() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        if before is not None and torch.cuda.current_device() != before:
            torch.cuda.set_device(before)
