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
"""Interval at which a resting carrier checks whether others work. If all rest, it takes jobs, which fail at once."""


class Source:
    """Calls one reward: directly if it is in this process, otherwise on one daemon thread per carrier.

    Args:
        entry: settings of the reward.
        key: setting that holds its name, for messages.
        carriers: its carriers, which work in parallel.
        config: retries and time limit.
        needed: parts that must be finite; None: all.
    """

    def __init__(
        self, entry: RewardEntry, key: str, carriers: Sequence[Carrier], config: RewardConfig, needed: set[str] | None
    ) -> None:
        self.entry, self.key, self.needed, self.in_background = entry, key, needed, carriers[0].in_background
        self._policies = [Policy(carrier, needed, config.retries, config.timeout_seconds) for carrier in carriers]
        self._jobs: Jobs = queue.Queue(maxsize=len(carriers))
        if self.in_background:
            for policy in self._policies:
                threading.Thread(target=_serve, args=(self._jobs, policy, self._policies), daemon=True).start()
            self.close = weakref.finalize(self, _close, self._jobs, carriers, os.getpid())

    def submit(
        self, method: Callable[[Policy, Tensor, list[str]], Result], videos: Tensor, prompts: list[str]
    ) -> Future[Result]:
        """Schedule a call of a method of `Policy`; block while the queue holds a job for every thread."""
        future: Future[Result] = Future()
        if self.in_background:
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
        del job  # otherwise an idle thread would keep the last videos alive


def _close(jobs: Jobs, carriers: Sequence[Carrier], process: int) -> None:
    """End the carriers and threads; a no-op in a fork, which does not own them."""
    if os.getpid() != process:
        return
    for carrier in carriers:
        carrier.close()
        with contextlib.suppress(queue.Full):
            jobs.put_nowait(None)
