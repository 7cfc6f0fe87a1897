"""One reward of a composite: its settings, and the threads that call it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from torch import Tensor

from sage_fast.config.schema import RewardConfig, RewardEntry
from sage_fast.rewards.failure_policy import Backend, Outcome, score_or_drop
from sage_fast.rewards.failures import fulfil
from sage_fast.rewards.interface import Metadata

Result = TypeVar("Result")
Jobs = queue.Queue[tuple[Future[Any], Callable[[Backend], Any]] | None]


class RewardCaller:
    """Calls one reward: directly if it is in this process, otherwise on one daemon thread per backend.

    Args:
        entry: settings of the reward.
        key: setting that holds its name, for messages.
        backends: its backends, which work in parallel.
        config: retries and time limit.
        needed: parts that must be finite; None: all.
    """

    def __init__(
        self, entry: RewardEntry, key: str, backends: Sequence[Backend], config: RewardConfig, needed: set[str] | None
    ) -> None:
        self.entry, self.key, self.needed, self.in_background = entry, key, needed, backends[0].in_background
        self._backends, self._config = backends, config
        self._jobs: Jobs = queue.Queue(maxsize=len(backends))
        if self.in_background:
            for backend in backends:
                threading.Thread(target=_work, args=(self._jobs, backend), daemon=True).start()
            # At exit it comes before multiprocessing waits for the children; a fork does not run it.
            self.close = Finalize(self, _close, (self._jobs, backends), exitpriority=0)

    def score(
        self, videos: Tensor, prompts: list[str], metadata: list[Metadata], fps: float | None = None
    ) -> Future[Outcome]:
        """Schedule the scoring of a batch by the failure policy; block while every thread has a job in the queue."""
        return self._submit(score_or_drop, videos, self.needed, self._config, prompts, metadata, fps)

    def call(
        self, videos: Tensor, prompts: list[str], metadata: list[Metadata], fps: float | None = None
    ) -> Future[dict[str, Tensor]]:
        """Schedule a single call, whose failure is raised; block as `score` does."""
        rest = (prompts, metadata, self._config.timeout_seconds, fps)
        return self._submit(lambda backend, *given: backend.score(*given), videos, *rest)

    def _submit(self, function: Callable[..., Result], videos: Tensor, *rest: Any) -> Future[Result]:
        future: Future[Result] = Future()
        if self.in_background:
            given = videos.cpu()
            self._jobs.put((future, lambda backend: function(backend, given, *rest)))
        else:
            future.set_result(function(self._backends[0], videos, *rest))
        return future


def _work(jobs: Jobs, backend: Backend) -> None:
    while (job := jobs.get()) is not None:
        fulfil(*job, backend)
        del job  # otherwise an idle thread would keep the last videos alive


def _close(jobs: Jobs, backends: Sequence[Backend]) -> None:
    """End the backends and threads."""
    for backend in backends:
        backend.close()
        with contextlib.suppress(queue.Full):
            jobs.put_nowait(None)
