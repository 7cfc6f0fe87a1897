"""`sage-fast serve-reward`: serve the rewards of a configuration over HTTP, so that several runs can share them."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import re
import resource
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sage_fast import __version__
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.errors import failure
from sage_fast.rewards.http import SCHEMA, TOKEN, format_response, read_request, token
from sage_fast.util.errors import RewardError, first_line

log = logging.getLogger(__name__)

LARGEST = 2**30
"""Largest request in bytes: 4 videos of 480p and 81 frames in float16."""
WAITING = 8
"""Number of requests that may wait in memory while others are scored."""
UNREAD = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Number of connections whose headers and first bytes of the body have not come; one more closes the oldest of them.
Half of the open files that the process may have."""
SECONDS_TO_BEGIN = 10.0
"""How long a connection may take for these."""
FIRST_BYTES = 2**18
"""How much of a body has to come before it takes one of the places for requests in memory."""
SECONDS_OF_SILENCE = 60.0
"""Read timeout within a request; then the connection is closed."""
SECONDS_OF_GRACE = 5.0
"""How far the body of a request may fall behind `SLOWEST`; then it is refused, so that it does not keep its place."""
SLOWEST = 4e6
"""Bytes per second at which a body has to arrive."""
SECONDS_TO_DRAIN = 2.0
"""How long the rest of a refused request is read and discarded."""


class RewardServer(ThreadingHTTPServer):
    """HTTP server that scores videos posted to /score; GET describes the rewards.

    It scores one request at a time, or as many as the rewards have workers, and reads a few more meanwhile. More would
    only keep videos in memory. With a token in the environment it serves those who send it. Without a token it accepts
    only requests addressed to this machine's own names, so that no web page can reach it by DNS rebinding.

    Args:
        reward: the reward, already checked.
        host, port: address to listen on; port 0 picks a free one.
        device: device of the videos passed to in-process rewards.
        largest: largest request in bytes.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
    """

    request_queue_size = UNREAD  # of the default, 5, many clients that connect at once are reset

    def __init__(
        self, reward: CompositeReward, host: str, port: int, device: str = "cpu", largest: int = LARGEST
    ) -> None:
        self.reward, self.device, self.largest = reward, device, largest
        self.turns = threading.BoundedSemaphore(reward.at_a_time)
        self.places = threading.BoundedSemaphore(reward.at_a_time + WAITING)
        self.unread: dict[socket.socket, float] = {}
        self.token = token()
        super().__init__((host, port), _Handler)
        self.names = {name.lower() for name in ("localhost", host, socket.gethostname(), self.server_name)}

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def is_meant(self, host: str) -> bool:
        """Whether a Host header is an address, which no other site can be behind, or a known name of this machine."""
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return name in self.names

    def process_request(self, request: Any, client_address: Any) -> None:
        self.unread[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that take too long to begin, or that are too many. Called twice a second and after each."""
        waiting, now = list(self.unread.items()), time.monotonic()
        for number, (connection, begun) in enumerate(waiting, start=UNREAD - len(waiting)):
            if number < 0 or now > begun + SECONDS_TO_BEGIN:
                with contextlib.suppress(OSError):  # it has just been closed
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self.unread.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), OSError):
            log.info(f"{client_address[0]} has gone: {sys.exception()}")
        else:
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    server_version = f"sage-fast/{__version__}"
    timeout = SECONDS_OF_SILENCE

    def do_GET(self) -> None:
        if self._is_welcome():
            self._send(200, {"schema": SCHEMA, "rewards": self.server.reward.names, "parts": self.server.reward.parts})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self._is_welcome():
            return
        if self.path.rstrip("/") != "/score":
            return self._refuse(404, f"{self.path[:80]}: expected /score")
        if self.headers.get_content_type() != "application/json":  # a web page cannot send it cross-origin
            return self._refuse(415, "expected Content-Type: application/json")
        if not re.fullmatch(r"[0-9]{1,18}", length):
            return self._refuse(411, "expected a Content-Length")
        if int(length) > self.server.largest:
            return self._refuse(413, f"{length} bytes; at most {self.server.largest} are taken")
        body, answer = bytearray(), None
        if self._read(body, min(int(length), FIRST_BYTES)):
            self.server.unread.pop(self.connection, None)
            with self.server.places:
                if self._read(body, int(length)):
                    with self.server.turns:
                        answer = self._score(bytes(body))
        if answer is None:
            return self._refuse(408, f"its body fell {SECONDS_OF_GRACE:g} s behind {SLOWEST / 1e6:g} MB/s")
        self._send(*answer)

    def _is_welcome(self) -> bool:
        """Check the token if there is one, else the Host, and refuse the request that lacks it."""
        host = self.headers.get("Host", "")
        if self.server.token:
            given = self.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
                self._refuse(401, f"expected the token of this server; the client takes it from {TOKEN}")
                return False
        elif not self.server.is_meant(host):
            self._refuse(421, f"Host {host[:80]!r}: expected an address or a name of this machine; or set {TOKEN}")
            return False
        return True

    def _read(self, body: bytearray, length: int) -> bool:
        """Extend a body to `length` bytes, or as far as the client sends it; return False if it comes too slowly."""
        end, whole = time.monotonic() + SECONDS_OF_GRACE - len(body) / SLOWEST, False
        with contextlib.suppress(TimeoutError):
            while not whole and (left := end + len(body) / SLOWEST - time.monotonic()) > 0:
                self.connection.settimeout(left)
                piece = self.rfile.read1(min(length - len(body), 1 << 20))
                body += piece
                whole = not piece
        self.connection.settimeout(self.timeout)
        return whole

    def _score(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and content of the answer."""
        try:
            name, videos, prompts, metadata = read_request(body)
        except ValueError as error:
            return 400, self._refused(str(error))
        start = time.monotonic()
        try:
            parts = self.server.reward.raw(videos, prompts, metadata, self.server.device)
        except RewardError as error:  # it timed out in this process and its thread cannot be killed
            return 503, self._refused(str(error))
        except Exception as error:
            log.info(f"failed on {len(prompts)} videos: {first_line(failure(error))}")
            return 422, {"schema": SCHEMA, "id": name, "error": failure(error)}
        log.info(f"{len(prompts)} videos for {self.client_address[0]}: {time.monotonic() - start:.2f} s")
        return 200, format_response(name, parts)

    def _refused(self, why: str) -> dict[str, Any]:
        log.info(f"refused a request of {self.client_address[0]}: {why}")
        return {"schema": SCHEMA, "error": why}

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, self._refused(why))
        end = time.monotonic() + SECONDS_TO_DRAIN
        with contextlib.suppress(OSError):  # closing the connection with unread bytes would lose the answer
            self.connection.settimeout(SECONDS_TO_DRAIN)
            while time.monotonic() < end and self.connection.recv(1 << 20):  # `rfile` cannot be read after a timeout
                pass

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No-op: `log` gets its own line."""
