"""Rewards chunk by chunk, so that the videos of an iteration are never held all at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from sage_fast.distributed import all_gather_object, gather_objects_of_sequence, sequence_rank, sequence_size
from sage_fast.errors import RewardError, UserError
from sage_fast.metrics import Stopwatch
from sage_fast.policy.decode import PendingVideos, VideoDecoder
from sage_fast.rewards import CompositeReward

Scores = tuple[Tensor, dict[str, Tensor]]
"""Composite reward `[N]` and its parts, each `[N]`."""


def join_scores(chunks: Sequence[Scores]) -> Scores:
    """One after the other; a part that is missing in one chunk after a failure is dropped from all."""
    names = [name for name in chunks[0][1] if all(name in parts for _, parts in chunks)]
    parts = {name: torch.cat([parts[name] for _, parts in chunks]) for name in names}
    return torch.cat([rewards for rewards, _ in chunks]), parts


def gather_scores(numbers: Sequence[int], scores: Scores) -> Scores:
    """The scores of all ranks, in the order of the samples' numbers; this rank's samples have `numbers`."""
    ranks = all_gather_object((list(numbers), scores))[:: sequence_size()]  # ranks that share samples have the same
    places = {number: place for place, number in enumerate(number for numbers, _ in ranks for number in numbers)}
    order = [places[number] for number in sorted(places)]
    rewards, parts = join_scores([scores for _, scores in ranks])
    return rewards[order], {part: values[order] for part, values in parts.items()}


class VideoScorer:
    """Decodes and scores the latents of one iteration.

    On a GPU the decode of a chunk runs beside what the caller does after `submit`, such as the rollout of the next
    chunk. One chunk's videos exist at a time: those of the last one are scored before the next is decoded.

    Ranks that share samples all have the latents, and take turns: each decodes and scores its share of the chunks, and
    `finish` gives every one of them the scores of all.

    Args:
        decoder: makes the videos.
        reward: scores them.
        watch: takes the seconds of `decode`, without those hidden behind a rollout, and of `reward`.
        in_step: other ranks' forwards wait for this one's, so that a reward that fails is an error in `finish` alone.
    """

    def __init__(
        self, decoder: VideoDecoder, reward: CompositeReward, watch: Stopwatch, *, in_step: bool = False
    ) -> None:
        self.decoder = decoder
        self.reward = reward
        self.watch = watch
        self.in_step = in_step
        self._pending: tuple[PendingVideos, list[str]] | None = None
        self._submitted = 0
        self._failure: RewardError | UserError | None = None
        self._scores: list[Scores] = []

    def submit(self, latents: Tensor, prompts: Sequence[str]) -> None:
        """Score the chunk before this one, then begin to decode `latents [B, C, T, H, W]`.

        Raises:
            RewardError: the reward failed on the chunk before, `on_failure = stop`, and no rank is waiting.
        """
        self._submitted += 1
        if (self._submitted - 1) % sequence_size() != sequence_rank():
            return
        self._score_pending()
        with self.watch("decode", wait=False):
            self._pending = (self.decoder.submit(latents), list(prompts))

    def finish(self) -> Scores:
        """Score the last chunk; the scores of all, in order.

        Raises:
            RewardError: the reward failed on it, and `on_failure = stop`; with `in_step`, on any chunk.
        """
        self._score_pending()
        ranks = gather_objects_of_sequence((self._scores, self._failure and str(self._failure)))
        if self._failure is not None:
            raise self._failure
        if failure := next((failure for _, failure in ranks if failure), None):
            raise RewardError(failure)
        in_turn = itertools.zip_longest(*(scores for scores, _ in ranks))
        return join_scores([scores for turn in in_turn for scores in turn if scores is not None])

    def _score_pending(self) -> None:
        if self._pending is None:
            return
        pending, prompts = self._pending
        self._pending = None
        with self.watch("decode"):
            videos = pending.result()
        with self.watch("reward"):
            try:
                self._scores.append(self.reward(videos, prompts))
            except (RewardError, UserError) as error:
                if not self.in_step:
                    raise
                self._failure = error
