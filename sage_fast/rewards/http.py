"""A reward behind HTTP: the client, and the one JSON form that both sides speak; docs/rewards.md shows it.

Videos travel as a safetensors file with one tensor `videos [B, F, 3, H, W]` in base64; nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import json
import math
import ssl
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sage_fast.rewards.errors import RewardFailure, TransportFailure
from sage_fast.util.errors import nearest

SCHEMA = "sage-fast-reward/1"
LARGEST_ANSWER = 64 * 2**20
"""Bytes."""
SECONDS_TO_FIND = 20.0
"""Patience with a server that has never answered: a wrong address is found at the start of a run."""

VideoType = Literal["float16", "float32", "uint8"]


class HttpReward:
    """The carrier of a reward on a server; nothing listens or is kept open between two calls.

    Args:
        url: such as http://127.0.0.1:8000.
        dtype: what the values of the videos are rounded to on the way: float16 is finer than the 8 bits of a file.
        retry_seconds: how long a request is sent again; 0 tries once.
        timeout_seconds: time limit of a request, in place of `reward.timeout_seconds`; 0: none.

    Raises:
        ValueError: not an address, or no such dtype.
    """

    beside = True

    def __init__(
        self, url: str, dtype: str = "float16", retry_seconds: float = 300.0, timeout_seconds: float | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"{url!r}: expected an address such as http://127.0.0.1:8000")
        if dtype not in get_args(VideoType):
            raise ValueError(f"dtype = {dtype!r}: {nearest(dtype, get_args(VideoType))}")
        self.url, self.dtype, self.retry_seconds, self._answered = url, dtype, float(retry_seconds), False
        self.timeout_seconds = None if timeout_seconds is None else float(timeout_seconds)
        self._host, self._port, self._path = parts.hostname, parts.port, f"{parts.path.rstrip('/')}/score"
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    @property
    def patience(self) -> float:
        return self.retry_seconds if self._answered else min(self.retry_seconds, SECONDS_TO_FIND)

    def score(self, videos: Tensor, prompts: list[str], seconds: float, name: str) -> dict[str, Tensor]:
        """Send one request; each part float32 `[B]`, NaN for null.

        Raises:
            TransportFailure: no connection, no answer in time, or a status of 500 and above or 429.
            RewardFailure: an answer that is an error, in the server's words.
        """
        limit = seconds if self.timeout_seconds is None else self.timeout_seconds
        try:
            status, text = self._post(question(videos, prompts, name, self.dtype), limit)
        except ssl.SSLError as error:
            raise RewardFailure(f"{self.url}: {error}") from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise TransportFailure(f"{self.url}: {type(error).__name__}: {error}") from error
        lost = status >= 500 or status == 429
        self._answered |= not lost
        if status != 200:
            raise (TransportFailure if lost else RewardFailure)(f"{self.url}: status {status}: {_words(text)}")
        return parts_of(text, name, self.url)

    def close(self) -> None:
        pass

    def _post(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        deadline = time.monotonic() + seconds if seconds else math.inf
        connection = self._connect(self._host, self._port, timeout=seconds or None)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
                connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = bytearray()
            while piece := response.read1(1 << 16):
                text += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer within {seconds:g} s")
                if len(text) > LARGEST_ANSWER:
                    raise http.client.HTTPException(f"an answer of more than {LARGEST_ANSWER} bytes")
            return response.status, bytes(text)
        finally:
            connection.close()


# -- the form ---------------------------------------------------------------------------------------------------------


def question(videos: Tensor, prompts: list[str], name: str, dtype: str) -> bytes:
    """A request."""
    values = videos.detach().cpu()
    values = (values * 255).round().to(torch.uint8) if dtype == "uint8" else values.to(getattr(torch, dtype))
    head = json.dumps({"schema": SCHEMA, "id": name, "prompts": prompts})
    encoded = base64.b64encode(save({"videos": values.contiguous()}))
    return head[:-1].encode() + b', "videos": "' + encoded + b'"}'


def read_question(body: bytes) -> tuple[str, Tensor, list[str]]:
    """Id, videos float32 `[B, F, 3, H, W]` in [0, 1], and B prompts.

    Raises:
        ValueError: it is no such request; says what is wrong.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(asked, dict) or asked.get("schema") != SCHEMA:
        raise ValueError(f"expected an object with schema {SCHEMA!r}")
    name, prompts = asked.get("id"), asked.get("prompts")
    if not isinstance(name, str) or len(name) > 100:
        raise ValueError("id: expected text of at most 100 characters")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts: expected a list of text")
    try:
        tensors = load(base64.b64decode(asked.get("videos", ""), validate=True))
    except (TypeError, ValueError, binascii.Error, SafetensorError) as error:
        raise ValueError(f"videos: expected a safetensors file in base64: {error}") from error
    videos = tensors.get("videos")
    if videos is None or videos.ndim != 5 or videos.shape[2] != 3 or not videos.numel():
        raise ValueError("videos: expected one tensor 'videos' [B, F, 3, H, W]")
    if len(videos) != len(prompts):
        raise ValueError(f"{len(videos)} videos and {len(prompts)} prompts")
    if str(videos.dtype).removeprefix("torch.") not in get_args(VideoType):
        raise ValueError(f"videos: expected {', '.join(get_args(VideoType))}, got {videos.dtype}")
    return name, videos.float() / (255 if videos.dtype == torch.uint8 else 1), prompts


def answer(name: str, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """A response; null for what is not finite."""
    values = {part: [x if math.isfinite(x) else None for x in scores.tolist()] for part, scores in parts.items()}
    return {"schema": SCHEMA, "id": name, "parts": values}


def parts_of(body: bytes, name: str, url: str) -> dict[str, Tensor]:
    """The parts of a response to the request of this id.

    Raises:
        RewardFailure: it is no such response.
    """
    try:
        got = json.loads(body)
        if got["id"] != name:
            raise RewardFailure(f"{url}: answers request {str(got['id'])[:40]!r} instead of {name!r}")
        return {
            str(part): torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float32)
            for part, values in got["parts"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RewardFailure(f"{url}: an answer that is no {SCHEMA}: {body[:80]!r}") from error


def _words(body: bytes) -> str:
    """The error of a response, or how it begins."""
    try:
        return str(json.loads(body)["error"])[:4000]
    except (ValueError, TypeError, KeyError, RecursionError):
        return repr(body[:80])
