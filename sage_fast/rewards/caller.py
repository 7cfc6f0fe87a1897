"""Who calls a reward: this process between two rollouts, or threads that each look after one worker beside them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sage_fast.errors import RewardError
from sage_fast.reward_config import RewardEntry
from sage_fast.rewards.failure import RewardFailure
from sage_fast.rewards.load import score_of
from sage_fast.rewards.score import Call, checked
from sage_fast.rewards.timeout import OverdueError, call_within

Result = TypeVar("Result")
Jobs = queue.Queue[tuple[Callable[[Call], Any], Future[Any]] | None]


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
            with _same_device():
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
        for place, call in enumerate(calls):
            # A daemon: a call that hangs keeps no process from ending.
            threading.Thread(target=_serve, args=(self._jobs, call), name=f"reward-{place}", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._jobs, list(calls), os.getpid())

    def submit(self, work: Callable[[Call], Result]) -> Future[Result]:
        """Waits while there is a job in the queue for each worker beside the one in its hands."""
        future: Future[Result] = Future()
        self._jobs.put((work, future))
        return future


def _serve(jobs: Jobs, call: Call) -> None:
    prepare = getattr(call, "prepare", None)
    if prepare is not None:
        prepare()
    while (job := jobs.get()) is not None:
        work, future = job
        try:
            future.set_result(work(call))
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
