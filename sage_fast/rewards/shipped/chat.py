"""Client of a vision-language model behind a server of OpenAI's chat completions: vLLM, SGLang, a
hosted one.

A template is a text with `{prompt}` and with lines that the answer repeats; the name of each line
is a part of the reward. An answer without one of the lines is a failure, never a score.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sage_fast.rewards.failure_policy import RewardFailure
from sage_fast.rewards.http import Client, shown
from sage_fast.rewards.shipped.frame_reward import levels
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import read_text

Content = list[dict[str, Any]]
"""Texts and images of a message."""


class ChatClient(Client):
    """Asks a model about videos.

    Args:
        url: base URL of the server, such as http://127.0.0.1:8000/v1.
        model: name under which the server offers the model.
        num_frames: number of evenly spaced frames of a video, from the first on; shorter videos use
            all.
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
        num_frames: int,
        api_key: str,
        extra_body: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(url, "/chat/completions")
        if num_frames < 1:
            raise UserError(f"num_frames = {num_frames}: expected at least 1")
        self.num_frames = num_frames
        self.api_key = api_key
        self.fields = {"model": model, "temperature": 0, "max_tokens": 4096} | dict(
            extra_body or {}
        )

    def images(self, video: Tensor) -> Content:
        """Return frames of a video `[F, 3, H, W]`, in [0, 1] or uint8.

        Raises:
            RewardFailure: it has values that are not finite.
        """
        if not video.isfinite().all():
            raise RewardFailure("the video has values that are not finite")
        count = min(self.num_frames, len(video))
        urls = [_data_url(video[i * len(video) // count]) for i in range(count)]
        return [{"type": "image_url", "image_url": {"url": url}} for url in urls]

    async def complete(self, content: Content, seconds: float) -> str:
        """Return the model's answer.

        Args:
            seconds: time limit; 0: none.

        Raises:
            RewardFailure: there is no whole answer.
        """
        body = self.fields | {"messages": [{"role": "user", "content": content}]}
        got = await self.post(json.dumps(body).encode(), seconds, self.api_key)
        try:
            choice = got["choices"][0]
            answer, ended = str(choice["message"]["content"]), choice["finish_reason"]
        except (TypeError, KeyError, IndexError) as error:
            raise RewardFailure(
                f"{self.url}: an answer that is no chat completion: {shown(got)}"
            ) from error
        self._answered = True
        if ended == "length":
            raise RewardFailure(
                f"{self.url}: the answer was cut off at max_tokens: {shown(answer)}"
            )
        return answer


def text_of(text: str) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}


def read_template(template: str, offered: Sequence[str], prefix: str) -> str:
    """Return the text of a template.

    Args:
        template: one of `offered`, or a text file.
        offered: names of those of the package, in files `<prefix>_<name>.txt`.

    Raises:
        UserError: there is no such file.
    """
    path = Path(template)
    if template in offered:
        path = Path(__file__).with_name(f"{prefix}_{template}.txt")
    try:
        return read_text(path)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"template = {template!r}: {nearest(template, offered)}; or a text file"
        ) from error


def check_template(template: str, text: str, parts: Sequence[str], line: str) -> None:
    """Check that a template has `{prompt}`, and each part once.

    Args:
        template: the setting.
        parts: parts that its lines name.
        line: an example of such a line.

    Raises:
        UserError: it has not.
    """
    if not parts or len({*parts}) < len(parts) or "{prompt}" not in text:
        wanted = f"expected {{prompt}} and one {line!r} per part"
        raise UserError(f"template = {template!r}: {wanted}, got {list(parts)}")


def filled(text: str, prompt: str, frames: int, fps: float | None) -> str:
    """Return a template with its prompt and, where it asks for `{seconds}`, the duration.

    Raises:
        RewardFailure: it asks for the duration, and the frame rate is not known.
    """
    if "{seconds}" in text:
        if fps is None:
            raise RewardFailure(
                "the template asks for {seconds}, and the frame rate of the videos is not known"
            )
        text = text.replace("{seconds}", f"{frames / fps:.3g}")
    return text.replace("{prompt}", prompt)


def part_of(name: str) -> str:
    """Return the part that a line of a template names."""
    return name.lower().replace(" ", "_")


def value_of_line(answer: str, start: str, pattern: str) -> str:
    """Return what follows `start` in the one line of an answer that begins so; it may be bold.

    Raises:
        RewardFailure: there is no such line, or there are two, or what follows does not match.
    """
    lines = [line.replace("*", "").strip() for line in answer.splitlines()]
    found = [line.removeprefix(start).strip() for line in lines if line.startswith(start)]
    if len(found) != 1 or not re.fullmatch(pattern, found[0], re.ASCII):
        raise RewardFailure(f"expected one line '{start} X' in the answer {shown(answer)}")
    return found[0]


def _data_url(frame: Tensor) -> str:
    """Return a frame `[3, H, W]`, in [0, 1] or uint8, as a JPEG data URL."""
    if frame.dtype != torch.uint8:
        frame = levels(frame).to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(frame.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=95)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
