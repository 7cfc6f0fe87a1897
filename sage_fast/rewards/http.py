"""Rewards behind HTTP: the client, and the JSON format of `serve-reward` (docs/how-to/reward-server.md).

Videos travel as a safetensors file with one tensor `videos [B, F, 3, H, W]` in base64; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sage_fast.config.fields import is_unicode
from sage_fast.config.secrets import bare_address, masked, names_for_values, secret
from sage_fast.rewards.calls import checked
from sage_fast.rewards.failure_policy import Backend
from sage_fast.rewards.failures import RewardFailure
from sage_fast.rewards.interface import Metadata
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import json_value
from sage_fast.util.time_limit import TimeLimit

SCHEMA = "sage-fast-reward/1"
TOKEN = "SAGE_FAST_REWARD_TOKEN"
"""Environment variable with the password that a server expects and a run sends, so that no file holds it."""
MAX_ANSWER_BYTES = 64 * 2**20
SECONDS_TO_FIND = 20.0
"""How long a server that has never answered is tried, so that a wrong address fails early in a run."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a request is sent again: the first wait, and the cap on doubling."""
DTYPES = {torch.float16: 1.0, torch.float32: 1.0, torch.uint8: 255.0}
"""Dtypes in which videos may travel -> their largest value. The client sends float16, finer than a video file."""


class NoAnswer(RewardFailure):
    """A request had no answer, or not all of one, or the server cannot answer now: it is sent again."""


class Client(Backend):
    """A server that answers JSON with JSON. No connection stays open between requests.

    Args:
        url: address, such as http://127.0.0.1:8000.
        path: appended to it for every request.

    Raises:
        UserError: `url` is not an address.
    """

    in_background = True

    def __init__(self, url: str, path: str) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host or bare_address(url) != url:
            raise UserError(f"{bare_address(url)!r}: expected an address such as http://127.0.0.1:8000")
        self.url, self.address, self._answered = url, url.rstrip("/") + path, False
        self._tls = ssl.create_default_context()  # the system's certificates

    async def post(self, body: bytes, seconds: float, key: str) -> Any:
        """Send a request, again while it has no answer; return the JSON of an answer with status 200.

        Args:
            seconds: time limit of all attempts together; 0: none.
            key: bearer token; "" for none.

        Raises:
            RewardFailure: no answer in time, or the server answered with an error; its own words.
        """
        begun, wait, last = time.monotonic(), FIRST_WAIT, "no whole answer"
        try:
            async with _limited(seconds):
                while True:
                    try:
                        return await self._attempt(body, key)
                    except NoAnswer as error:
                        last = str(error)
                    if not self._answered and time.monotonic() > begun + SECONDS_TO_FIND:
                        break
                    await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # ranks fail together
                    wait = min(2 * wait, LONGEST_WAIT)
        except TimeoutError:
            pass
        raise RewardFailure(f"{self.url}: no scores within {time.monotonic() - begun:.0f} s; last: {last}")

    async def _attempt(self, body: bytes, key: str) -> Any:
        headers = [(b"Content-Type", b"application/json"), (b"Accept-Encoding", b"identity")]
        headers += [(b"Authorization", f"Bearer {key}".encode())] if key else []
        text = bytearray()
        try:
            async with (
                httpx.AsyncClient(timeout=None, trust_env=False, verify=self._tls) as client,
                client.stream("POST", self.address, content=body, headers=headers) as response,
            ):
                async for piece in response.aiter_raw():
                    text += piece
                    if len(text) > MAX_ANSWER_BYTES:
                        raise NoAnswer(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            if response.status_code == 200:
                return masked(json.loads(text))
        except httpx.LocalProtocolError:  # its text quotes the header
            raise RewardFailure(f"{self.url}: the token is no text that HTTP can send") from None
        except httpx.HTTPError as error:
            raise NoAnswer(f"{type(error).__name__}: {printable(names_for_values(str(error)))}") from error
        except (ValueError, RecursionError) as error:
            raise NoAnswer(f"an answer that is no JSON: {shown(text.decode(errors='backslashreplace'))}") from error
        why = f"status {response.status_code}: {_error_of(text)}"
        if response.status_code >= 500 or response.status_code in (408, 429):
            raise NoAnswer(why)
        self._answered = True
        raise RewardFailure(f"{self.url}: {why}")


@contextlib.asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after `seconds` as `TimeLimit` counts them, with a TimeoutError; 0: no limit."""

    async def expire(timeout: asyncio.Timeout) -> None:
        limit = TimeLimit(seconds)
        while not limit.is_over():
            await asyncio.sleep(limit.next_look)
        timeout.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as timeout:
        watch = asyncio.create_task(expire(timeout))
        try:
            yield
        finally:
            watch.cancel()


class HttpReward(Client):
    """A reward behind `sage-fast serve-reward`, or a server that speaks its format.

    Args:
        url: as for `Client`.

    Raises:
        UserError: `url` is not an address.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, "/score")

    def score(
        self,
        videos: Tensor,
        prompts: list[str],
        metadata: list[Metadata],
        seconds: float,
        fps: float | None = None,
    ) -> dict[str, Tensor]:
        """Send one request; return each part, float32 `[B]`, NaN for null."""
        name = uuid.uuid4().hex
        answer = asyncio.run(self.post(format_request(videos, prompts, metadata, name, fps), seconds, token()))
        parts = checked(read_response(answer, name, self.url), len(prompts))
        self._answered = True
        return parts


def token() -> str:
    """Return the password of this process; "" if it has none."""
    return secret(TOKEN).strip()


# -- the format -------------------------------------------------------------------------------------------------------


def format_request(
    videos: Tensor, prompts: list[str], metadata: list[Metadata], name: str, fps: float | None = None
) -> bytes:
    """Format a request; it has the key `metadata` if a prompt has any, and `fps` if it is known."""
    known: dict[str, Any] = {"metadata": metadata} if any(metadata) else {}
    if fps is not None:
        known["fps"] = fps
    head = json.dumps({"schema": SCHEMA, "id": name, "prompts": prompts} | known)
    encoded = base64.b64encode(save({"videos": videos.detach().cpu().half().contiguous()}))
    return head[:-1].encode() + b', "videos": "' + encoded + b'"}'


def read_request(body: bytes) -> tuple[str, Tensor, list[str], list[Metadata], float | None]:
    """Parse a request: id, videos float32 `[B, F, 3, H, W]` in [0, 1], B prompts, the metadata of each, and the frames
    per second; None if it does not say.

    Raises:
        ValueError: the request is malformed; says what is wrong.
    """
    try:
        request = json.loads(body)
        name, prompts = request["id"], request["prompts"]
        metadata = request.get("metadata", [{}] * len(prompts))
        videos = load(base64.b64decode(request["videos"], validate=True))["videos"]
        texts = isinstance(prompts, list) and all(isinstance(t, str) and is_unicode(t) for t in (name, *prompts))
        if request["schema"] != SCHEMA or not texts or len(name) > 100:
            raise ValueError("another schema, an id or a prompt that is no text, or an id above 100 characters")
        if videos.ndim != 5 or videos.shape[2] != 3 or not videos.numel() or len(videos) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and videos {list(videos.shape)}")
        if len(metadata) != len(prompts) or not all(isinstance(of_one, dict) for of_one in metadata):
            raise ValueError(f"metadata that is no list of {len(prompts)} objects")
        fps = request.get("fps")
        is_rate = isinstance(fps, int | float) and not isinstance(fps, bool) and math.isfinite(fps) and fps > 0
        if fps is not None and not is_rate:
            raise ValueError(f"fps = {str(fps)[:60]}: expected frames per second above 0")
        return name, videos.float() / DTYPES[videos.dtype], prompts, metadata, fps
    except (TypeError, KeyError, ValueError, OverflowError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"expected an object with schema {SCHEMA!r}, an id, B prompts and videos [B, F, 3, H, W] "
            f"(docs/how-to/reward-server.md): {type(error).__name__}: {error}"
        ) from error


def format_response(name: str, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Format a response; values that are not finite become null."""
    values = {part: [*map(json_value, scores.tolist())] for part, scores in parts.items()}
    return {"schema": SCHEMA, "id": name, "parts": values}


def read_response(got: Any, name: str, url: str) -> dict[str, Tensor]:
    """Return the parts in the response to request `name`.

    Raises:
        RewardFailure: the response is malformed or answers another request.
    """
    try:
        if got["id"] != name:
            raise RewardFailure(f"{url}: answers request {shown(got['id'])} instead of {name!r}")
        return {
            part: torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float32)
            for part, values in got["parts"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise RewardFailure(f"{url}: an answer that is no {SCHEMA}: {shown(got)}") from error


def _error_of(body: bytearray) -> str:
    """Return the error in a response, or else its first bytes."""
    try:
        error = (answer := masked(json.loads(body))).get("error", answer)
        return printable(names_for_values(str(error["message"] if isinstance(error, dict) else error))[:4000])
    except (ValueError, AttributeError, KeyError, RecursionError):
        return shown(body.decode(errors="backslashreplace"))


def shown(answer: object) -> str:
    """Return the beginning of an answer, whose secrets are masked before it is cut: one may be a number."""
    return repr(names_for_values(str(answer))[:80])
