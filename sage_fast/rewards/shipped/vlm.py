"""A vision-language model as a judge, behind any server of OpenAI's chat completions: vLLM, SGLang,
a hosted one.

Each video is one request: its frames as JPEG images, then a prompt that asks for lines such as
"Alignment Score (1-5): X". The lines of this form in the prompt are the parts of the reward. An
answer that does not hold each of them once, with a number in the range, is a failure; it never
becomes a score.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sage_fast.rewards.failure_policy import RewardFailure, SomeFailed
from sage_fast.rewards.http import Client, shown
from sage_fast.rewards.interface import Request
from sage_fast.rewards.shipped.frame_reward import levels
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import read_text

TEMPLATES = ("general", "unified-reward")
"""Prompts that come with the package: for any instruction model, and the published one of
UnifiedReward 2.0."""
_LINE = re.compile(r"^(\w[\w ]*) Score \((\d+)-(\d+)\): \w+ *$", re.MULTILINE)


class VLMReward(Client):
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
        super().__init__(url, "/chat/completions")
        if num_frames < 1:
            raise UserError(f"num_frames = {num_frames}: expected at least 1")
        self.template = _read_template(template)
        self.parts = [_part(name) for name, _, _ in _LINE.findall(self.template)]
        if (
            not self.parts
            or len({*self.parts}) < len(self.parts)
            or "{prompt}" not in self.template
        ):
            wanted = "expected {prompt} and one 'Name Score (1-5): X' per part"
            raise UserError(f"template = {template!r}: {wanted}, got {self.parts}")
        self.num_frames, self.api_key = num_frames, api_key
        self.fields = {"model": model, "temperature": 0, "max_tokens": 4096} | dict(
            extra_body or {}
        )

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
        if not video.isfinite().all():
            return "the video has values that are not finite"
        text = self.template
        if "{seconds}" in text:
            if fps is None:
                return (
                    "the template asks for {seconds}, and the frame rate of the videos is not known"
                )
            text = text.replace("{seconds}", f"{len(video) / fps:.3g}")
        count = min(self.num_frames, len(video))
        images = [_data_url(video[i * len(video) // count]) for i in range(count)]
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": image}} for image in images
        ]
        content.append({"type": "text", "text": text.replace("{prompt}", prompt)})
        body = self.fields | {"messages": [{"role": "user", "content": content}]}
        try:
            got = await self.post(json.dumps(body).encode(), seconds, self.api_key)
            choice = got["choices"][0]
            answer, ended = str(choice["message"]["content"]), choice["finish_reason"]
            self._answered = True
            if ended == "length":
                raise RewardFailure(
                    f"{self.url}: the answer was cut off at max_tokens: {shown(answer)}"
                )
            return self.parse(answer)
        except RewardFailure as error:
            return str(error)
        except (TypeError, KeyError, IndexError):
            return f"{self.url}: an answer that is no chat completion: {shown(got)}"

    def parse(self, answer: str) -> dict[str, float]:
        """Read the scores from the lines of an answer, which may be bold.

        Raises:
            RewardFailure: a line is missing, is there twice, or its number is out of range.
        """
        lines = [line.replace("*", "").strip() for line in answer.splitlines()]
        scores = {}
        for name, low, high in _LINE.findall(self.template):
            start = f"{name} Score ({low}-{high}):"
            found = [line.removeprefix(start).strip() for line in lines if line.startswith(start)]
            if len(found) != 1 or not re.fullmatch(r"\d+(\.\d+)?", found[0], re.ASCII):
                raise RewardFailure(f"expected one line '{start} X' in the answer {shown(answer)}")
            if not int(low) <= float(found[0]) <= int(high):
                raise RewardFailure(f"'{start} {found[0]}': expected {low} to {high}")
            scores[_part(name)] = float(found[0])
        return scores


def _read_template(template: str) -> str:
    path = (
        Path(__file__).with_name(f"vlm_{template}.txt") if template in TEMPLATES else Path(template)
    )
    try:
        return read_text(path)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"template = {template!r}: {nearest(template, TEMPLATES)}; or a text file"
        ) from error


def _part(name: str) -> str:
    return name.lower().replace(" ", "_")


def _data_url(frame: Tensor) -> str:
    """Return a frame `[3, H, W]` in [0, 1] as a JPEG data URL."""
    file = io.BytesIO()
    Image.fromarray(levels(frame).to(torch.uint8).permute(1, 2, 0).numpy()).save(
        file, "JPEG", quality=95
    )
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
