"""The composite of one or several rewards that training maximises, and the judge, which is only logged."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from sage_fast.config.schema import Config, RewardConfig, RewardEntry, SamplingConfig
from sage_fast.rewards.backends import backend_class, check_prompts, connect
from sage_fast.rewards.caller import RewardCaller
from sage_fast.rewards.failure_policy import Outcome
from sage_fast.rewards.failures import RewardFailure
from sage_fast.rewards.interface import USUAL_FPS, Metadata, Pending, Reward, Scores
from sage_fast.util.captions import split_key
from sage_fast.util.errors import RewardError, UserError, first_line
from sage_fast.util.meters import JUDGE_PART, name_in_name
from sage_fast.util.ranks import local_device

TAKEN = ("reward", "overall", "file", "prompt", "image", "seed", "judge", "videos")
"""Columns of tables, and names under `heldout/` in trackers, beside the parts of a reward."""
SMALL = 2**22
"""Largest number of pixels of a made-up video that has the run's own size."""


class CompositeReward:
    """R = sum of weight x part (Eq. 33). A failure never becomes a number.

    Args:
        reward: one reward, called in this process; or callers, as created by `of`.
        config: weights, and what to do about failures.
        metadata: key of a prompt -> its metadata, for the rewards that take it; a prompt may have none.
    """

    def __init__(
        self,
        reward: Reward | Sequence[RewardCaller],
        config: RewardConfig,
        metadata: Mapping[str, Metadata] | None = None,
    ) -> None:
        if not isinstance(reward, Sequence):
            inline = backend_class("inline")(config.name, reward)
            reward = [RewardCaller(config, "reward.name", [inline], config, config.needed)]
        self.callers = list(reward)
        self.config, self.metadata = config, metadata or {}
        self.weights: Mapping[str, float] = config.part_weights
        self.parts: list[str] = []

    @classmethod
    def of(
        cls, config: RewardConfig, device: str = "cpu", metadata: Mapping[str, Metadata] | None = None
    ) -> CompositeReward:
        """Create the rewards that the settings name.

        Raises:
            UserError: a reward cannot be created; includes its traceback.
        """
        callers = [
            RewardCaller(entry, key, connect(entry, key, device), config, entry.needed)
            for key, entry in config.keyed_entries.items()
        ]
        return cls(callers, config, metadata)

    @property
    def names(self) -> list[str]:
        return [caller.entry.name for caller in self.callers]

    @property
    def at_a_time(self) -> int:
        """Number of calls worth making concurrently."""
        return max(1, min((caller.entry.workers for caller in self.callers), default=1))

    # -- before a run -------------------------------------------------------------------------------------------------

    def check(
        self, sampling: SamplingConfig, prompts: Sequence[str], device: str = "cpu", fps: float = USUAL_FPS
    ) -> None:
        """Score one or two made-up videos, check the result against the settings, and set `parts`.

        Args:
            prompts: keys of all prompts that it scores.
            device: device of the run's videos.
            fps: frames per second of the run's videos.

        Raises:
            UserError: a reward fails, returns no finite score, does not return `[B]` for each part, or lacks a part
                that has a weight; or two rewards return a part of the same name.
            RewardError: an in-process reward timed out and its thread cannot be killed.
        """
        videos = dummy_videos(sampling).to(device)
        keys = [prompts[i % len(prompts)] for i in range(len(videos))]
        texts, metadata = self._told(keys)
        found: dict[str, str] = {}
        for caller in self.callers:
            entry, where = caller.entry, f"{caller.key} = {caller.entry.name!r}"
            check_prompts(entry, caller.key, {prompt: self.metadata.get(prompt, {}) for prompt in prompts})
            made_up = f"made-up videos {list(videos.shape)} of {keys[0]!r}"
            try:
                with torch.random.fork_rng(devices=[]):
                    parts = caller.call(videos, texts, metadata, fps).result()
            except RewardFailure as error:
                not_created = str(error).startswith(where)
                raise UserError(str(error) if not_created else f"{where}: failed on {made_up}: {error}") from error
            if missing := sorted(entry.needed - parts.keys()):
                section = caller.key.removesuffix("name")
                raise UserError(f"{section}weights names {missing[0]!r}; reward {entry.name!r} returns {sorted(parts)}")
            for part in sorted(parts if caller.needed is None else caller.needed):
                if not parts[part].isfinite().any():
                    raise UserError(f"{where}: part {part!r} is {parts[part].tolist()} on {made_up}; expected numbers")
            for name in map(entry.named, parts):
                if name in found:
                    raise UserError(f"{where}: returns {name!r}, and so does {found[name]!r}; give one a prefix")
                found[name] = entry.name
        self.parts = sorted(found)

    # -- scores -------------------------------------------------------------------------------------------------------

    def submit(self, videos: Tensor, prompts: Sequence[str], fps: float | None = None) -> Pending:
        """Score `videos [B, F, 3, H, W]`: in the background if the reward is outside this process, else right away.

        Args:
            prompts: keys; a reward gets the text of each.
            fps: frames per second of the videos; None: not known.
        """
        texts, metadata = self._told(prompts)
        order = sorted(range(len(self.callers)), key=lambda i: not self.callers[i].in_background)
        futures = {i: self.callers[i].score(videos, texts, metadata, fps) for i in order}
        return Pending([futures[i] for i in sorted(futures)], functools.partial(self._join, list(prompts)))

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float | None = None) -> Scores:
        """Call `submit` and wait for the scores."""
        return self.submit(videos, prompts, fps).result()

    def raw(
        self, videos: Tensor, prompts: list[str], metadata: list[Metadata], device: str, fps: float | None = None
    ) -> dict[str, Tensor]:
        """Call each reward once; return each part, float32 `[B]`.

        Args:
            device: device of this process.
            fps: frames per second of the videos; None: not known.

        Raises:
            RewardFailure: a reward failed.
            RewardError: an in-process reward timed out and its thread cannot be killed.
        """
        here = videos.to(device)
        futures = [
            caller.call(videos if caller.in_background else here, prompts, metadata, fps) for caller in self.callers
        ]
        return {
            caller.entry.named(part): values
            for caller, future in zip(self.callers, futures)
            for part, values in future.result().items()
        }

    def _told(self, keys: Sequence[str]) -> tuple[list[str], list[Metadata]]:
        """Return the texts and the metadata that rewards get."""
        return [split_key(key)[0] for key in keys], [self.metadata.get(key, {}) for key in keys]

    def _join(self, prompts: list[str], outcomes: list[Outcome]) -> Scores:
        """Join the rewards' results to the composite and all parts; all are NaN for a video without a score.

        Raises:
            RewardError: a video has no score, and `on_failure = stop`.
        """
        why: dict[int, str] = {}
        parts: dict[str, Tensor] = {}
        notes: list[str] = []
        for caller, outcome in zip(self.callers, outcomes):
            who = f"reward {caller.entry.name!r}"
            if outcome.note is not None:
                notes.append(f"{who}: {outcome.note}")
            if caller.needed != set():  # an empty set: the reward is only logged
                why = {i: f"{who}: {error}" for i, error in outcome.errors.items()} | why
            parts |= {caller.entry.named(part): values for part, values in outcome.parts.items()}
        composite = torch.zeros(len(prompts))
        for part, weight in self.weights.items():
            if weight != 0:
                composite = composite + weight * parts.get(part, torch.full_like(composite, torch.nan))
        for i in (~composite.isfinite()).nonzero().flatten().tolist():
            why.setdefault(i, f"the composite is {float(composite[i])}")
        for i, reason in sorted(why.items()):
            if self.config.on_failure == "stop":
                hint = "reward.on_failure = 'drop' would skip such samples and count them"
                raise RewardError(f"no score for prompt {prompts[i]!r}: {reason}\n{hint}")
            notes.append(f"dropped a sample of {prompts[i]!r}: {first_line(reason)}")
        failed = torch.zeros(len(prompts), dtype=torch.bool)
        failed[list(why)] = True
        return Scores(
            rewards=torch.where(failed, torch.nan, composite),
            parts={part: torch.where(failed, torch.nan, parts[part]) for part in sorted(parts)},
            retried=sum(outcome.retried for outcome in outcomes),
            notes=tuple(notes),
        )

    def check_share(self, scores: Scores) -> None:
        """Check the share of failed samples, given the scores of all ranks, on every rank.

        Raises:
            RewardError: more than a share `reward.max_dropped` failed.
        """
        dropped, count = scores.dropped, len(scores.rewards)
        if dropped > Fraction(str(self.config.max_dropped)) * count:
            error = RewardError(
                f"{dropped} of {count} samples have no score, more than reward.max_dropped = "
                f"{self.config.max_dropped:g} of them; the last: {scores.notes[-1] if scores.notes else 'not known'}"
            )
            error.on_all_ranks = True
            raise error


class Judge(CompositeReward):
    """A reward that is only logged: its parts have no weights, and training never sees them.

    `Scores.rewards` is NaN for a video it fails on, and 0 otherwise.

    Args:
        name: as in `reward.name`.
        policy: what to do about failures, and the timeout.
        key: setting or option that holds the name, for messages.
        metadata: as of `CompositeReward`.

    Raises:
        UserError: as `load_reward`.
    """

    def __init__(
        self,
        name: str,
        policy: RewardConfig,
        device: str = "cpu",
        key: str = "eval.judge",
        metadata: Mapping[str, Metadata] | None = None,
    ) -> None:
        entry = RewardEntry(name=name, weights={})
        caller = RewardCaller(entry, key, connect(entry, key, device), policy, needed=None)
        super().__init__([caller], policy, metadata)
        self.weights = {}


def dummy_videos(sampling: SamplingConfig) -> Tensor:
    """Return noise on a ramp, float32 `[B, F, 3, H, W]` in [0, 1].

    The number of frames is the run's; so is the size, unless that is large. B is 2 if the run scores batches, else 1.
    """
    frames, height, width = sampling.num_frames, sampling.height, sampling.width
    if frames * height * width > SMALL:
        factor = min(height, width) / 64
        height, width = (max(32, round(side / factor / 16) * 16) for side in (height, width))
    shape = min(2, sampling.batch_size), frames, 3, height, width
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return (noise + torch.linspace(0, 1, width)) / 2


def load_rewards(
    config: Config,
    prompts: Sequence[str],
    eval_prompts: Sequence[str],
    metadata: Mapping[str, Metadata],
    fps: float = USUAL_FPS,
) -> tuple[CompositeReward, Judge | None]:
    """Load the reward and, if named, the judge; check each on one or two dummy videos of these prompts.

    Args:
        fps: frames per second of the run's videos.

    Raises:
        UserError: one is missing or does not fit.
    """
    device = str(local_device())
    reward, judge = CompositeReward.of(config.reward, device, metadata), None
    reward.check(config.sampling, [*prompts, *eval_prompts], device, fps)
    for part in reward.parts:
        if part in TAKEN or part.startswith(JUDGE_PART):
            who = " and ".join(map(repr, reward.names))
            raise UserError(f"reward {who}: part {part!r} has a name of tables; give it a reward.prefix, such as my_")
    _check_no_folders(reward)
    if config.eval.judge is not None:
        judge = Judge(config.eval.judge, config.reward, device, metadata=metadata)
        judge.check(config.sampling, eval_prompts, device, fps)
        _check_no_folders(judge)
    return reward, judge


def _check_no_folders(reward: CompositeReward) -> None:
    """Check that no part's name is the folder of another's, which trackers that keep metrics as files cannot hold.

    Raises:
        UserError: there are such parts.
    """
    if found := name_in_name(reward.parts):
        who, (folder, inside) = " and ".join(map(repr, reward.names)), found
        raise UserError(
            f"reward {who}: part {folder!r} is the folder of part {inside!r}, which trackers cannot hold; expected "
            f"another name, such as {folder + '_mean'!r}"
        )
