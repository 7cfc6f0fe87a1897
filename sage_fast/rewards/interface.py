"""Interface between rewards and training: the names that the trainer and the rollout import."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError

Metadata = Mapping[str, Any]
"""The further keys of a prompt's record in a JSON-lines file."""
RESERVED_NAMES = (
    "reward",
    "overall",
    "advantage",
    "file",
    "prompt",
    "image",
    "seed",
    "judge",
    "videos",
)
"""Columns of tables, and names under `heldout/` in trackers, beside the parts of a reward."""
USUAL_FPS = 24.0
"""Frames per second of made-up videos, and of those that come without a rate where a reward needs
one."""


class Reward(Protocol):
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score `videos [B, F, 3, H, W]` in [0, 1] against their prompts; each part is `[B]`.

        A reward with a parameter `metadata` also gets a list of B `Metadata`, and one with a
        parameter `fps` the frames per second of the videos; None if they are not known.

        One with an attribute `compares_group = True` gets all videos of one prompt in each call,
        at least two, so that all prompts are equal.
        """
        ...


def compares_group(reward: object) -> bool:
    """Whether a reward compares the videos of a group: by its attribute `compares_group`.

    A method without one goes by its instance, and a `functools.partial` by what it calls. What a
    class leaves to its instances is not known of the class.

    Raises:
        UserError: the attribute is neither True nor False.
    """
    said = getattr(reward, "compares_group", None)
    if isinstance(said, bool):
        return said
    if isinstance(reward, functools.partial):
        return compares_group(reward.func)
    if inspect.ismethod(reward):
        return compares_group(reward.__self__)

    is_left_to_instances = isinstance(reward, type) and hasattr(said, "__get__")
    # Some objects make up any attribute.
    is_there = inspect.getattr_static(reward, "compares_group", None) is not None
    if is_there and not is_left_to_instances:
        kind = reward.__name__ if isinstance(reward, type) else type(reward).__name__
        raise UserError(
            f"compares_group = {said!r:.80} of {kind}: expected True or False; True if each call "
            "needs all videos of a prompt"
        )
    return False


def in_unit_range(videos: Tensor) -> Tensor:
    """Return videos as float in [0, 1]; uint8 ones are divided by 255."""
    if videos.dtype != torch.uint8:
        return videos
    return videos.float().div_(255)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The input of one call of a reward.

    Attributes:
        videos: `[B, F, 3, H, W]`, float in [0, 1], or uint8 as those of a group are kept.
        prompts: texts of the B prompts.
        metadata: one mapping per prompt.
        fps: frames per second of the videos; None: not known.
        seed: of torch's, NumPy's and Python's random numbers during the call.
    """

    videos: Tensor
    prompts: list[str]
    metadata: list[Metadata]
    fps: float | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, chosen: Sequence[int]) -> Request:
        """Return the request for some of the videos; the whole one keeps its tensor."""
        if len(chosen) == len(self):
            return self
        return dataclasses.replace(
            self,
            videos=self.videos[list(chosen)],
            prompts=[self.prompts[i] for i in chosen],
            metadata=[self.metadata[i] for i in chosen],
            seed=self.seed + chosen[0],
        )


class Backend(Protocol):
    """One reward in this process, in a worker process or on a server. It takes one call at a time.

    Attributes:
        in_background: whether the reward runs outside this process, during the rollout, and takes
            CPU videos.
        compares_group: whether it compares the videos of a group, as far as is known without
            asking.
    """

    in_background: bool
    compares_group: bool = False

    def ask(self, seconds: float) -> bool:
        """Return whether the reward compares the videos of a group.

        Args:
            seconds: as of `score`.

        Raises:
            RewardFailure: there is no answer.
        """
        return self.compares_group

    def score(self, request: Request, seconds: float) -> dict[str, Tensor]:
        """Score videos; return each part, float32 or float64 `[B]` on the CPU.

        Args:
            seconds: time limit of a reward outside this process; 0: none.

        Raises:
            RewardFailure: no scores; `SomeFailed`: none for some of the videos.
        """
        ...

    def close(self) -> None:
        """End what runs outside this process; nothing by default."""
        return

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of its networks that could leave the device; 0 by default."""
        return 0

    def park(self, device: torch.device) -> None:
        """Have its networks on the device only while it scores; nothing by default."""
        return


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of N videos.

    Attributes:
        rewards: composite `[N]`: float32, or float64 if a part with a weight is; NaN for a video
            whose reward failed.
        parts: name -> float32 or float64 `[N]`, sorted by name; NaN likewise.
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

    def combined(self, other: Scores) -> Scores:
        """Add what other rewards gave the same videos; a video that either failed has no score."""
        rewards = self.rewards + other.rewards
        failed = ~rewards.isfinite()
        parts = self.parts | other.parts
        return Scores(
            rewards=torch.where(failed, torch.nan, rewards),
            parts={part: torch.where(failed, torch.nan, parts[part]) for part in sorted(parts)},
            retried=self.retried + other.retried,
            notes=self.notes + other.notes,
        )

    def in_order(self, order: Tensor | list[int]) -> Scores:
        return dataclasses.replace(
            self,
            rewards=self.rewards[order],
            parts={part: values[order] for part, values in self.parts.items()},
        )


def join_scores(chunks: Sequence[Scores]) -> Scores:
    """Concatenate chunks. A part that a chunk lacks is NaN there."""
    names = sorted({name for chunk in chunks for name in chunk.parts})
    parts = {
        name: torch.cat(
            [chunk.parts.get(name, torch.full(chunk.rewards.shape, torch.nan)) for chunk in chunks]
        )
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
        self.futures = futures
        self.join = join

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self) -> Scores:
        """Wait for the scores.

        Raises:
            RewardError: a reward failed and `on_failure = stop`.
        """
        return self.join([future.result() for future in self.futures])


class Scorer(Protocol):
    """A reward as training and evaluation see it, such as `rewards.composite.CompositeReward`.

    Attributes:
        weights: part -> its weight in the composite.
        pointwise_weights: those of the parts whose rewards score each video alone.
        compares_group: whether some of its rewards compare the videos of a group, in `compare`.
    """

    weights: Mapping[str, float]

    @property
    def pointwise_weights(self) -> Mapping[str, float]: ...

    @property
    def compares_group(self) -> bool: ...

    def submit(
        self, videos: Tensor, prompts: Sequence[PromptKey], fps: float | None = None, seed: int = 0
    ) -> Pending:
        """Start to score `videos [B, F, 3, H, W]` by the rewards that score each video alone.

        Args:
            prompts: keys of their prompts.
            fps: frames per second of the videos; None: not known.
            seed: of the random numbers that a reward draws.
        """
        ...

    def compare(
        self, videos: Tensor, prompt: PromptKey, fps: float | None = None, seed: int = 0
    ) -> Pending:
        """Start to score a group, uint8 `[G, F, 3, H, W]` on the CPU, by the rewards that compare
        its videos; other arguments as of `submit`. `Scores.combined` adds the scores of both."""
        ...

    def check_share(self, scores: Scores) -> None:
        """Raise RewardError, on all ranks, if too many of all ranks' `scores` failed."""
        ...

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of networks in this process that could leave the device."""
        ...

    def park(self, device: torch.device) -> None:
        """Have its networks on the device only while they score."""
        ...

    def close(self) -> None:
        """End its worker processes; it scores no more."""
        ...
