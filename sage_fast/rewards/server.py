"""`sage-fast serve-reward`: serve the rewards of a configuration over HTTP, so that several runs can share them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sage_fast import __version__
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.errors import failure, first_line
from sage_fast.rewards.http import SCHEMA, answer, read_question
from sage_fast.util.console import Say
from sage_fast.util.errors import RewardError

LARGEST = 4 * 2**30
"""Largest request in bytes: about 8 videos of 480p and 81 frames in float16."""
SECONDS_OF_SILENCE = 60.0
"""Read timeout within a request; then the connection is closed."""
SECONDS_TO_DRAIN = 2.0
"""How long the rest of a refused request is read and discarded."""


class RewardServer(ThreadingHTTPServer):
    """HTTP server that scores videos posted to /score; GET describes the rewards.

    It reads and scores one request at a time, or as many as the rewards have workers. More would only keep videos in
    memory.

    Args:
        reward: the reward, already checked.
        host, port: address to listen on; port 0 picks a free one.
        tell: receives one line per request.
        device: device of the videos passed to in-process rewards.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
    """

    def __init__(self, reward: CompositeReward, host: str, port: int, tell: Say, device: str = "cpu") -> None:
        self.reward, self.tell, self.device = reward, tell, device
        self.turns = threading.BoundedSemaphore(reward.at_a_time)
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    server_version = f"sage-fast/{__version__}"
    timeout = SECONDS_OF_SILENCE

    def do_GET(self) -> None:
        self._send(200, {"schema": SCHEMA, "rewards": self.server.reward.names, "parts": self.server.reward.parts})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path.rstrip("/") != "/score":
            return self._refuse(404, f"{self.path[:80]}: expected /score")
        if self.headers.get_content_type() != "application/json":  # a web page cannot send it cross-origin
            return self._refuse(415, "expected Content-Type: application/json")
        if not length.isascii() or not length.isdigit():
            return self._refuse(411, "expected a Content-Length")
        if int(length) > LARGEST:
            return self._refuse(413, f"{length} bytes; at most {LARGEST} are taken")
        with self.server.turns:
            self._score(int(length))

    def _score(self, length: int) -> None:
        try:
            name, videos, prompts = read_question(self.rfile.read(length))
        except ValueError as error:
            return self._refuse(400, str(error))
        start = time.monotonic()
        try:
            parts = self.server.reward.raw(videos, prompts, self.server.device)
        except RewardError as error:  # the reward hangs and cannot be stopped from here
            return self._refuse(503, str(error))
        except Exception as error:
            self.server.tell(f"failed on {len(prompts)} videos: {first_line(failure(error))}")
            return self._send(422, {"schema": SCHEMA, "id": name, "error": failure(error)})
        self.server.tell(f"{len(prompts)} videos for {self.client_address[0]}: {time.monotonic() - start:.2f} s")
        self._send(200, answer(name, parts))

    def _refuse(self, status: int, why: str) -> None:
        self.server.tell(f"refused a request of {self.client_address[0]}: {why}")
        self._send(status, {"schema": SCHEMA, "error": why})
        end = time.monotonic() + SECONDS_TO_DRAIN
        with contextlib.suppress(OSError):  # closing the connection with unread bytes would lose the answer
            self.connection.settimeout(SECONDS_TO_DRAIN)
            while time.monotonic() < end and self.rfile.read1(1 << 20):
                pass

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No-op: `tell` gets its own line."""
