"""The composite of one or several rewards that training maximises, and the judge, which is only
logged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from fractions import Fraction
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.reward_names import CLIENTS
from sage_fast.config.schema import Config, RewardConfig, RewardEntry, SamplingConfig
from sage_fast.rewards.failure_policy import Outcome, RewardFailure, score_or_drop
from sage_fast.rewards.in_process import InProcess
from sage_fast.rewards.interface import (
    RESERVED_NAMES,
    USUAL_FPS,
    Backend,
    Metadata,
    Pending,
    Request,
    Reward,
    Scores,
)
from sage_fast.rewards.load import check_prompts, device_of, load_reward
from sage_fast.rewards.worker import Worker
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import RewardError, UserError, first_line
from sage_fast.util.futures import fulfil
from sage_fast.util.launchers import launched
from sage_fast.util.meters import JUDGE_PART, name_in_name
from sage_fast.util.ranks import check_agreement, local_device

MAX_DUMMY_PIXELS = 2**22
"""Largest number of pixels of a made-up video that has the run's own size."""


Jobs = queue.Queue[tuple[Future[Any], Callable[[Backend], Any]] | None]


def connect(entry: RewardEntry, key: str, device: str, given: Any = None) -> list[Backend]:
    """Create a reward's backends: in this process, in worker processes, or as clients of its
    server.

    Args:
        key: setting that holds the name, for messages.
        device: device of this rank.
        given: the reward itself, where the program has it; worker processes import their own.

    Raises:
        UserError: as `load_reward`; in a worker process, its first call fails instead.
    """
    if entry.is_address or entry.name in CLIENTS:
        return [load_reward(entry, key, device) for _ in range(max(1, entry.workers))]
    rank = launched("LOCAL_RANK", 0)
    if entry.workers:
        numbers = range(rank * entry.workers, (rank + 1) * entry.workers)
        return [Worker(entry, key, device_of(entry, device, number)) for number in numbers]
    own = device_of(entry, device, rank)
    reward = load_reward(entry, key, own, given)
    return [InProcess(entry.name, reward, own)]


class RewardCaller:
    """One reward of a composite: called directly in this process, else on one daemon thread per
    backend.

    Args:
        entry: settings of the reward.
        key: setting that holds its name, for messages.
        backends: its backends, which work in parallel.
        config: retries and time limit.
        needed: parts that must be finite; None: all.

    Attributes:
        compares_group: whether it compares the videos of a group; of one outside this process it
            is not known before `ask`.
    """

    def __init__(
        self,
        entry: RewardEntry,
        key: str,
        backends: Sequence[Backend],
        config: RewardConfig,
        needed: set[str] | None,
    ) -> None:
        self.entry = entry
        self.key = key
        self.needed = needed
        self.in_background = backends[0].in_background
        self.compares_group = backends[0].compares_group
        self._backends = backends
        self._config = config
        self._jobs: Jobs = queue.Queue(maxsize=len(backends))
        if self.in_background:
            for backend in backends:
                threading.Thread(target=_work, args=(self._jobs, backend), daemon=True).start()
            # At exit it comes before multiprocessing waits for the children; a fork does not run
            # it.
            self.close = Finalize(self, _close, (self._jobs, backends), exitpriority=0)

    def ask(self) -> None:
        """Learn whether the reward compares the videos of a group.

        Raises:
            RewardFailure: there is no answer.
        """
        seconds = self._config.timeout_seconds
        self.compares_group = self._submit(lambda backend: backend.ask(seconds)).result()

    def score(self, request: Request) -> Future[Outcome]:
        """Schedule the scoring of a batch by the failure policy; block while every thread has a job
        in the queue."""
        needed, config, as_a_whole = self.needed, self._config, self.compares_group
        own = self._reachable(request)
        return self._submit(
            lambda backend: score_or_drop(backend, own, needed, config, as_a_whole=as_a_whole)
        )

    def call(self, request: Request) -> Future[dict[str, Tensor]]:
        """Schedule a single call, whose failure is raised; block as `score` does."""
        seconds = self._config.timeout_seconds
        own = self._reachable(request)
        return self._submit(lambda backend: backend.score(own, seconds))

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of its networks that could leave the device."""
        return sum(backend.bytes_on(device) for backend in self._backends)

    def park(self, device: torch.device) -> None:
        """Have its networks on the device only while they score."""
        for backend in self._backends:
            backend.park(device)

    def _reachable(self, request: Request) -> Request:
        """Return the request with its videos where the reward can reach them."""
        if not self.in_background:
            return request
        return dataclasses.replace(request, videos=request.videos.cpu())

    def _submit(self, function: Callable[[Backend], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.in_background:
            self._jobs.put((future, function))
        else:
            future.set_result(function(self._backends[0]))
        return future


def _work(jobs: Jobs, backend: Backend) -> None:
    while (job := jobs.get()) is not None:
        fulfil(*job, backend)
        del job  # otherwise an idle thread would keep the last videos alive


def _close(jobs: Jobs, backends: Sequence[Backend]) -> None:
    """End the backends and threads."""
    for backend in backends:
        backend.close()
        with contextlib.suppress(queue.Full):
            jobs.put_nowait(None)


class CompositeReward:
    """R = sum of weight x part (Eq. 33). A failure never becomes a number.

    Args:
        reward: one reward, called in this process; or callers, as created by `of`.
        config: weights, and what to do about failures.
        metadata: key of a prompt -> its metadata, for the rewards that take it; a prompt may have
            none.

    Attributes:
        parts: names of the parts that the check before a run found.
        owners: part -> setting that holds the name of the reward that returns it.
    """

    reserved: Collection[str] = RESERVED_NAMES
    """Names that its parts must not have."""

    def __init__(
        self,
        reward: Reward | Sequence[RewardCaller],
        config: RewardConfig,
        metadata: Mapping[PromptKey, Metadata] | None = None,
    ) -> None:
        if not isinstance(reward, Sequence):
            backend = InProcess(config.name, reward)
            reward = [RewardCaller(config, "reward.name", [backend], config, config.needed)]
        self.callers = list(reward)
        self.config = config
        self.metadata = metadata or {}
        self.weights: Mapping[str, float] = config.part_weights
        self.parts: list[str] = []
        self.owners: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        config: RewardConfig,
        device: str = "cpu",
        metadata: Mapping[PromptKey, Metadata] | None = None,
        *,
        least_workers: int = 0,
        objects: Mapping[str, Any] | None = None,
    ) -> CompositeReward:
        """Create the rewards that the settings name.

        Args:
            objects: setting that holds the name of a reward -> the reward itself, as
                `rewards.objects.name_rewards` returns them.
            least_workers: least number of worker processes of each; a server has 1, so that a call
                that hangs is ended.

        Raises:
            UserError: a reward cannot be created; includes its traceback.
        """
        callers = []
        for key, named in config.keyed_entries.items():
            entry = dataclasses.replace(named, workers=max(least_workers, named.workers))
            backends = connect(entry, key, device, (objects or {}).get(key))
            callers.append(RewardCaller(entry, key, backends, config, entry.needed))
        return cls(callers, config, metadata)

    @property
    def names(self) -> list[str]:
        return [caller.entry.name for caller in self.callers]

    @property
    def comparing(self) -> list[str]:
        """Settings that name a reward which compares the videos of a group."""
        return [caller.key for caller in self.callers if caller.compares_group]

    @property
    def compares_group(self) -> bool:
        return bool(self.comparing)

    @property
    def pointwise_weights(self) -> dict[str, float]:
        return _weights_of(caller for caller in self.callers if not caller.compares_group)

    @property
    def at_a_time(self) -> int:
        """Number of calls worth making concurrently."""
        return max(1, min((caller.entry.workers for caller in self.callers), default=1))

    # -- before a run ------------------------------------------------------------------------------

    def check(
        self,
        sampling: SamplingConfig,
        prompts: Sequence[PromptKey],
        device: str = "cpu",
        fps: float = USUAL_FPS,
    ) -> None:
        """Ask each reward whether it compares the videos of a group, have it score one or two
        made-up videos, check the result against the settings, and set `parts`.

        Args:
            prompts: keys of all prompts that it scores.
            device: device of the run's videos.
            fps: frames per second of the run's videos.

        Raises:
            UserError: a reward fails, returns no finite score, does not return `[B]` for each part,
                or lacks a part that has a weight; or two rewards return a part of the same name.
        """
        owners: dict[str, str] = {}
        for caller in self.callers:
            entry = caller.entry
            where = f"{caller.key} = {entry.name!r}"
            check_prompts(
                entry, caller.key, {prompt: self.metadata.get(prompt, {}) for prompt in prompts}
            )
            made_up = "made-up videos"
            try:
                caller.ask()
                videos, keys = dummy_batch(
                    sampling, prompts, device, compares_group=caller.compares_group
                )
                made_up = f"made-up videos {list(videos.shape)} of {str(keys[0])!r}"
                parts = caller.call(self._request(videos, keys, fps, seed=0)).result()
            except RewardFailure as error:
                not_created = str(error).startswith(where)
                raise UserError(
                    str(error) if not_created else f"{where}: failed on {made_up}: {error}"
                ) from error
            missing = sorted(entry.needed - parts.keys())
            if missing:
                section = caller.key.removesuffix("name")
                raise UserError(
                    f"{section}weights names {missing[0]!r}; reward {entry.name!r} returns "
                    f"{sorted(parts)}"
                )
            for part in sorted(parts if caller.needed is None else caller.needed):
                if not parts[part].isfinite().any():
                    raise UserError(
                        f"{where}: part {part!r} is {parts[part].tolist()} on {made_up}; expected "
                        "numbers"
                    )
            fault = self._fault_of_names(caller, parts, owners)
            if fault:
                raise UserError(f"{where}: {fault}")
            owners |= dict.fromkeys(map(entry.named, parts), caller.key)
        self.owners = owners
        self.parts = sorted(owners)

    # -- scores ------------------------------------------------------------------------------------

    def submit(
        self, videos: Tensor, prompts: Sequence[PromptKey], fps: float | None = None, seed: int = 0
    ) -> Pending:
        """Score `videos [B, F, 3, H, W]` by the rewards that score each video alone: in the
        background if a reward is outside this process, else right away.

        Args:
            prompts: keys; a reward gets the text of each.
            fps: frames per second of the videos; None: not known.
            seed: of the random numbers that the rewards draw.
        """
        callers = [caller for caller in self.callers if not caller.compares_group]
        broken: list[int] = []
        if self.compares_group:
            # `compare` could not tell: it gets them as uint8.
            broken = [i for i, video in enumerate(videos) if not video.isfinite().all()]
        return self._start(callers, self._request(videos, prompts, fps, seed), prompts, broken)

    def compare(
        self, videos: Tensor, prompt: PromptKey, fps: float | None = None, seed: int = 0
    ) -> Pending:
        """Score a group, `[G, F, 3, H, W]`, by the rewards that compare its videos; when and where,
        and the other arguments, as of `submit`."""
        callers = [caller for caller in self.callers if caller.compares_group]
        prompts = [prompt for _ in videos]
        return self._start(callers, self._request(videos, prompts, fps, seed), prompts)

    def __call__(
        self, videos: Tensor, prompts: Sequence[PromptKey], fps: float | None = None, seed: int = 0
    ) -> Scores:
        """Call `submit` and wait for the scores."""
        return self.submit(videos, prompts, fps, seed).result()

    def raw(self, request: Request, device: str) -> dict[str, Tensor]:
        """Call each reward once; return each part, `[B]`.

        Args:
            device: device of this process.

        Raises:
            RewardFailure: a reward failed.
        """
        here = dataclasses.replace(request, videos=request.videos.to(device))
        futures = [
            caller.call(request if caller.in_background else here) for caller in self.callers
        ]
        owners = dict(self.owners)
        joined: dict[str, Tensor] = {}
        for caller, future in zip(self.callers, futures):
            parts = future.result()
            if fault := self._fault_of_names(caller, parts, owners):
                raise RewardFailure(f"reward {caller.entry.name!r}: {fault}")
            named = {caller.entry.named(part): values for part, values in parts.items()}
            owners |= dict.fromkeys(named, caller.key)
            joined |= named
        return joined

    def _fault_of_names(
        self, caller: RewardCaller, parts: Iterable[str], owners: Mapping[str, str]
    ) -> str | None:
        """Return what is wrong with the names of a reward's parts; None if nothing is.

        Args:
            owners: part -> setting of the reward that has returned it.
        """
        for name in map(caller.entry.named, parts):
            if owners.get(name, caller.key) != caller.key:
                other = owners[name].removesuffix(".name")
                return f"returns {name!r}, and so does {other}; give one a prefix"
            if name in self.reserved or (self.reserved and name.startswith(JUDGE_PART)):
                return (
                    f"part {name!r} has a reserved name of tables; give it a reward.prefix, such "
                    "as my_"
                )
        return None

    def _request(
        self, videos: Tensor, keys: Sequence[PromptKey], fps: float | None, seed: int
    ) -> Request:
        """Return what rewards get: videos, texts and metadata."""
        texts = [key.text for key in keys]
        metadata = [self.metadata.get(key, {}) for key in keys]
        return Request(videos=videos, prompts=texts, metadata=metadata, fps=fps, seed=seed)

    def _start(
        self,
        callers: Sequence[RewardCaller],
        request: Request,
        prompts: Sequence[PromptKey],
        broken: Iterable[int] = (),
    ) -> Pending:
        """Start to score a request by some of the rewards; arguments as of `_join`."""
        # First those in the background, so that they score beside the others.
        order = sorted(range(len(callers)), key=lambda i: not callers[i].in_background)
        futures = {i: callers[i].score(request) for i in order}
        join = functools.partial(self._join, callers, prompts, broken)
        return Pending([futures[i] for i in sorted(futures)], join)

    def _join(
        self,
        callers: Sequence[RewardCaller],
        prompts: Sequence[PromptKey],
        broken: Iterable[int],
        outcomes: Sequence[Outcome],
    ) -> Scores:
        """Join some rewards' results to their share of the composite and their parts; all are NaN
        for a video without a score.

        Args:
            callers: the rewards.
            prompts: keys of the prompts.
            broken: videos that have no score whatever a reward says: some pixels are not finite.
            outcomes: of each reward.

        Raises:
            RewardError: a video has no score, and `on_failure = stop`.
        """
        why = dict.fromkeys(broken, "the video has values that are not finite")
        owners = dict(self.owners)
        parts: dict[str, Tensor] = {}
        notes: list[str] = []
        for caller, outcome in zip(callers, outcomes):
            who = f"reward {caller.entry.name!r}"
            if outcome.note is not None:
                notes.append(f"{who}: {outcome.note}")
            if caller.needed != set():  # an empty set: the reward is only logged
                why = {i: f"{who}: {error}" for i, error in outcome.errors.items()} | why
            # The check before the run may have seen other parts of this reward.
            if fault := self._fault_of_names(caller, outcome.parts, owners):
                if caller.needed == set():
                    notes.append(f"{who}: {fault}")
                else:
                    why = dict.fromkeys(range(len(prompts)), f"{who}: {fault}") | why
                continue
            named = {caller.entry.named(part): values for part, values in outcome.parts.items()}
            owners |= dict.fromkeys(named, caller.key)
            parts |= named
        composite = torch.zeros(len(prompts))
        for part, weight in _weights_of(callers).items():
            if weight != 0:
                lacking = torch.full_like(composite, torch.nan)
                composite = composite + weight * parts.get(part, lacking)
        for i in (~composite.isfinite()).nonzero().flatten().tolist():
            why.setdefault(i, f"the composite is {float(composite[i])}")
        for i, reason in sorted(why.items()):
            if self.config.on_failure == "stop":
                hint = "reward.on_failure = 'drop' would skip such samples and count them"
                raise RewardError(f"no score for prompt {str(prompts[i])!r}: {reason}\n{hint}")
            notes.append(f"dropped a sample of {str(prompts[i])!r}: {first_line(reason)}")
        failed = torch.zeros(len(prompts), dtype=torch.bool)
        failed[list(why)] = True
        return Scores(
            rewards=torch.where(failed, torch.nan, composite),
            parts={part: torch.where(failed, torch.nan, parts[part]) for part in sorted(parts)},
            retried=sum(outcome.retried for outcome in outcomes),
            notes=tuple(notes),
        )

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of the rewards' networks in this process that could leave the device."""
        return sum(caller.bytes_on(device) for caller in self.callers)

    def park(self, device: torch.device) -> None:
        """Have the networks of rewards in this process on the device only while they score."""
        for caller in self.callers:
            caller.park(device)

    def close(self) -> None:
        """End its worker processes. What is called in this process goes on working."""
        for caller in self.callers:
            if caller.in_background:
                caller.close()

    def check_share(self, scores: Scores) -> None:
        """Check the share of failed samples, given the scores of all ranks, on every rank.

        Raises:
            RewardError: more than a share `reward.max_dropped` failed.
        """
        dropped, count = scores.dropped, len(scores.rewards)
        if dropped > Fraction(str(self.config.max_dropped)) * count:
            error = RewardError(
                f"{dropped} of {count} samples have no score, more than reward.max_dropped = "
                f"{self.config.max_dropped:g} of them; the last: "
                f"{scores.notes[-1] if scores.notes else 'not known'}"
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

    reserved = ()

    def __init__(
        self,
        name: str,
        policy: RewardConfig,
        device: str = "cpu",
        key: str = "eval.judge",
        metadata: Mapping[PromptKey, Metadata] | None = None,
    ) -> None:
        entry = RewardEntry(name=name, weights={})
        caller = RewardCaller(entry, key, connect(entry, key, device), policy, needed=None)
        super().__init__([caller], policy, metadata)
        self.weights = {}

    def check(
        self,
        sampling: SamplingConfig,
        prompts: Sequence[PromptKey],
        device: str = "cpu",
        fps: float = USUAL_FPS,
    ) -> None:
        """Check it as `CompositeReward.check`.

        Raises:
            UserError: also, if it compares the videos of a group.
        """
        super().check(sampling, prompts, device, fps)
        if self.compares_group:
            [caller] = self.callers
            raise UserError(
                f"{caller.key} = {caller.entry.name!r}: compares the videos of a prompt, so its "
                "scores do not rise when all videos become better; expected a reward that scores "
                "each video alone, such as clipscore"
            )


def _weights_of(callers: Iterable[RewardCaller]) -> dict[str, float]:
    """Return the weights of these rewards' parts, by the names of the metrics."""
    weights: dict[str, float] = {}
    for caller in callers:
        weights |= caller.entry.named_weights
    return weights


def dummy_batch(
    sampling: SamplingConfig,
    prompts: Sequence[PromptKey],
    device: torch.device | str,
    *,
    compares_group: bool,
) -> tuple[Tensor, list[PromptKey]]:
    """Return made-up videos, float32 `[B, F, 3, H, W]` in [0, 1], and the keys of their prompts.

    B is 2 if the run scores batches, else 1. A reward that compares the videos of a group gets two
    of one prompt.
    """
    if compares_group:
        return dummy_videos(sampling, 2).to(device), [prompts[0], prompts[0]]
    videos = dummy_videos(sampling, min(2, sampling.batch_size)).to(device)
    return videos, [prompts[i % len(prompts)] for i in range(len(videos))]


def dummy_videos(sampling: SamplingConfig, count: int) -> Tensor:
    """Return noise on a ramp, float32 `[count, F, 3, H, W]` in [0, 1].

    The number of frames is the run's; so is the size, unless that is large.
    """
    frames, height, width = sampling.num_frames, sampling.height, sampling.width
    if frames * height * width > MAX_DUMMY_PIXELS:
        factor = min(height, width) / 64
        height, width = (max(32, round(side / factor / 16) * 16) for side in (height, width))
    shape = count, frames, 3, height, width
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return (noise + torch.linspace(0, 1, width)) / 2


def load_rewards(
    config: Config,
    prompts: Sequence[PromptKey],
    eval_prompts: Sequence[PromptKey],
    metadata: Mapping[PromptKey, Metadata],
    fps: float = USUAL_FPS,
    objects: Mapping[str, Any] | None = None,
) -> tuple[CompositeReward, Judge | None]:
    """Load the reward and, if named, the judge; check each on one or two dummy videos of these
    prompts. Collective.

    Args:
        fps: frames per second of the run's videos.
        objects: as of `CompositeReward.of`.

    Raises:
        UserError: one is missing or does not fit, or ranks have another reward than others.
    """
    device = str(local_device())
    reward = CompositeReward.of(config.reward, device, metadata, objects=objects)
    judge = None
    reward.check(config.sampling, [*prompts, *eval_prompts], device, fps)
    check_agreement(
        {"whether the reward compares the videos of a group": reward.compares_group},
        hint=": it decides what the ranks send each other",
    )
    _check_no_folders(reward)
    if config.eval.judge is not None:
        judge = Judge(config.eval.judge, config.reward, device, metadata=metadata)
        judge.check(config.sampling, eval_prompts, device, fps)
        _check_no_folders(judge)
    return reward, judge


def _check_no_folders(reward: CompositeReward) -> None:
    """Check that no part's name is the folder of another's, which trackers that keep metrics as
    files cannot hold.

    Raises:
        UserError: there are such parts.
    """
    found = name_in_name(reward.parts)
    if found:
        folder, inside = found
        who = " and ".join(map(repr, reward.names))
        raise UserError(
            f"reward {who}: part {folder!r} is the folder of part {inside!r}, which trackers "
            f"cannot hold; expected another name, such as {folder + '_mean'!r}"
        )
