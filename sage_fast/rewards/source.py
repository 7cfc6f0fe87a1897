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
from sage_fast.rewards.failure_policy import Carrier, Policy

Result = TypeVar("Result")
Jobs = queue.Queue[tuple[Future[Any], Callable[[Policy], Any]] | None]

SECONDS_TO_LOOK = 0.2
"""Interval at which a carrier that rests looks whether another one works; if none does, it takes jobs, which fail."""


class Source:
    """Calls one reward, at once within this process, else on a daemon thread for each carrier.

    Args:
        entry: its settings.
        key: setting that holds its name, for messages.
        carriers: ways to it, which work side by side.
        config: retries and time limit.
        needed: its parts that have to be finite; None: all.
    """

    def __init__(
        self, entry: RewardEntry, key: str, carriers: Sequence[Carrier], config: RewardConfig, needed: set[str] | None
    ) -> None:
        self.entry, self.key, self.needed, self.beside = entry, key, needed, carriers[0].beside
        self._policies = [Policy(carrier, needed, config.retries, config.timeout_seconds) for carrier in carriers]
        self._jobs: Jobs = queue.Queue(maxsize=len(carriers))
        if self.beside:
            for policy in self._policies:
                threading.Thread(target=_serve, args=(self._jobs, policy, self._policies), daemon=True).start()
            self.close = weakref.finalize(self, _close, self._jobs, carriers, os.getpid())

    def submit(
        self, method: Callable[[Policy, Tensor, list[str]], Result], videos: Tensor, prompts: list[str]
    ) -> Future[Result]:
        """Have a method of `Policy` called; wait while the queue holds a job for each thread."""
        future: Future[Result] = Future()
        if self.beside:
            given = videos.cpu()
            self._jobs.put((future, lambda policy: method(policy, given, prompts)))
        else:
            future.set_result(method(self._policies[0], videos, prompts))
        return future


def _serve(jobs: Jobs, policy: Policy, policies: Sequence[Policy]) -> None:
    while True:
        if policy.rests and not all(other.rests for other in policies):
            time.sleep(SECONDS_TO_LOOK)
            continue
        try:
            job = jobs.get(timeout=SECONDS_TO_LOOK if policy.rests else None)
        except queue.Empty:
            continue
        if job is None:
            return
        fulfil(*job, policy)
        del job  # an idle thread would keep the last videos


def _close(jobs: Jobs, carriers: Sequence[Carrier], process: int) -> None:
    """End the carriers and threads, but not in a fork, whose they are not."""
    if os.getpid() != process:
        return
    for carrier in carriers:
        carrier.close()
        with contextlib.suppress(queue.Full):
            jobs.put_nowait(None)
