"""A reward in a process of its own: ended when it hangs, started again when it crashes.

Videos are handed over as a file in memory, without a name and without a copy on the way; questions and answers are JSON
with a number. Nothing is pickled. The child ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.schema import RewardEntry
from sage_fast.rewards.failure import NoAnswer, RewardFailure, failure

LARGEST_ANSWER = 64 * 2**20
"""Bytes."""
SECONDS_TO_END = 5.0
"""For an idle process to end by itself."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_fast.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class RewardProcess:
    """Scores videos in another process, one call at a time, all from one thread.

    Args:
        entry: the reward, which is made there.
        key: of its name, for messages.
        device: where it runs.
        timeout: seconds of its start and of each call; 0: no limit.
    """

    def __init__(self, entry: RewardEntry, key: str, device: str, timeout: float) -> None:
        self.entry, self.key, self.device, self.timeout = entry, key, device, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._busy = self._closed = False
        self._number = 0
        self._problem: RewardFailure | None = None

    def prepare(self) -> None:
        """Start the process; what goes wrong is raised by the next call."""
        try:
            self._start()
        except Exception as error:
            self._problem = NoAnswer(failure(error))

    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """
        Raises:
            RewardFailure: it raised, with its traceback.
            NoAnswer: its process crashed, or gave no answer in time and was ended: the next call starts another.
        """
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._channel is not None
        self._number += 1
        question = {"number": self._number, "shape": list(videos.shape), "prompts": prompts}
        memory = _in_memory(videos)
        try:
            with self._ends_with_the_process():
                self._channel.send_bytes(json.dumps(question).encode())
                send_handle(self._channel, memory, self._process.pid)
        finally:
            os.close(memory)
        answer = self._answer(self._number, f"no answer within {self.timeout:g} s for {len(prompts)} videos")
        if "error" in answer:
            raise RewardFailure(answer["error"])
        return {part: torch.tensor(values, dtype=torch.float32) for part, values in answer["parts"].items()}

    def close(self) -> None:
        """End the process; it is not started again."""
        self._closed = True
        self._end(graceful=not self._busy)

    # -- one life of it -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed:
            raise RewardFailure("its process was ended with the run")
        ours, theirs = socket.socketpair()
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable, "-P", "-c", _START, path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            # A session of its own: Ctrl-C in the terminal ends the run, which still needs the scores of its iteration.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._channel = Connection(ours.detach())
        settings = {"name": self.entry.name, "args": self.entry.args}
        with self._ends_with_the_process():
            self._channel.send_bytes(json.dumps({"entry": settings, "key": self.key, "device": self.device}).encode())
        answer = self._answer(0, f"its process was not ready within reward.timeout_seconds = {self.timeout:g}")
        if "error" in answer:
            self._fall()
            raise NoAnswer(answer["error"])

    def _answer(self, number: int, overdue: str) -> dict[str, Any]:
        """That to the question of this number; any other is thrown away."""
        assert self._channel is not None
        assert self._process is not None
        deadline = time.monotonic() + self.timeout if self.timeout else None
        self._busy = True
        with self._ends_with_the_process():
            while True:
                while not self._channel.poll(0.2):
                    # A fork that it left behind may hold the other end open.
                    if self._process.poll() is not None and not self._channel.poll(0):
                        raise EOFError
                    if deadline is not None and time.monotonic() > deadline:
                        self._fall()
                        raise NoAnswer(f"{overdue}; its process was ended")
                answer = json.loads(self._channel.recv_bytes(LARGEST_ANSWER))
                if answer["number"] == number:
                    self._busy = False
                    return answer

    @contextlib.contextmanager
    def _ends_with_the_process(self) -> Iterator[None]:
        """What goes wrong with the channel means that the process has ended."""
        try:
            yield
        except (EOFError, OSError, ValueError) as error:
            how = self._fall()
            raise NoAnswer(f"its process ended: {how}") from error

    def _fall(self) -> str:
        """The process is gone, or has to be; how it ended, in words."""
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)  # of a channel that was closed a moment before
        status = process.poll() if process is not None else None
        self._end(graceful=False)
        self._busy = False
        if status is None:
            return "its end of the channel is broken"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def _end(self, *, graceful: bool) -> None:
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if process is None:
            return
        if graceful and channel is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                channel.close()
                process.wait(SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):  # what it started goes with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if channel is not None and not channel.closed:
            channel.close()


def _in_memory(videos: Tensor) -> int:
    """A file in memory with their values; its descriptor."""
    memory = os.memfd_create("videos", os.MFD_CLOEXEC)
    size = videos.numel() * 4
    os.truncate(memory, size)
    torch.frombuffer(mmap.mmap(memory, size), dtype=torch.float32).view(videos.shape).copy_(videos)
    return memory
