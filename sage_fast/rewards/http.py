"""Rewards behind HTTP: the client, and the JSON format of `serve-reward` (docs/how-to/reward-server.md).

Videos travel as a safetensors file with one tensor `videos [B, F, 3, H, W]` in base64; nothing is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sage_fast.config.fields import is_unicode
from sage_fast.config.secrets import bare_address, names_for_values
from sage_fast.rewards.errors import RewardFailure, TransportFailure
from sage_fast.rewards.interface import Metadata
from sage_fast.rewards.load import checked
from sage_fast.util.errors import UserError, nearest, printable
from sage_fast.util.files import json_value

SCHEMA = "sage-fast-reward/1"
TOKEN = "SAGE_FAST_REWARD_TOKEN"
"""Environment variable with the password that a server expects and a run sends, so that no file holds it."""
LARGEST_ANSWER = 64 * 2**20
"""Largest accepted answer in bytes."""
SECONDS_TO_FIND = 20.0
"""Patience in seconds with a server that has never answered, so that a wrong address fails early in a run."""


VideoType = Literal["float16", "float32", "uint8"]


class Client:
    """A server that answers JSON with JSON. No connection stays open between requests.

    Args:
        url: address, such as http://127.0.0.1:8000.
        path: appended to it for every request.
        retry_seconds: how long a failed request is sent again; 0 tries once.

    Raises:
        UserError: `url` is not an address.
    """

    in_background = True

    def __init__(self, url: str, path: str, retry_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or bare_address(url) != url:
            raise UserError(f"{bare_address(url)!r}: expected an address such as http://127.0.0.1:8000")
        self.url, self.retry_seconds, self._answered = url, float(retry_seconds), False
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/") + path
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    @property
    def patience(self) -> float:
        return self.retry_seconds if self._answered else min(self.retry_seconds, SECONDS_TO_FIND)

    def close(self) -> None:
        pass

    def _post(self, body: bytes, seconds: float, key: str) -> Any:
        """Send a request with a key, or "" for none; return the JSON of an answer with status 200.

        Raises:
            TransportFailure: no connection, no whole answer in time, no JSON, or status 408, 429 or at least 500.
            RewardFailure: the server answered with an error; its own words.
        """
        try:
            status, text = self._exchange(body, seconds, key)
        except ssl.SSLError as error:
            raise RewardFailure(f"{self.url}: {error}") from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise TransportFailure(f"{self.url}: {type(error).__name__}: {printable(str(error))}") from error
        if status != 200:
            lost = status >= 500 or status in (408, 429)
            self._answered |= not lost
            why = names_for_values(f"{self.url}: status {status}: {_error_of(text)}")
            raise (TransportFailure if lost else RewardFailure)(why)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TransportFailure(f"{self.url}: an answer that is no JSON: {text[:80]!r}") from error

    def _exchange(self, body: bytes, seconds: float, key: str) -> tuple[int, bytes]:
        end = time.monotonic() + seconds
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection = self._connect(self._host, self._port, timeout=seconds or None)
        try:
            connection.connect()
            with _at_most(end - time.monotonic(), connection.sock) if seconds else contextlib.nullcontext():
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
                    connection.request("POST", self._path, body, headers)
                response = connection.getresponse()
                text = bytearray()
                while piece := response.read1(1 << 16):
                    text += piece
                    if len(text) > LARGEST_ANSWER:
                        raise http.client.HTTPException(f"an answer of more than {LARGEST_ANSWER} bytes")
                if response.length:
                    raise http.client.IncompleteRead(bytes(text), response.length)
            return response.status, bytes(text)
        finally:
            connection.close()


class HttpReward(Client):
    """A reward behind `sage-fast serve-reward`, or a server that speaks its format.

    Args:
        url, retry_seconds: as for `Client`.
        dtype: dtype in which videos are sent; float16 is finer than the 8 bits of a video file.

    Raises:
        UserError: `url` is not an address, or `dtype` is unknown.
    """

    def __init__(self, url: str, dtype: str = "float16", retry_seconds: float = 300.0) -> None:
        super().__init__(url, "/score", retry_seconds)
        if dtype not in get_args(VideoType):
            raise UserError(f"dtype = {dtype!r}: {nearest(dtype, get_args(VideoType))}")
        self.dtype = dtype

    def score(
        self, videos: Tensor, prompts: list[str], metadata: list[Metadata], seconds: float, name: str
    ) -> dict[str, Tensor]:
        """Send one request; return each part, float32 `[B]`, NaN for null."""
        answer = self._post(format_request(videos, prompts, metadata, name, self.dtype), seconds, token())
        parts = checked(read_response(answer, name, self.url), len(prompts))
        self._answered = True
        return parts


def token() -> str:
    """Return the password of this process; "" if it has none."""
    return os.environ.get(TOKEN, "").strip()


@contextlib.contextmanager
def _at_most(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Shut the connection down if the block takes longer; its own timeout starts again with every byte.

    Raises:
        TimeoutError: the block did not end in time.
    """
    expired = threading.Event()

    def end() -> None:
        expired.set()
        with contextlib.suppress(OSError):  # the server has just closed it
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS would wait for the other side

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if expired.is_set():
            raise TimeoutError("no whole answer in time")


# -- the format -------------------------------------------------------------------------------------------------------


def format_request(videos: Tensor, prompts: list[str], metadata: list[Metadata], name: str, dtype: str) -> bytes:
    """Format a request; it has the key `metadata` if a prompt has any."""
    values = videos.detach().cpu()
    values = (values * 255).round().to(torch.uint8) if dtype == "uint8" else values.to(getattr(torch, dtype))
    known = {"metadata": metadata} if any(metadata) else {}
    head = json.dumps({"schema": SCHEMA, "id": name, "prompts": prompts} | known)
    encoded = base64.b64encode(save({"videos": values.contiguous()}))
    return head[:-1].encode() + b', "videos": "' + encoded + b'"}'


def read_request(body: bytes) -> tuple[str, Tensor, list[str], list[Metadata]]:
    """Parse a request: id, videos float32 `[B, F, 3, H, W]` in [0, 1], B prompts, and the metadata of each.

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
        if str(videos.dtype).removeprefix("torch.") not in get_args(VideoType):
            raise ValueError(f"{videos.dtype} in place of {', '.join(get_args(VideoType))}")
    except (TypeError, KeyError, ValueError, OverflowError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"expected an object with schema {SCHEMA!r}, an id, B prompts and videos [B, F, 3, H, W] "
            f"(docs/how-to/reward-server.md): {type(error).__name__}: {error}"
        ) from error
    return name, videos.float() / (255 if videos.dtype == torch.uint8 else 1), prompts, metadata


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
            raise RewardFailure(f"{url}: answers request {str(got['id'])[:40]!r} instead of {name!r}")
        if unfit := [part for part in got["parts"] if not part.isprintable()]:
            raise RewardFailure(f"{url}: a part named {unfit[0]!r}")
        return {
            part: torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float32)
            for part, values in got["parts"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise RewardFailure(f"{url}: an answer that is no {SCHEMA}: {str(got)[:80]!r}") from error


def _error_of(body: bytes) -> str:
    """Return the error in a response, or else its first bytes."""
    try:
        error = (answer := json.loads(body)).get("error", answer)
        return printable(str(error["message"] if isinstance(error, dict) else error)[:4000])
    except (ValueError, AttributeError, KeyError, RecursionError):
        return repr(body[:80])
