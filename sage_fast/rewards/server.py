"""`sage-fast serve-reward`: serve the rewards of a configuration over HTTP, so that several runs
can share them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import resource
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.failure_policy import failure
from sage_fast.rewards.http import SCHEMA, TOKEN, format_response, read_request, token
from sage_fast.util.errors import first_line
from sage_fast.util.futures import fulfil
from sage_fast.util.text import counted

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost")
"""Where a server without a token may listen, and the Host of its requests."""
MAX_REQUEST_BYTES = 2**30
"""4 videos of 480p and 81 frames in float16."""
MAX_WAITING = 8
"""Number of requests that may wait in memory while others are scored."""
MAX_CONNECTIONS = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Half of the open files that the process may have.

Beyond it the oldest connection without a request is closed.
"""
SECONDS_TO_BEGIN = 10.0
"""How long a connection may take for the head of its request."""
SECONDS_TO_READ = 300.0
"""How long a body may take, while it has one of the places in memory.

Rates and queues are a proxy's work.
"""
SECONDS_TO_DRAIN = 2.0
"""How long the rest of a refused request is read and discarded: closing with unread bytes would
lose the answer."""
SECONDS_TO_END = 5
"""How long requests that are being scored may take when the server ends."""


class RewardServer(uvicorn.Server):
    """HTTP server that scores videos posted to /score, and says there whether it compares them.

    It scores one request at a time, or as many as the rewards have workers, and reads a few more
    meanwhile. More would only keep videos in memory. With a token in the environment it serves
    those who send it. Without a token it accepts only requests addressed to `LOOPBACK`, so that no
    web page can reach it by DNS rebinding.

    Args:
        reward: the reward, already checked.
        host, port: address to listen on; port 0 picks a free one.
        device: device of the videos passed to in-process rewards.
        largest: largest request in bytes.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
    """

    def __init__(
        self,
        reward: CompositeReward,
        host: str,
        port: int,
        device: str = "cpu",
        largest: int = MAX_REQUEST_BYTES,
    ) -> None:
        self.reward = reward
        self.device = device
        self.largest = largest
        self.token = token()
        self.turns = asyncio.Semaphore(reward.at_a_time)
        self.places = asyncio.Semaphore(reward.at_a_time + MAX_WAITING)
        self.socket = socket.create_server((host, port))
        handlers: Any = dict.fromkeys((HTTPException, ClientDisconnect), _refuse)
        app = Starlette(
            routes=[
                Route("/score", self._describe, methods=["GET"]),
                Route("/score", self._score, methods=["POST"]),
            ],
            exception_handlers=handlers,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                log_config=None,
                log_level="error",
                proxy_headers=False,
                headers=[("Connection", "close")],
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=SECONDS_TO_END,
            )
        )

    @property
    def address(self) -> str:
        host, port = self.socket.getsockname()
        return f"http://{host}:{port}"

    def listen(self) -> None:
        """Serve until a signal, or until another thread sets `should_exit`."""
        self.run([self.socket])

    async def _describe(self, request: Request) -> Response:
        self._check_sender(request)
        return _json(200, {"schema": SCHEMA, "compares_group": self.reward.compares_group})

    async def _score(self, request: Request) -> Response:
        self._check_sender(request)
        self._check_content(request)
        async with self.places:
            body = await _read(request)
            async with self.turns:
                done: Future[tuple[int, dict[str, Any]]] = Future()
                done.set_running_or_notify_cancel()
                # Not the threads of asyncio or Starlette: a server that ends would wait for a
                # reward that hangs.
                threading.Thread(
                    target=fulfil, args=(done, self._answer, body, _host(request)), daemon=True
                ).start()
                try:
                    return _json(*await asyncio.wrap_future(done))
                except (
                    asyncio.CancelledError
                ):  # the client asks again, perhaps the next server at this address
                    return _json(503, _refused(_host(request), "the server ends"))

    def _check_sender(self, request: Request) -> None:
        """Check that a request has the token or, where there is none, names this machine."""
        headers = request.headers
        host = headers.get("Host", "")
        if self.token:
            given = headers.get("Authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise HTTPException(
                    401, f"expected the token of this server; the client takes it from {TOKEN}"
                )
        elif re.sub(r":\d+$", "", host) not in LOOPBACK:
            raise HTTPException(
                421, f"Host {host[:80]!r}: expected one of {', '.join(LOOPBACK)}; or set {TOKEN}"
            )

    def _check_content(self, request: Request) -> None:
        """Check what a request says of its body."""
        headers = request.headers
        length = headers.get("Content-Length")
        # A web page cannot send this type cross-origin.
        if headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "expected Content-Type: application/json")
        if length is None:
            raise HTTPException(411, "expected a Content-Length")
        if int(length) > self.largest:
            raise HTTPException(413, f"{length} bytes; at most {self.largest} are taken")

    def _answer(self, body: bytes, client: str) -> tuple[int, dict[str, Any]]:
        """Score a request; return the status and content of the answer."""
        try:
            name, scored = read_request(body)
        except ValueError as error:
            return 400, _refused(client, str(error))
        if self.reward.compares_group and (len(scored) < 2 or len({*scored.prompts}) > 1):
            return 400, _refused(
                client,
                f"{counted(len(scored), 'video')} of {counted(len({*scored.prompts}), 'prompt')}: "
                "expected at least 2 of one prompt, since a reward of this server compares them",
            )
        start = time.monotonic()
        try:
            parts = self.reward.raw(scored, self.device)
        except Exception as error:
            log.info(f"failed on {counted(len(scored), 'video')}: {first_line(failure(error))}")
            return 422, {"schema": SCHEMA, "id": name, "error": failure(error)}
        log.info(f"{counted(len(scored), 'video')} for {client}: {time.monotonic() - start:.2f} s")
        return 200, format_response(name, parts)


class _Protocol(H11Protocol):
    """uvicorn's, and what it lacks: a time limit for the head of a request, and a bound on
    connections without one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.begun = self.loop.time()
        self.loop.call_later(
            SECONDS_TO_BEGIN, lambda: self.transport.abort() if self.waits else None
        )
        waiting = [each for each in self.connections if isinstance(each, _Protocol) and each.waits]
        if len(self.connections) > MAX_CONNECTIONS and waiting:
            min(waiting, key=lambda each: each.begun).transport.abort()

    @property
    def waits(self) -> bool:
        return self.cycle is None and not self.transport.is_closing()


async def _read(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        HTTPException: it takes longer than `SECONDS_TO_READ`.
    """
    try:
        async with asyncio.timeout(SECONDS_TO_READ):
            return await request.body()
    except TimeoutError as error:
        raise HTTPException(408, f"its body did not arrive within {SECONDS_TO_READ:g} s") from error


async def _refuse(request: Request, error: HTTPException | ClientDisconnect) -> Response:
    status = 400
    why = "client disconnected"
    if isinstance(error, HTTPException):
        status = error.status_code
        why = error.detail
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(SECONDS_TO_DRAIN):
            async for _ in request.stream():
                pass
    return _json(status, _refused(_host(request), why))


def _host(request: Request) -> str:
    return request.client.host if request.client else ""


def _refused(client: str, why: str) -> dict[str, Any]:
    log.info(f"refused a request of {client}: {why}")
    return {"schema": SCHEMA, "error": why}


def _json(status: int, content: dict[str, Any]) -> Response:
    """Return a response of ASCII alone: an error may hold text that is no Unicode."""
    return Response(json.dumps(content), status, media_type="application/json")
