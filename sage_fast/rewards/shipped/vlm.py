"""A vision-language model as a judge, which scores each video alone.

Each video is one request: its frames as JPEG images, then a prompt that asks for lines such as
"Alignment Score (1-5): X". The lines of this form in the prompt are the parts of the reward. An
answer that does not hold each of them once, with a number in the range, is a failure; it never
becomes a score.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sage_fast.rewards.failure_policy import RewardFailure, SomeFailed
from sage_fast.rewards.interface import Request
from sage_fast.rewards.shipped.chat import (
    ChatClient,
    check_template,
    filled,
    part_of,
    read_template,
    text_of,
    value_of_line,
)

TEMPLATES = ("general", "unified-reward")
"""Prompts that come with the package: for any instruction model, and the published one of
UnifiedReward 2.0."""
_LINE = re.compile(r"^(\w[\w ]*) Score \((\d+)-(\d+)\): \w+ *$", re.MULTILINE)
_NUMBER = r"\d+(\.\d+)?"


class VLMReward(ChatClient):
    """Scores the parts that a prompt asks for, such as `alignment`, `physics` and `style`.

    Args:
        url: base URL of the server, such as http://127.0.0.1:8000/v1.
        model: name under which the server offers the model.
        template: one of `TEMPLATES`, or a text file with `{prompt}` and lines such as "Motion Score
            (1-10): X". `{seconds}` stands for the duration of the video.
        num_frames: number of evenly spaced frames, from the first on; shorter videos use all.
        api_key: bearer token; "" for none.
        extra_body: further fields of a request, which replace `temperature` 0 and `max_tokens`
            4096.

    Raises:
        UserError: an argument is not as expected.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        template: str = "general",
        num_frames: int = 16,
        api_key: str = "",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, model, num_frames, api_key, extra_body)
        self.template = read_template(template, TEMPLATES, "vlm")
        self.parts = [part_of(name) for name, _, _ in _LINE.findall(self.template)]
        check_template(template, self.template, self.parts, "Name Score (1-5): X")

    def score(self, request: Request, seconds: float) -> dict[str, Tensor]:
        """Send one request per video, all at once; return each part, float32 `[B]`.

        Raises:
            SomeFailed: there are no scores for some videos.
        """

        pairs = list(zip(request.videos, request.prompts))

        async def ask_all() -> list[dict[str, float] | str]:
            asked = [self._ask(video, prompt, seconds, request.fps) for video, prompt in pairs]
            return await asyncio.gather(*asked)

        answers = asyncio.run(ask_all())
        errors = {i: answer for i, answer in enumerate(answers) if isinstance(answer, str)}
        scores = [
            dict.fromkeys(self.parts, math.nan) if isinstance(answer, str) else answer
            for answer in answers
        ]
        parts = {part: torch.tensor([of_one[part] for of_one in scores]) for part in self.parts}
        if errors:
            raise SomeFailed(errors, parts)
        return parts

    async def _ask(
        self, video: Tensor, prompt: str, seconds: float, fps: float | None
    ) -> dict[str, float] | str:
        """Return the scores of one video, or why it has none."""
        try:
            text = filled(self.template, prompt, len(video), fps)
            return self.parse(await self.complete([*self.images(video), text_of(text)], seconds))
        except RewardFailure as error:
            return str(error)

    def parse(self, answer: str) -> dict[str, float]:
        """Read the scores from the lines of an answer, which may be bold.

        Raises:
            RewardFailure: a line is missing, is there twice, or its number is out of range.
        """
        scores = {}
        for name, low, high in _LINE.findall(self.template):
            start = f"{name} Score ({low}-{high}):"
            value = value_of_line(answer, start, _NUMBER)
            if not int(low) <= float(value) <= int(high):
                raise RewardFailure(f"'{start} {value}': expected {low} to {high}")
            scores[part_of(name)] = float(value)
        return scores
