"""The policy for failing rewards, the same for every backend.

A call may take `timeout` seconds. If the transport fails, it is sent again with growing waits while the backend's
patience lasts. Videos without scores are then scored again, `retries` times. If the last call raised, they are finally
scored one by one, so that one bad video does not cost its batch. A circuit breaker opens after `FAILURES_TO_OPEN`
consecutive calls without an answer: further calls fail at once until a cooldown is over. A video that still has no
score is dropped; no number is made up.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
import uuid
from typing import Protocol

import torch
from torch import Tensor

from sage_fast.rewards.errors import RewardFailure, SomeFailed, TransportFailure, failure
from sage_fast.rewards.interface import Metadata
from sage_fast.util.errors import RewardError, first_line

TIMEOUTS = 2
"""Deadline of a batch in units of `reward.timeout_seconds`. No further call is made after it: other ranks wait."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a call is sent again: the first wait, and the cap on doubling."""
FAILURES_TO_OPEN = 5
"""Consecutive failures that open the circuit breaker. The cause, such as a full GPU, may pass."""
FIRST_COOLDOWN, LONGEST_COOLDOWN = 60.0, 1800.0
"""Seconds that the circuit breaker stays open: the first time, and the cap on doubling; an answer resets it."""


class Backend(Protocol):
    """A reward in this process, in a child process or on a server. It takes one call at a time and never retries.

    Attributes:
        in_background: whether the reward runs outside this process, during the rollout, and takes CPU videos.
        patience: seconds during which a call is sent again after the transport failed.
    """

    in_background: bool

    @property
    def patience(self) -> float: ...

    def score(
        self, videos: Tensor, prompts: list[str], metadata: list[Metadata], seconds: float, name: str
    ) -> dict[str, Tensor]:
        """Score videos; return each part, float32 `[B]` on the CPU.

        Args:
            metadata: one mapping per prompt.
            seconds: time limit; 0: none.
            name: id of the call; a repeated call keeps it.

        Raises:
            RewardFailure: the reward failed; `SomeFailed`: on some of the videos.
            TransportFailure: no answer.
            RewardError: the in-process reward timed out and its thread cannot be killed.
        """
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What one reward gave for B videos.

    Attributes:
        parts: name -> float32 `[B]`, NaN for a video that failed.
        errors: video -> why it has no scores.
        retried: number of videos without scores after the first call.
        note: why videos had no scores after the first call; None if all had.
    """

    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    retried: int = 0
    note: str | None = None


class FailurePolicy:
    """Scores batches through one backend.

    Args:
        needed: parts that must be finite; None: all.
        retries: further calls for videos without scores.
        timeout: time limit of a call in seconds; 0: none.
    """

    def __init__(self, backend: Backend, needed: set[str] | None, retries: int, timeout: float) -> None:
        self.backend, self.needed, self.retries, self.timeout = backend, needed, retries, timeout
        self.failures, self.open_until = 0, 0.0

    @property
    def circuit_open(self) -> bool:
        return time.monotonic() < self.open_until

    def score(self, videos: Tensor, prompts: list[str], metadata: list[Metadata]) -> Outcome:
        """Score a batch, in several calls if need be.

        Raises:
            RewardError: the in-process reward timed out and its thread cannot be killed.
        """
        outcome = Outcome()
        errors, count = outcome.errors, len(prompts)
        deadline = time.monotonic() + TIMEOUTS * self.timeout if self.timeout else math.inf
        raised = self._attempt(outcome, videos, prompts, metadata, list(range(count)))
        if errors:
            outcome.retried = len(errors)
            outcome.note = f"{first_line(next(iter(errors.values())))}; {len(errors)} of {count} videos had no scores"
        for _ in range(self.retries):
            if errors and time.monotonic() < deadline:
                raised = self._attempt(outcome, videos, prompts, metadata, list(errors))
        for i in list(errors) if raised and len(errors) > 1 else []:
            if time.monotonic() < deadline:
                self._attempt(outcome, videos, prompts, metadata, [i])
        for values in outcome.parts.values():
            values[list(errors)] = torch.nan
        return outcome

    def call(self, videos: Tensor, prompts: list[str], metadata: list[Metadata]) -> dict[str, Tensor]:
        """Make one call; send it again while the transport fails and the backend's patience lasts.

        Raises:
            RewardFailure, TransportFailure, RewardError: as `Backend.score`.
        """
        if self.circuit_open:
            left = self.open_until - time.monotonic()
            raise TransportFailure(f"no answer {self.failures} times in a row; it is called again after {left:.0f} s")
        name, start, wait = uuid.uuid4().hex, time.monotonic(), FIRST_WAIT
        while True:
            try:
                parts = self.backend.score(videos, prompts, metadata, self.timeout, name)
            except TransportFailure as error:
                spent = time.monotonic() - start
                if spent >= self.backend.patience:
                    tried = f"no scores within {spent:.0f} s; last " if self.backend.patience else ""
                    raise self._count(f"{tried}{error}") from error
                time.sleep(min(self.backend.patience - spent, wait * random.uniform(0.5, 1.0)))  # ranks fail together
                wait = min(2 * wait, LONGEST_WAIT)
            except RewardFailure:
                self.failures = 0
                raise
            else:
                self.failures = 0
                return parts

    def _attempt(
        self, outcome: Outcome, videos: Tensor, prompts: list[str], metadata: list[Metadata], chosen: list[int]
    ) -> bool:
        """Make one call for the chosen videos; return whether it raised, for all of them."""
        errors: dict[int, str] = {}
        try:
            given = videos if len(chosen) == len(prompts) else videos[chosen]
            try:
                parts = self.call(given, [prompts[i] for i in chosen], [metadata[i] for i in chosen])
            except SomeFailed as failed:
                parts, errors = failed.parts, failed.errors
            if missing := (self.needed or set()) - parts.keys():
                raise RewardFailure(f"returned {sorted(parts)}, without {sorted(missing)}")
        except RewardError:
            raise
        except Exception as error:
            outcome.errors |= dict.fromkeys(chosen, failure(error))
            return True
        for i in chosen:
            outcome.errors.pop(i, None)
        outcome.errors |= {chosen[place]: error for place, error in errors.items()}
        for part, values in parts.items():
            outcome.parts.setdefault(part, torch.full((len(prompts),), torch.nan))[chosen] = values
            for i, value in zip(chosen, values.tolist()):
                if not math.isfinite(value) and (self.needed is None or part in self.needed):
                    outcome.errors.setdefault(i, f"{part!r} is {value}, not finite")
        return False

    def _count(self, text: str) -> TransportFailure:
        """Count a failure; open the circuit breaker after too many in a row. Return the failure to raise."""
        self.failures += 1
        if self.failures >= FAILURES_TO_OPEN:
            cooldown = min(FIRST_COOLDOWN * 2 ** min(self.failures - FAILURES_TO_OPEN, 9), LONGEST_COOLDOWN)
            self.open_until = time.monotonic() + cooldown
            what, line, frames = text.partition("\n")
            again = f"no answer {self.failures} times in a row: it is called again after {cooldown:.0f} s"
            text = f"{what}; {again}{line}{frames}"
        return TransportFailure(text)
