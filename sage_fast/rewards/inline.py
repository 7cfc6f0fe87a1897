"""Reward backend in this process."""

from __future__ import annotations

import contextvars
import logging
import threading
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from sage_fast.rewards.calls import called
from sage_fast.rewards.failure_policy import Backend
from sage_fast.rewards.failures import RewardFailure, failure, fulfil
from sage_fast.rewards.interface import Metadata
from sage_fast.util.console import wrapped
from sage_fast.util.errors import RewardError
from sage_fast.util.process_state import restored
from sage_fast.util.time_limit import TimeLimit

log = logging.getLogger(__name__)


class InProcess(Backend):
    """Calls a reward, with a time limit on a thread of its own, so that the wait can end.

    Nothing else ends the wait for code that swallows exceptions or never returns from C. The thread itself cannot be
    killed.

    Args:
        name: name of the reward, for messages.
        device: device the videos are moved to; None: none.
    """

    in_background = False

    def __init__(self, name: str, reward: Any, device: str | None = None) -> None:
        self.name, self.reward, self.device, self._writes = name, reward, device, False

    def score(
        self,
        videos: Tensor,
        prompts: list[str],
        metadata: list[Metadata],
        seconds: float,
        fps: float | None = None,
    ) -> dict[str, Tensor]:
        gpu = torch.cuda.is_available()
        device, stream = (torch.cuda.current_device(), torch.cuda.current_stream()) if gpu else (-1, None)

        def call() -> dict[str, Tensor]:
            # Restores both if the reward changes them.
            with torch.cuda.device(device), torch.cuda.stream(stream):
                # A copy: other rewards, the judge and the saved files get what was decoded.
                given = videos.to(self.device or videos.device, copy=True)
                parts = called(self.name, self.reward, given, prompts, metadata, fps)
                # A reward may even free them.
                same = given.untyped_storage().nbytes() >= given.nbytes and torch.equal(given, videos.to(given.device))
                if not (self._writes or same or videos.isnan().any()):
                    self._writes = True
                    log.warning(wrapped(f"note: reward {self.name!r} writes into the videos, of which it has a copy"))
                return parts

        if not seconds:
            try:
                return call()
            except (Exception, SystemExit) as raised:
                raise RewardFailure(failure(raised)) from raised
        future: Future[dict[str, Tensor]] = Future()
        work = (future, contextvars.copy_context().run, call)
        with restored(f"reward {self.name!r}"):  # also what only the main thread may put back
            threading.Thread(target=fulfil, args=work, daemon=True).start()
            limit = TimeLimit(seconds)
            while futures.wait([future], limit.next_look).not_done:
                if limit.is_over():
                    raise RewardError(
                        f"reward {self.name!r} gave no answer within reward.timeout_seconds = {seconds:g} for "
                        f"{len(prompts)} prompts that begin with {prompts[0]!r}; a larger value, or 0, waits longer, "
                        "and reward.workers = 1 gives it a process of its own, which can be ended and started again"
                    )
            error = future.exception()
        if error is not None:  # even KeyboardInterrupt: Ctrl-C never reaches this thread, so the reward raised it
            raise RewardFailure(failure(error)) from error
        return future.result()
