"""Rewards behind HTTP: the client, and the JSON format of `serve-reward`
(docs/how-to/reward-server.md).

Videos travel as a safetensors file with one tensor `videos [B, F, 3, H, W]` in base64; nothing is
unpickled.
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

from sage_fast.config.fields import is_finite, is_unicode
from sage_fast.config.secrets import bare_address, names_for_values, secret
from sage_fast.rewards.failure_policy import MAX_TEXT, RewardFailure
from sage_fast.rewards.in_process import MAX_PARTS, checked
from sage_fast.rewards.interface import Backend, Request
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import json_value
from sage_fast.util.text import counted
from sage_fast.util.time_limit import TimeLimit

SCHEMA = "sage-fast-reward/1"
TOKEN = "SAGE_FAST_REWARD_TOKEN"
"""Environment variable with the password that a server expects and a run sends, so that no file
holds it."""
MAX_ANSWER_BYTES = 2**20
"""Largest answer: `MAX_PARTS` parts of hundreds of videos take less, and reading it takes no
time."""
MAX_JSON_VALUES = 100_000
"""Largest number of commas and brackets of a request beside its videos: each may become a Python
object."""
MAX_TENSOR_HEADER_BYTES = 4096
"""Largest header of the tensors of a request, which describes a single tensor."""
SECONDS_TO_FIND = 20.0
"""How long a server that has never answered is tried, so that a wrong address fails early in a run.
"""
FIRST_WAIT = 0.5
"""Seconds before a request is sent again the first time; each further wait is twice as long."""
LONGEST_WAIT = 30.0
"""Longest wait in seconds."""
_JITTER = random.Random()
"""Numbers of its own: those of the process belong to the run."""
DTYPES = {torch.float16: 1.0, torch.float32: 1.0, torch.uint8: 255.0}
"""Dtypes in which videos may travel -> their largest value.

The client sends float16, finer than a video file, and those of a group that is compared as uint8.
"""
NOT_IMPLEMENTED = 501
"""Status of a server that does not know a method; no later attempt would change it."""


class Refused(RewardFailure):
    """The server answered with an error that the same request would get again."""


class NoAnswer(RewardFailure):
    """A request had no answer, or not all of one, or the server cannot answer now: it is sent
    again."""


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
            raise UserError(
                f"{bare_address(url)!r}: expected an address such as http://127.0.0.1:8000"
            )
        self.url = url
        self.address = url.rstrip("/") + path
        self._answered = False
        self._tls = ssl.create_default_context()  # the system's certificates

    async def post(self, body: bytes, seconds: float, key: str) -> Any:
        """Send `body`; otherwise as `request`."""
        return await self.request("POST", body, seconds, key)

    async def request(self, method: str, body: bytes, seconds: float, key: str) -> Any:
        """Send a request, again while it has no answer; return the JSON of an answer with status
        200.

        Args:
            method: GET or POST.
            seconds: time limit of all attempts together; 0: none.
            key: bearer token; "" for none.

        Raises:
            Refused: the server answered with an error; its own words.
            RewardFailure: no answer in time.
        """
        begun = time.monotonic()
        wait = FIRST_WAIT
        last = "no whole answer"
        try:
            async with _limited(seconds):
                while True:
                    try:
                        return await self._attempt(method, body, key)
                    except NoAnswer as error:
                        last = str(error)
                    if not self._answered and time.monotonic() > begun + SECONDS_TO_FIND:
                        break
                    await asyncio.sleep(wait * _JITTER.uniform(0.5, 1.0))  # ranks fail together
                    wait = min(2 * wait, LONGEST_WAIT)
        except TimeoutError:
            pass
        raise RewardFailure(
            f"{self.url}: no scores within {time.monotonic() - begun:.0f} s; last: {last}"
        )

    async def _attempt(self, method: str, body: bytes, key: str) -> Any:
        headers = [(b"Content-Type", b"application/json"), (b"Accept-Encoding", b"identity")]
        if key:
            headers.append((b"Authorization", f"Bearer {key}".encode()))
        text = bytearray()
        try:
            async with (
                httpx.AsyncClient(timeout=None, trust_env=False, verify=self._tls) as client,
                client.stream(method, self.address, content=body, headers=headers) as response,
            ):
                async for piece in response.aiter_raw():
                    text += piece
                    if len(text) > MAX_ANSWER_BYTES:
                        raise NoAnswer(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            if response.status_code == 200:
                return json.loads(text, parse_constant=_no_number)
        except httpx.LocalProtocolError:  # its text quotes the header
            raise RewardFailure(f"{self.url}: the token is no text that HTTP can send") from None
        except httpx.HTTPError as error:
            raise NoAnswer(
                f"{type(error).__name__}: {printable(names_for_values(str(error)))}"
            ) from error
        except (ValueError, RecursionError) as error:
            why = f"an answer that is no JSON: {shown(text.decode(errors='backslashreplace'))}"
            if method == "GET":  # a page, of a server that does not know the question
                raise Refused(f"{self.url}: {why}") from error
            raise NoAnswer(why) from error
        why = f"status {response.status_code}: {_error_of(text)}"
        is_busy = response.status_code >= 500 or response.status_code in (408, 429)
        if is_busy and response.status_code != NOT_IMPLEMENTED:
            raise NoAnswer(why)
        self._answered = True
        raise Refused(f"{self.url}: {why}")


@contextlib.asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after `seconds` as `TimeLimit` counts them, with a TimeoutError; 0: no
    limit."""

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

    def ask(self, seconds: float) -> bool:
        """Ask the server; one that does not know the question scores each video alone."""
        try:
            answer = asyncio.run(self.request("GET", b"", seconds, token()))
        except Refused:
            answer = None
        self.compares_group = isinstance(answer, dict) and answer.get("compares_group") is True
        return self.compares_group

    def score(self, request: Request, seconds: float) -> dict[str, Tensor]:
        """Send one request; return each part, float64 `[B]`, NaN for null."""
        name = uuid.uuid4().hex
        body = format_request(request, name)
        answer = asyncio.run(self.post(body, seconds, token()))
        parts = checked(read_response(answer, name, self.url, len(request)), len(request))
        self._answered = True
        return parts


def _no_number(text: str) -> float:
    """Refuse NaN and Infinity, which are not JSON; a missing score is null."""
    raise ValueError(f"{text} is no JSON")


def token() -> str:
    """Return the password of this process; "" if it has none."""
    return secret(TOKEN).strip()


# -- the format ------------------------------------------------------------------------------------


def format_request(request: Request, name: str) -> bytes:
    """Format a request; it has the key `metadata` if a prompt has any, and `fps` if it is known."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "id": name,
        "prompts": request.prompts,
        "seed": request.seed,
    }
    if any(request.metadata):
        content["metadata"] = request.metadata
    if request.fps is not None:
        content["fps"] = request.fps
    head = json.dumps(content)
    videos = request.videos.detach().cpu()
    if videos.dtype != torch.uint8:
        videos = videos.half()
    encoded = base64.b64encode(save({"videos": videos.contiguous()}))
    return head[:-1].encode() + b', "videos": "' + encoded + b'"}'


def read_request(body: bytes) -> tuple[str, Request]:
    """Parse a request: its id, and videos float32 `[B, F, 3, H, W]` in [0, 1] with their prompts
    and metadata.

    Raises:
        ValueError: the request is malformed; says what is wrong.
    """
    try:
        # Base64 has none of these bytes, so what they count is the JSON beside the videos.
        values = sum(map(body.count, (b",", b"[", b"{")))
        if values > MAX_JSON_VALUES:
            raise ValueError(f"more than {MAX_JSON_VALUES:,} values beside the videos")
        content = json.loads(body)
        name = content["id"]
        prompts = content["prompts"]
        metadata = content.get("metadata", [{} for _ in prompts])
        fps = content.get("fps")
        seed = content.get("seed", 0)
        texts = isinstance(prompts, list) and all(
            isinstance(t, str) and is_unicode(t) for t in (name, *prompts)
        )
        if content["schema"] != SCHEMA or not texts or len(name) > 100:
            raise ValueError(
                "another schema, an id or a prompt that is no text, or an id above 100 characters"
            )
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError("a seed that is no whole number from 0 to 2^63 - 1")
        if fps is not None and not (_is_number_or_null(fps) and fps > 0):
            raise ValueError(f"fps = {str(fps)[:60]}: expected frames per second above 0")
        videos = _videos_of(base64.b64decode(content["videos"], validate=True))
        are_videos = videos.ndim == 5 and videos.shape[2] == 3 and videos.numel() > 0
        if not are_videos or len(videos) != len(prompts):
            raise ValueError(f"{counted(len(prompts), 'prompt')} and videos {list(videos.shape)}")
        are_objects = all(isinstance(of_one, dict) for of_one in metadata)
        if len(metadata) != len(prompts) or not are_objects:
            raise ValueError(f"metadata that is no list of {len(prompts)} objects")
        scaled = videos.float() / DTYPES[videos.dtype]
        return name, Request(videos=scaled, prompts=prompts, metadata=metadata, fps=fps, seed=seed)
    except (
        TypeError,
        KeyError,
        ValueError,
        OverflowError,
        RuntimeError,
        SafetensorError,
        RecursionError,
    ) as error:
        raise ValueError(
            f"expected an object with schema {SCHEMA!r}, an id, B prompts and videos [B, F, 3, H, "
            f"W] (docs/how-to/reward-server.md): {type(error).__name__}: {error}"
        ) from error


def _videos_of(content: bytes) -> Tensor:
    """Read the tensor `videos` of a safetensors file.

    Raises:
        ValueError: its header describes more than a tensor.
    """
    header = int.from_bytes(content[:8], "little")
    if header > MAX_TENSOR_HEADER_BYTES:
        raise ValueError(
            f"a header of {header:,} bytes; one tensor needs at most {MAX_TENSOR_HEADER_BYTES:,}"
        )
    return load(content)["videos"]


def format_response(name: str, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """Format a response; values that are not finite become null."""
    values = {part: [*map(json_value, scores.tolist())] for part, scores in parts.items()}
    return {"schema": SCHEMA, "id": name, "parts": values}


def read_response(got: Any, name: str, url: str, count: int) -> dict[str, list[float]]:
    """Return the parts in the response to request `name`, NaN for null.

    An answer is data: an object of this schema whose parts are lists of `count` JSON numbers or
        null.

    Raises:
        RewardFailure: it is anything else, or answers another request.
    """
    is_ours = isinstance(got, dict) and got.get("schema") == SCHEMA
    if not is_ours or not isinstance(got.get("parts"), dict):
        raise RewardFailure(f"{url}: an answer that is no {SCHEMA}: {shown(got)}")
    if got.get("id") != name:
        raise RewardFailure(f"{url}: answers request {shown(got.get('id'))} instead of {name!r}")
    if len(got["parts"]) > MAX_PARTS:
        raise RewardFailure(f"{url}: {len(got['parts']):,} parts; expected at most {MAX_PARTS}")
    for part, values in got["parts"].items():
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or not all(map(_is_number_or_null, values)):
            raise RewardFailure(
                f"{url}: part {shown(part)}: expected a list of {count} numbers or null, got "
                f"{shown(values)}"
            )
    return {
        part: [math.nan if value is None else float(value) for value in values]
        for part, values in got["parts"].items()
    }


def _is_number_or_null(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and is_finite(value))


def _error_of(body: bytearray) -> str:
    """Return the error in a response, or else its first bytes."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
        text = str(error["message"] if isinstance(error, dict) else error)
        return printable(names_for_values(text[:MAX_TEXT]))
    except (ValueError, AttributeError, KeyError, RecursionError):
        return shown(body.decode(errors="backslashreplace"))


def shown(answer: object) -> str:
    """Return the beginning of an answer, whose secrets are masked before it is cut: one may be a
    number."""
    return repr(names_for_values(str(answer)[:MAX_TEXT])[:80])
