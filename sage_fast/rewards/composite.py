"""The composite that training maximises, of one reward or several, and the judge that only looks on."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from sage_fast.config.schema import RewardConfig, RewardEntry, SamplingConfig
from sage_fast.errors import RewardError, UserError
from sage_fast.rewards.caller import Beside, Caller, Inline
from sage_fast.rewards.failure import failure, first_line
from sage_fast.rewards.load import Reward, device_of, load_reward
from sage_fast.rewards.process import RewardProcess
from sage_fast.rewards.score import Outcome, score

RAW = "_raw"
"""Suffix of a part as its reward gave it, beside the normalised one."""
SMALL = 2**22
"""Pixels of a made-up video up to which it has the size of a real one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What is known of N videos.

    Attributes:
        rewards: composite, float32 `[N]`; NaN for a video whose reward failed.
        parts: name -> float32 `[N]`, in the order of their names; NaN likewise.
        retried: videos that a first call gave no scores.
        notes: what failed, a line each.
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
    """One after the other, with every part that one of them has, NaN where another lacks it."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One reward of a composite.

    Attributes:
        entry: its settings.
        key: of its name, for messages.
        caller: scores with it.
        needed: its parts that have to be finite; None: all.
    """

    entry: RewardEntry
    key: str
    caller: Caller
    needed: set[str] | None

    @property
    def beside(self) -> bool:
        """Whether it scores beside what the run does next, and so gets a copy of the videos on the CPU."""
        return isinstance(self.caller, Beside)

    def call(self, videos: Tensor, prompts: list[str]) -> Future[dict[str, Tensor]]:
        """The parts of one call, whatever comes of it."""
        given = videos.cpu() if self.beside else videos
        return self.caller.submit(lambda call: call(given, prompts))

    @property
    def counts(self) -> bool:
        """Whether a video that it fails on is dropped: not for a reward that is only logged."""
        return self.needed is None or bool(self.needed)


def make_source(entry: RewardEntry, key: str, device: str, timeout: float, *, all_needed: bool = False) -> Source:
    """Make a reward, here, in processes of its own, or as a client of the server that has it.

    Args:
        device: of this rank.
        timeout: seconds of a call; 0: no limit.

    Raises:
        UserError: as `load_reward`; of a process of its own, its first call says so.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    caller: Caller
    if entry.is_address:
        workers = range(max(1, entry.workers))
        caller = Beside([Inline(entry, load_reward(entry, key, device, timeout), 0.0) for _ in workers])
    elif entry.workers:
        places = range(rank * entry.workers, (rank + 1) * entry.workers)
        caller = Beside([RewardProcess(entry, key, device_of(entry, device, place), timeout) for place in places])
    else:
        own = device_of(entry, device, rank)
        caller = Inline(entry, load_reward(entry, key, own), timeout, own if entry.devices else None)
    return Source(entry=entry, key=key, caller=caller, needed=None if all_needed else entry.needed)


class Pending:
    """Scores that are being made.

    Args:
        reward: that makes them.
        prompts: of the videos.
        outcomes: of each of its sources.
    """

    def __init__(self, reward: CompositeReward, prompts: list[str], outcomes: list[Future[Outcome]]) -> None:
        self.reward, self.prompts, self.outcomes = reward, prompts, outcomes

    def done(self) -> bool:
        return all(outcome.done() for outcome in self.outcomes)

    def result(self) -> Scores:
        """Waits for them.

        Raises:
            RewardError: a reward failed, and `on_failure = stop`; or it hangs where nothing can end the call.
        """
        return self.reward.joined(self.prompts, [outcome.result() for outcome in self.outcomes])


class CompositeReward:
    """R = sum of weight x part (Eq. 33), with failures never turned into a number.

    Args:
        reward: one reward, called in this process; or the sources, as `of` makes them.
        config: weights, and what to do with a failure.
    """

    def __init__(self, reward: Reward | Sequence[Source], config: RewardConfig) -> None:
        if not isinstance(reward, Sequence):
            caller = Inline(config, reward, config.timeout_seconds)
            reward = [Source(entry=config, key="reward.name", caller=caller, needed=config.needed)]
        self.sources = list(reward)
        self.config = config
        self.weights: Mapping[str, float] = config.part_weights
        self.parts: list[str] = []

    @classmethod
    def of(cls, config: RewardConfig, device: str = "cpu") -> CompositeReward:
        """The rewards that the settings name.

        Raises:
            UserError: one cannot be made, with its traceback.
        """
        keys = [f"reward.several[{i}].name" for i in range(len(config.several))] or ["reward.name"]
        entries = zip(config.entries, keys)
        return cls([make_source(entry, key, device, config.timeout_seconds) for entry, key in entries], config)

    @property
    def names(self) -> list[str]:
        return [source.entry.name for source in self.sources]

    @property
    def at_a_time(self) -> int:
        """Calls that are worth making at a time."""
        return max(1, min((source.entry.workers for source in self.sources), default=1))

    # -- before a run -------------------------------------------------------------------------------------------------

    def check(self, sampling: SamplingConfig, prompts: Sequence[str], device: str = "cpu") -> None:
        """Score a made-up video or two once, and hold what comes against the settings; `parts` are known then.

        Args:
            prompts: those of the run.
            device: that videos of the run are on.

        Raises:
            UserError: a reward fails, returns something else than `[B]` for each part, or lacks a part that has a
                weight or a normalisation; or two return a part of the same name.
            RewardError: it hangs.
        """
        videos = made_up_videos(sampling).to(device)
        texts = [prompts[i % len(prompts)] for i in range(len(videos))]
        found: dict[str, str] = {}
        for source in self.sources:
            where = f"{source.key} = {source.entry.name!r}"
            with torch.random.fork_rng(devices=[]):
                parts = self._once(source, videos, texts, where)
            section = source.key.removesuffix("name")
            named = {"weights": source.entry.needed, "normalisation": set(source.entry.normalisation)}
            for setting, names in named.items():
                if missing := sorted(names - parts.keys()):
                    returned = f"reward {source.entry.name!r} returns {sorted(parts)}"
                    raise UserError(f"{section}{setting} names {missing[0]!r}; {returned}")
            for part in parts:
                own = source.entry.named(part)
                for name in (own, own + RAW) if part in source.entry.normalisation else (own,):
                    if name in found:
                        raise UserError(
                            f"{where}: returns {name!r}, and so does {found[name]!r}; give one of them a prefix"
                        )
                    found[name] = source.entry.name
        self.parts = sorted(found)

    @staticmethod
    def _once(source: Source, videos: Tensor, prompts: list[str], where: str) -> dict[str, Tensor]:
        try:
            return source.call(videos, prompts).result()
        except RewardError:
            raise
        except Exception as error:
            text = failure(error)
            if text.startswith(where):  # it could not be made
                raise UserError(text) from error
            raise UserError(
                f"{where}: failed on made-up videos {list(videos.shape)} of {prompts[0]!r}: {text}"
            ) from error

    # -- scores -------------------------------------------------------------------------------------------------------

    def submit(self, videos: Tensor, prompts: Sequence[str]) -> Pending:
        """Have `videos [B, F, 3, H, W]` scored: at once by what runs in this process, and beside what the caller does
        next by what does not, which gets a copy on the CPU."""
        texts = list(prompts)
        outcomes: dict[int, Future[Outcome]] = {}
        for i, source in sorted(enumerate(self.sources), key=lambda item: not item[1].beside):
            work = functools.partial(
                score,
                videos=videos.cpu() if source.beside else videos,
                prompts=texts,
                needed=source.needed,
                retries=self.config.retries,
                timeout=self.config.timeout_seconds,
            )
            outcomes[i] = source.caller.submit(work)
        return Pending(self, texts, [outcomes[i] for i in sorted(outcomes)])

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Scores:
        """`submit`, and wait."""
        return self.submit(videos, prompts).result()

    def raw(self, videos: Tensor, prompts: Sequence[str], device: str) -> dict[str, Tensor]:
        """The parts as the rewards give them, called once, each float32 `[B]`; `device` is that of this process.

        Raises:
            RewardFailure: or what else the reward raises.
        """
        texts, here = list(prompts), videos.to(device)
        work = [source.call(videos if source.beside else here, texts) for source in self.sources]
        results = [future.result() for future in work]
        return {
            source.entry.named(part): values
            for source, parts in zip(self.sources, results)
            for part, values in parts.items()
        }

    def joined(self, prompts: Sequence[str], outcomes: Sequence[Outcome]) -> Scores:
        """The composite and all parts; a video that a reward failed on has none of them.

        Raises:
            RewardError: there is one, and `on_failure = stop`.
        """
        why: list[str | None] = [None] * len(prompts)
        parts: dict[str, Tensor] = {}
        notes: list[str] = []
        for source, outcome in zip(self.sources, outcomes):
            name = source.entry.name
            if outcome.note is not None:
                notes.append(f"reward {name!r}: {outcome.note}")
            if source.counts:
                why = [old or (error and f"reward {name!r}: {error}") for old, error in zip(why, outcome.errors)]
            for part, values in outcome.parts.items():
                own = source.entry.named(part)
                if part in source.entry.normalisation:
                    mean, std = source.entry.normalisation[part]
                    parts[own + RAW], values = values, (values - mean) / std
                parts[own] = values
        composite = torch.zeros(len(prompts))
        for part, weight in self.weights.items():
            if weight != 0:
                composite = composite + weight * parts.get(part, torch.full_like(composite, torch.nan))
        for i in (~composite.isfinite()).nonzero().flatten().tolist():
            why[i] = why[i] or f"the composite is {float(composite[i])}"
        failed = torch.tensor([error is not None for error in why])
        for i in failed.nonzero().flatten().tolist():
            if self.config.on_failure == "stop":
                raise RewardError(
                    f"no score for prompt {prompts[i]!r}: {why[i]}\n"
                    "reward.on_failure = 'drop' would skip such samples and count them"
                )
            notes.append(f"dropped a sample of {prompts[i]!r}: {first_line(str(why[i]))}")
        return Scores(
            rewards=torch.where(failed, torch.nan, composite),
            parts={part: torch.where(failed, torch.nan, parts[part]) for part in sorted(parts)},
            retried=sum(outcome.retried for outcome in outcomes),
            notes=tuple(notes),
        )

    def check_share(self, scores: Scores) -> None:
        """After the scores of all ranks are there, on all of them.

        Raises:
            RewardError: more than `reward.max_dropped` of them failed.
        """
        dropped, count = scores.dropped, len(scores.rewards)
        if dropped > self.config.max_dropped * count:
            error = RewardError(
                f"{dropped} of {count} samples have no score, more than reward.max_dropped = "
                f"{self.config.max_dropped:g} of them; the last: {scores.notes[-1] if scores.notes else 'not known'}"
            )
            error.on_all_ranks = True
            raise error


class Judge(CompositeReward):
    """A reward that only looks on: its parts have no weights, and training never sees them.

    A video that it fails on has NaN for `Scores.rewards`, and 0 else.

    Args:
        name: as in `reward.name`.
        policy: what to do with a failure, and the longest wait.
        key: of the setting or option that holds the name, for messages.

    Raises:
        UserError: as `load_reward`.
    """

    def __init__(self, name: str, policy: RewardConfig, device: str = "cpu", key: str = "eval.judge") -> None:
        entry = RewardEntry(name=name, weights={})
        source = make_source(entry, key, device, policy.timeout_seconds, all_needed=True)
        super().__init__([source], policy)
        self.weights = {}


def made_up_videos(sampling: SamplingConfig) -> Tensor:
    """Noise on a ramp, float32 `[B, F, 3, H, W]` in [0, 1]: as many frames as the run's, two videos if it scores more
    than one at a time; smaller than the run's if those are large."""
    frames, height, width = sampling.num_frames, sampling.height, sampling.width
    if frames * height * width > SMALL:
        factor = min(height, width) / 64
        height, width = (max(32, round(side / factor / 16) * 16) for side in (height, width))
    noise = torch.rand(
        min(2, sampling.batch_size), frames, 3, height, width, generator=torch.Generator().manual_seed(0)
    )
    return (noise + torch.linspace(0, 1, width)) / 2
