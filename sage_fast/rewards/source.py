"""One reward of a composite: its settings, and the threads that call it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from torch import Tensor

from sage_fast.config.schema import RewardConfig, RewardEntry
from sage_fast.rewards.errors import fulfil
from sage_fast.rewards.failure_policy import Backend, FailurePolicy
from sage_fast.rewards.interface import Metadata

Result = TypeVar("Result")
Jobs = queue.Queue[tuple[Future[Any], Callable[[FailurePolicy], Any]] | None]

POLL_SECONDS = 0.2
"""Interval at which a backend whose circuit breaker is open checks the others. If all are open, it takes jobs, which
fail at once."""


class Source:
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
        self._policies = [
            FailurePolicy(backend, needed, config.retries, config.timeout_seconds) for backend in backends
        ]
        self._jobs: Jobs = queue.Queue(maxsize=len(backends))
        if self.in_background:
            for policy in self._policies:
                threading.Thread(target=_serve, args=(self._jobs, policy, self._policies), daemon=True).start()
            self.close = weakref.finalize(self, _close, self._jobs, backends, os.getpid())

    def submit(
        self,
        method: Callable[[FailurePolicy, Tensor, list[str], list[Metadata]], Result],
        videos: Tensor,
        prompts: list[str],
        metadata: list[Metadata],
    ) -> Future[Result]:
        """Schedule a call of a method of `FailurePolicy`; block while the queue holds a job for every thread."""
        future: Future[Result] = Future()
        if self.in_background:
            given = videos.cpu()
            self._jobs.put((future, lambda policy: method(policy, given, prompts, metadata)))
        else:
            future.set_result(method(self._policies[0], videos, prompts, metadata))
        return future


def _serve(jobs: Jobs, policy: FailurePolicy, policies: Sequence[FailurePolicy]) -> None:
    while True:
        if policy.circuit_open and not all(other.circuit_open for other in policies):
            time.sleep(POLL_SECONDS)
            continue
        try:
            job = jobs.get(timeout=POLL_SECONDS if policy.circuit_open else None)
        except queue.Empty:
            continue
        if job is None:
            return
        fulfil(*job, policy)
        del job  # otherwise an idle thread would keep the last videos alive


def _close(jobs: Jobs, backends: Sequence[Backend], process: int) -> None:
    """End the backends and threads; a no-op in a fork, which does not own them."""
    if os.getpid() != process:
        return
    for backend in backends:
        backend.close()
        with contextlib.suppress(queue.Full):
            jobs.put_nowait(None)
