"""Decode and score videos chunk by chunk, so that an iteration's videos are never all in memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sage_fast.models.decoder import Decoder
from sage_fast.rewards.interface import Pending, Scorer, Scores, join_scores
from sage_fast.rollout.groups import HeldVideo
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import RewardError
from sage_fast.util.meters import Stopwatch
from sage_fast.util.ranks import (
    all_gather_object,
    gather_objects_of_sequence,
    sequence_rank,
    sequence_size,
)

log = logging.getLogger(__name__)


def gather_scores(numbers: Sequence[int], scores: Scores) -> Scores:
    """Return the scores of all ranks, ordered by sample number; this rank's samples are `numbers`.

    Collective.
    """
    chunks: list[Scores] = []
    row_of: dict[int, int] = {}
    for numbers_of_rank, of_rank in all_gather_object((list(numbers), scores)):
        # the ranks of a sequence group have the same scores: the first of each is enough
        if not row_of.keys().isdisjoint(numbers_of_rank):
            continue
        chunks.append(of_rank)
        for number in numbers_of_rank:
            row_of[number] = len(row_of)
    return join_scores(chunks).in_order([row_of[number] for number in sorted(row_of)])


MOST_NOTES = 8
"""Largest number of failure lines per iteration or evaluation; further ones are only counted."""


def log_failures(scores: Scores) -> None:
    """Report failed rewards: on the screen of rank 0 and in the log of every rank."""
    lines = list(dict.fromkeys(scores.notes))
    for line in lines[:MOST_NOTES]:
        log.info(line)
    if len(lines) > MOST_NOTES:
        log.info(
            f"and {len(lines) - MOST_NOTES} more such lines; {scores.dropped} samples dropped in "
            "total"
        )


def gather_checked(
    reward: Scorer,
    numbers: Sequence[int],
    scores: Scores,
    compared: tuple[Sequence[int], Scores] | None = None,
) -> Scores:
    """Return the scores of all ranks, as `gather_scores` does, and report those that failed.
    Collective.

    Args:
        compared: numbers and scores of the samples that this rank compared, if a reward compares.

    Raises:
        RewardError: on all ranks, if more than a share `reward.max_dropped` of the samples failed.
    """
    scores = gather_scores(numbers, scores)
    if compared is not None:
        scores = scores.combined(gather_scores(*compared))
    log_failures(scores)
    reward.check_share(scores)
    return scores


def as_bytes(video: Tensor) -> Tensor:
    """Return a video in [0, 1] as uint8 on the CPU; values outside are clamped."""
    return (video.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()


class VideoScorer:
    """Decoder and scorer of one iteration's latents, chunk by chunk.

    The ranks of a sequence group all have the latents. They take turns at the chunks; `finish`
    returns all scores on every rank of the group.

    A reward in another process or behind HTTP scores its chunks in the background; only `finish`
    waits for the scores.

    Args:
        decoder: decodes latents into videos.
        reward: scores the videos.
        watch: receives the times of `decode` and `reward`.
        collective: other ranks' forwards wait for this rank's, so a reward failure is raised in
            `finish` only.
        fps: frames per second of the videos; None: not known.
        wanted: rows of this rank's samples whose videos are kept.

    Attributes:
        videos: row -> video, uint8 `[F, 3, H, W]` on the CPU, of those that are wanted; after
            `finish`.
        held: row -> video of all that this rank has decoded, if a reward compares the videos of a
            group.
    """

    def __init__(
        self,
        decoder: Decoder,
        reward: Scorer,
        watch: Stopwatch,
        *,
        collective: bool = False,
        fps: float | None = None,
        wanted: Collection[int] = (),
    ) -> None:
        self.decoder = decoder
        self.reward = reward
        self.fps = fps
        self.watch = watch
        self.collective = collective
        self.wanted = frozenset(wanted)
        self.videos: dict[int, Tensor] = {}
        self.held: dict[int, HeldVideo] = {}
        # The rank that decodes a chunk keeps what any rank of its sequence group wants.
        self._kept_here = self.wanted.union(*gather_objects_of_sequence(self.wanted))
        self._submitted = 0
        self._failure: RewardError | None = None
        self._scores: list[Pending | Scores] = []

    def submit(
        self, latents: Tensor, prompts: Sequence[PromptKey], seed: int = 0, rows: Sequence[int] = ()
    ) -> None:
        """Decode a chunk, `latents [B, C, T, H, W]`, and score its videos.

        Args:
            seed: of the random numbers that a reward draws.
            rows: row of each sample among those of this rank, for `videos` and `held`.

        Raises:
            RewardError: the reward failed, with `on_failure = stop` and without `collective`.
        """
        self._submitted += 1
        if (self._submitted - 1) % sequence_size() != sequence_rank():
            return
        with self.watch("decode"):
            videos = self.decoder(latents)
            for row, video in zip(rows, videos):
                self._keep(row, video)
        with self.watch("reward"):
            try:
                self._scores.append(self.reward.submit(videos, list(prompts), self.fps, seed))
            except RewardError as error:
                self._fail(error)
            self._collect(wait=False)

    def finish(self) -> Scores:
        """Return the scores of all chunks in order.

        Raises:
            RewardError: the reward failed on a chunk in the background (with `collective`, on any)
                and `on_failure = stop`.
        """
        if any(isinstance(scores, Pending) for scores in self._scores):
            with self.watch("reward"):
                self._collect(wait=True)
        local = [scores for scores in self._scores if isinstance(scores, Scores)]
        own_failure = None if self._failure is None else str(self._failure)
        ranks = gather_objects_of_sequence((local, own_failure, self.videos))
        if self._failure is not None:
            raise self._failure
        for _, failure, _ in ranks:
            if failure:
                raise RewardError(failure)

        decoded = {row: video for _, _, videos in ranks for row, video in videos.items()}
        self.videos = {row: decoded[row] for row in sorted(self.wanted)}

        in_turn = itertools.zip_longest(*(scores for scores, _, _ in ranks))
        return join_scores([scores for turn in in_turn for scores in turn if scores is not None])

    def _keep(self, row: int, video: Tensor) -> None:
        """Keep a video for as long as it is needed as a picture or for a comparison."""
        is_wanted, is_compared = row in self._kept_here, self.reward.compares_group
        if not (is_wanted or is_compared):
            return
        frames = as_bytes(video)
        if is_wanted:
            self.videos[row] = frames
        if is_compared:
            self.held[row] = HeldVideo(frames, self.fps)

    def _collect(self, *, wait: bool) -> None:
        """Collect the scores that are ready; with `wait`, wait for all."""
        for i, scores in enumerate(self._scores):
            if isinstance(scores, Pending) and (wait or scores.done()):
                try:
                    self._scores[i] = scores.result()
                except RewardError as error:
                    self._fail(error)

    def _fail(self, error: RewardError) -> None:
        if not self.collective:
            raise error
        self._failure = error
