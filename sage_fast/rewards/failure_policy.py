"""The policy for failing rewards, the same for every backend: score again, then drop.

A batch is scored in one call, which may take `reward.timeout_seconds`. Videos without scores are scored again one by
one, `reward.retries` times. A video that still has no score is dropped; no number is made up.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Protocol

import torch
from torch import Tensor

from sage_fast.config.schema import RewardConfig
from sage_fast.rewards.failures import RewardFailure, SomeFailed
from sage_fast.rewards.interface import Metadata
from sage_fast.util.errors import first_line

TIMEOUTS = 2
"""Deadline of a batch in units of `reward.timeout_seconds`. No further call is made after it: other ranks wait."""


class Backend(Protocol):
    """A reward in this process, in a child process or on a server. It takes one call at a time.

    Attributes:
        in_background: whether the reward runs outside this process, during the rollout, and takes CPU videos.
    """

    in_background: bool

    def score(
        self,
        videos: Tensor,
        prompts: list[str],
        metadata: list[Metadata],
        seconds: float,
        fps: float | None = None,
    ) -> dict[str, Tensor]:
        """Score videos; return each part, float32 `[B]` on the CPU.

        Args:
            metadata: one mapping per prompt.
            seconds: time limit; 0: none.
            fps: frames per second of the videos; None: not known.

        Raises:
            RewardFailure: no scores; `SomeFailed`: none for some of the videos.
            RewardError: the in-process reward timed out and its thread cannot be killed.
        """
        ...

    def close(self) -> None:
        """End what runs outside this process; nothing by default."""
        return


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


def score_or_drop(
    backend: Backend,
    videos: Tensor,
    needed: set[str] | None,
    config: RewardConfig,
    prompts: list[str],
    metadata: list[Metadata],
    fps: float | None = None,
) -> Outcome:
    """Score a batch, in several calls if need be.

    Args:
        needed: parts that must be finite; None: all.
        config: retries and time limit.
        fps: frames per second of the videos; None: not known.

    Raises:
        RewardError: the in-process reward timed out and its thread cannot be killed.
    """
    outcome, seconds, count = Outcome(), config.timeout_seconds, len(prompts)
    errors = outcome.errors
    deadline = time.monotonic() + TIMEOUTS * (seconds or math.inf)

    def attempt(chosen: list[int]) -> None:
        failed: dict[int, str] = {}
        given = videos if len(chosen) == count else videos[chosen]
        try:
            try:
                chosen_prompts = [prompts[i] for i in chosen]
                parts = backend.score(given, chosen_prompts, [metadata[i] for i in chosen], seconds, fps)
            except SomeFailed as some:
                parts, failed = some.parts, some.errors
            if missing := (needed or set()) - parts.keys():
                raise RewardFailure(f"returned {sorted(parts)}, without {sorted(missing)}")
        except RewardFailure as error:
            errors.update(dict.fromkeys(chosen, str(error)))
            return
        for i in chosen:
            errors.pop(i, None)
        errors.update({chosen[place]: why for place, why in failed.items()})
        for part, values in parts.items():
            outcome.parts.setdefault(part, torch.full((count,), torch.nan))[chosen] = values
            for i, value in zip(chosen, values.tolist()):
                if not math.isfinite(value) and (needed is None or part in needed):
                    errors.setdefault(i, f"{part!r} is {value}, not finite")

    attempt(list(range(count)))
    if errors:
        outcome.retried = len(errors)
        outcome.note = f"{first_line(next(iter(errors.values())))}; {len(errors)} of {count} videos had no scores"
    for i in [i for _ in range(config.retries) for i in list(errors)]:
        if i in errors and time.monotonic() < deadline:
            attempt([i])
    for values in outcome.parts.values():
        values[list(errors)] = torch.nan
    return outcome
