"""A vision-language model as a judge, which compares the videos of a prompt in pairs.

Each comparison is one request: the frames of two videos as JPEG images, then a prompt that asks
for lines such as "Motion Winner (1, 2 or tie): X". The lines of this form in the prompt are the
parts of the reward. Each pair is asked about in both orders, since models prefer the first video or
the second. The scores of a part are those of `bradley_terry`.

A comparison without an answer, in either order, takes its pair out. A video without a pair that
counts has no scores.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.rewards.failure_policy import RewardFailure, SomeFailed
from sage_fast.rewards.interface import Request
from sage_fast.rewards.shipped.bradley_terry import bradley_terry
from sage_fast.rewards.shipped.chat import (
    ChatClient,
    check_template,
    filled,
    part_of,
    read_template,
    text_of,
    value_of_line,
)
from sage_fast.util.errors import UserError, first_line

log = logging.getLogger(__name__)

TEMPLATES = ("general",)
"""Prompts that come with the package, for any instruction model."""
POINTS = {"1": 1.0, "2": 0.0, "tie": 0.5}
"""Answer -> points of the video that is shown first."""
_LINE = re.compile(r"^(\w[\w ]*) Winner \(1, 2 or tie\): \w+ *$", re.MULTILINE)

Answer = dict[str, float]
"""Part -> points of the video that was shown first."""
Answers = dict[tuple[int, int], Answer | str]
"""(video that was shown first, second) -> answer, or why there is none."""


class VLMPairsReward(ChatClient):
    """Scores the parts that a prompt asks for, such as `alignment`, `motion` and `quality`, of the
    videos of one prompt.

    Args:
        url: base URL of the server, such as http://127.0.0.1:8000/v1.
        model: name under which the server offers the model.
        template: one of `TEMPLATES`, or a text file with `{prompt}` and lines such as "Motion
            Winner (1, 2 or tie): X". `{seconds}` stands for the duration of a video.
        num_frames: number of evenly spaced frames of each of two videos, from the first on; shorter
            videos use all.
        opponents: how many other videos each one is compared with, an even number; None: all.
        concurrent: largest number of requests at a time.
        api_key: bearer token; "" for none.
        extra_body: further fields of a request, which replace `temperature` 0 and `max_tokens`
            4096.

    Raises:
        UserError: an argument is not as expected.
    """

    compares_group = True

    def __init__(
        self,
        url: str,
        model: str,
        *,
        template: str = "general",
        num_frames: int = 8,
        opponents: int | None = None,
        concurrent: int = 16,
        api_key: str = "",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, model, num_frames, api_key, extra_body)
        is_whole = isinstance(opponents, int)
        if opponents is not None and (not is_whole or opponents < 2 or opponents % 2):
            nearest = max(2, 2 * math.ceil(opponents / 2))
            raise UserError(
                f"opponents = {opponents}: expected an even number from 2 on, such as {nearest}, "
                "or null for all"
            )
        if not isinstance(concurrent, int) or concurrent < 1:
            raise UserError(f"concurrent = {concurrent}: expected a whole number from 1 on")
        self.opponents = opponents
        self.concurrent = concurrent
        self.template = read_template(template, TEMPLATES, "vlm_pairs")
        self.parts = [part_of(name) for name in _LINE.findall(self.template)]
        check_template(template, self.template, self.parts, "Name Winner (1, 2 or tie): X")

    def calls_of_group(self, count: int) -> int:
        """Return the number of requests for a group of `count` videos."""
        return 2 * len(pairs_of(count, self.opponents))

    def score(self, request: Request, seconds: float) -> dict[str, Tensor]:
        """Compare the videos of one prompt; return each part, float64 `[G]`.

        Args:
            seconds: time limit of all comparisons together; 0: none.

        Raises:
            SomeFailed: some videos have no comparison that counts.
        """
        pairs = pairs_of(len(request), self.opponents)
        answers = asyncio.run(self._ask_all(request, pairs, seconds))

        valid: list[tuple[int, int]] = []
        failures: dict[int, str] = {}
        for i, j in pairs:
            why = _failure(answers[i, j], answers[j, i])
            if why is None:
                valid.append((i, j))
            else:
                failures |= {i: why, j: why}
        if failures:
            why = first_line(next(iter(failures.values())))
            dropped = len(pairs) - len(valid)
            log.info(f"dropped {dropped} of {len(pairs)} pairs of {request.prompts[0]!r}: {why}")

        parts = {}
        for part in self.parts:
            parts[part] = bradley_terry(_wins(part, valid, answers, len(request)))
        compared = {i for pair in valid for i in pair}
        alone = {i: why for i, why in failures.items() if i not in compared}
        if alone:
            for values in parts.values():
                values[list(alone)] = torch.nan
            raise SomeFailed(alone, parts)
        return parts

    async def _ask_all(
        self, request: Request, pairs: Sequence[tuple[int, int]], seconds: float
    ) -> Answers:
        """Return the answer to each pair in each order, or why there is none."""
        begun = time.monotonic()
        turns = asyncio.Semaphore(self.concurrent)
        images = functools.cache(lambda i: self.images(request.videos[i]))
        frames = request.videos.shape[1]

        def left() -> float:
            """Return the seconds that are left; 0: no limit."""
            if seconds == 0:
                return 0.0
            rest = begun + seconds - time.monotonic()
            if rest <= 0:
                raise RewardFailure(f"{self.url}: no time for it within {seconds:g} s")
            return rest

        async def ask(first: int, second: int) -> Answer | str:
            async with turns:
                try:
                    text = filled(self.template, request.prompts[0], frames, request.fps)
                    content = [text_of("Video 1:"), *images(first)]
                    content += [text_of("Video 2:"), *images(second), text_of(text)]
                    return self.parse(await self.complete(content, left()))
                except RewardFailure as error:
                    return str(error)

        orders = [*pairs, *((j, i) for i, j in pairs)]
        asked = await asyncio.gather(*(ask(*order) for order in orders))
        return dict(zip(orders, asked))

    def parse(self, answer: str) -> Answer:
        """Read the winners from the lines of an answer, which may be bold.

        Raises:
            RewardFailure: a line is missing, is there twice, or names no winner.
        """
        points = {}
        for name in _LINE.findall(self.template):
            value = value_of_line(answer, f"{name} Winner (1, 2 or tie):", "(?i)1|2|tie")
            points[part_of(name)] = POINTS[value.lower()]
        return points


def _failure(*answers: Answer | str) -> str | None:
    """Return why one of the answers is missing; None if all are there."""
    return next((answer for answer in answers if isinstance(answer, str)), None)


def _wins(part: str, pairs: Sequence[tuple[int, int]], answers: Answers, count: int) -> Tensor:
    """Return how often each of `count` videos won against each other, float64 `[count, count]`; the
    pairs have an answer in both orders."""
    wins = torch.zeros(count, count, dtype=torch.float64)
    for first, second in [*pairs, *((j, i) for i, j in pairs)]:
        answer = answers[first, second]
        assert not isinstance(answer, str)
        wins[first, second] += answer[part]
        wins[second, first] += 1 - answer[part]
    return wins


def pairs_of(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs that are compared, each once.

    With fewer `opponents` than there are, the videos stand in a ring, and each is compared with its
    nearest neighbours on both sides. So a chain of comparisons joins all of them.
    """
    if opponents is None or opponents >= count - 1:
        return [(i, j) for i in range(count) for j in range(i + 1, count)]
    distances = range(1, opponents // 2 + 1)
    return [(i, (i + distance) % count) for i in range(count) for distance in distances]
