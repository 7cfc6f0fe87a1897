"""Rewards chunk by chunk, so that the videos of an iteration are never held all at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from sage_fast.console import Say, say_nothing
from sage_fast.distributed import all_gather_object, gather_objects_of_sequence, sequence_rank, sequence_size
from sage_fast.errors import RewardError
from sage_fast.metrics import Stopwatch
from sage_fast.models.decoder import Decoder, PendingVideos
from sage_fast.rewards.interface import Pending, Scorer, Scores, join_scores


def gather_scores(numbers: Sequence[int], scores: Scores) -> Scores:
    """The scores of all ranks, in the order of the samples' numbers; this rank's samples have `numbers`."""
    ranks = all_gather_object((list(numbers), scores))[:: sequence_size()]  # ranks that share samples have the same
    places = {number: place for place, number in enumerate(number for numbers, _ in ranks for number in numbers)}
    return join_scores([scores for _, scores in ranks]).in_order([places[number] for number in sorted(places)])


MOST_NOTES = 8
"""Lines of an iteration or evaluation on what failed; the rest are counted."""


def tell_failures(scores: Scores, tell: Say) -> None:
    """Name what failed, on the first rank and in the logs of all."""
    lines = list(dict.fromkeys(scores.notes))
    for line in lines[:MOST_NOTES]:
        tell(line)
    if len(lines) > MOST_NOTES:
        tell(f"and {len(lines) - MOST_NOTES} lines like these; {scores.dropped} samples dropped in all")


class VideoScorer:
    """Decodes and scores the latents of one iteration.

    On a GPU the decode of a chunk runs beside what the caller does after `submit`, such as the rollout of the next
    chunk. One chunk's videos exist at a time: those of the last one are scored before the next is decoded.

    Ranks that share samples all have the latents, and take turns: each decodes and scores its share of the chunks, and
    `finish` gives every one of them the scores of all.

    What scores in processes of its own, or behind HTTP, is given a chunk and not waited for until `finish`.

    Args:
        decoder: makes the videos.
        reward: scores them.
        watch: takes the seconds of `decode` and `reward`, without those hidden behind a rollout.
        tell: told what failed.
        in_step: other ranks' forwards wait for this one's, so that a reward that fails is an error in `finish` alone.
    """

    def __init__(
        self,
        decoder: Decoder,
        reward: Scorer,
        watch: Stopwatch,
        tell: Say = say_nothing,
        *,
        in_step: bool = False,
    ) -> None:
        self.decoder = decoder
        self.reward = reward
        self.watch = watch
        self.tell = tell
        self.in_step = in_step
        self._pending: tuple[PendingVideos, list[str]] | None = None
        self._submitted = 0
        self._failure: RewardError | None = None
        self._scores: list[Pending | Scores] = []
        self._finished: Scores | None = None

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
        if any(isinstance(scores, Pending) for scores in self._scores):
            with self.watch("reward"):
                self._collect(wait=True)
        own = [scores for scores in self._scores if isinstance(scores, Scores)]
        ranks = gather_objects_of_sequence((own, self._failure and str(self._failure)))
        if self._failure is not None:
            raise self._failure
        if failure := next((failure for _, failure in ranks if failure), None):
            raise RewardError(failure)
        in_turn = itertools.zip_longest(*(scores for scores, _ in ranks))
        self._finished = join_scores([scores for turn in in_turn for scores in turn if scores is not None])
        return self._finished

    def gather(self, numbers: Sequence[int]) -> Scores:
        """After `finish`, the scores of all ranks as of `gather_scores`.

        Raises:
            RewardError: on all ranks, if more than `reward.max_dropped` of them failed.
        """
        assert self._finished is not None
        scores = gather_scores(numbers, self._finished)
        tell_failures(scores, self.tell)
        self.reward.check_share(scores)
        return scores

    def _score_pending(self) -> None:
        if self._pending is None:
            return
        pending, prompts = self._pending
        self._pending = None
        with self.watch("decode"):
            videos = pending.result()
        with self.watch("reward"):
            try:
                self._scores.append(self.reward.submit(videos, prompts))
            except RewardError as error:
                self._fail(error)
            self._collect(wait=False)

    def _collect(self, *, wait: bool) -> None:
        """Take the scores that are there; with `wait`, all."""
        for i, scores in enumerate(self._scores):
            if isinstance(scores, Pending) and (wait or scores.done()):
                try:
                    self._scores[i] = scores.result()
                except RewardError as error:
                    self._fail(error)

    def _fail(self, error: RewardError) -> None:
        if not self.in_step:
            raise error
        self._failure = error
