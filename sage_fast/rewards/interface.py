"""Interface between rewards and training: the names that the trainer and the rollout import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

Metadata = Mapping[str, Any]
"""The further keys of a prompt's record in a JSON-lines file."""
USUAL_FPS = 24.0
"""Frames per second of made-up videos, and of those that come without a rate where a reward needs one."""


class Reward(Protocol):
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score `videos [B, F, 3, H, W]` in [0, 1] against their prompts; each part is `[B]`.

        A reward with a parameter `metadata` also gets a list of B `Metadata`, and one with a parameter `fps` the frames
        per second of the videos; None if they are not known.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of N videos.

    Attributes:
        rewards: composite, float32 `[N]`; NaN for a video whose reward failed.
        parts: name -> float32 `[N]`, sorted by name; NaN likewise.
        retried: number of videos without scores after the first call.
        notes: one line per failure.
    """

    rewards: Tensor
    parts: dict[str, Tensor]
    retried: int = 0
    notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> int:
        return int((~self.rewards.isfinite()).sum())

    def in_order(self, order: Tensor | list[int]) -> Scores:
        return dataclasses.replace(
            self, rewards=self.rewards[order], parts={part: values[order] for part, values in self.parts.items()}
        )


def join_scores(chunks: Sequence[Scores]) -> Scores:
    """Concatenate chunks. A part that a chunk lacks is NaN there."""
    names = sorted({name for chunk in chunks for name in chunk.parts})
    parts = {
        name: torch.cat([chunk.parts.get(name, torch.full_like(chunk.rewards, torch.nan)) for chunk in chunks])
        for name in names
    }
    return Scores(
        rewards=torch.cat([chunk.rewards for chunk in chunks]) if chunks else torch.zeros(0),
        parts=parts,
        retried=sum(chunk.retried for chunk in chunks),
        notes=tuple(note for chunk in chunks for note in chunk.notes),
    )


class Pending:
    """Scores that may not be ready yet.

    Args:
        futures: one per reward.
        join: joins their results to scores.
    """

    def __init__(self, futures: Sequence[Future[Any]], join: Callable[[list[Any]], Scores]) -> None:
        self.futures, self.join = futures, join

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self) -> Scores:
        """Wait for the scores.

        Raises:
            RewardError: a reward failed and `on_failure = stop`, or an in-process reward timed out.
        """
        return self.join([future.result() for future in self.futures])


class Scorer(Protocol):
    """A reward as training and evaluation see it; `rewards.composite.CompositeReward` is one.

    Attributes:
        weights: part -> its weight in the composite.
    """

    weights: Mapping[str, float]

    def submit(self, videos: Tensor, prompts: Sequence[str], fps: float | None = None) -> Pending:
        """Start to score `videos [B, F, 3, H, W]` of `fps` frames per second; None: not known."""
        ...

    def check_share(self, scores: Scores) -> None:
        """Raise RewardError, on all ranks, if too many of all ranks' `scores` failed."""
        ...
