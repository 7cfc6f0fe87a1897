"""The carrier of a reward in a process of its own, and that process: ended when it hangs, started again when it dies.

Videos are handed over as a file in memory, without a name and without a copy on the way; messages are JSON.
Nothing is pickled. The child ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.schema import RewardEntry
from sage_fast.rewards.errors import RewardFailure, TransportFailure, failure
from sage_fast.rewards.load import called, load_reward
from sage_fast.util.errors import UserError

SECONDS_TO_END = 5.0
"""Time for an idle child to end by itself."""
SECONDS_TO_FALL = 0.5
"""Time for a child to end whose channel has closed."""
PR_SET_PDEATHSIG = 1

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_fast.rewards.process import child; child(int(sys.argv[2]), int(sys.argv[3]))"
)


class ChildProcess:
    """Calls a reward in another process, which is started at once; the first call waits until it is ready.

    Args:
        entry: the reward, which is made there.
        key: setting that holds its name, for messages.
        device: where it runs.
    """

    beside, patience = True, 0.0

    def __init__(self, entry: RewardEntry, key: str, device: str) -> None:
        self._settings = {"name": entry.name, "args": entry.args, "key": key, "device": device}
        self._closed = self._idle = False
        self._spawn()

    def score(self, videos: Tensor, prompts: list[str], seconds: float, name: str) -> dict[str, Tensor]:
        if self._closed:
            raise RewardFailure("its process was ended with the run")
        if self._process is None:
            self._spawn()
        ready, self._idle = self._idle, False
        try:
            if not ready:
                late = f"its process was not ready within reward.timeout_seconds = {seconds:g}"
                if "error" in (reply := self._reply(seconds, late)):
                    raise TransportFailure(reply["error"])
            with open(os.memfd_create("videos"), "rb") as memory:
                path = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
                torch.from_file(path, shared=True, size=videos.numel(), dtype=torch.float32).copy_(videos.flatten())
                message = {"path": path, "shape": list(videos.shape), "prompts": prompts}
                self._channel.send_bytes(json.dumps(message).encode())
                reply = self._reply(seconds, f"no answer within {seconds:g} s for {len(videos)} videos")
            self._idle = True
        except (EOFError, OSError, ValueError) as error:
            raise TransportFailure(f"its process ended: {self._end(SECONDS_TO_FALL)}") from error
        finally:
            if not self._idle:
                self._end()
        if "error" in reply:
            raise RewardFailure(reply["error"])
        return {part: torch.tensor(values, dtype=torch.float32) for part, values in reply["parts"].items()}

    def close(self) -> None:
        """End the process for good; one that is idle has the time to clean up."""
        self._closed = True
        if self._idle:
            self._channel.close()
        self._end(SECONDS_TO_END if self._idle else 0.0)

    def _spawn(self) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable, "-P", "-c", _CHILD, path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            # A session of its own: Ctrl-C in the terminal ends the run, which still needs the scores of its iteration.
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._channel.send_bytes(json.dumps(self._settings).encode())
        self._idle = False

    def _reply(self, seconds: float, late: str) -> dict[str, Any]:
        """Wait for the reply to the message before; `late` says what it means that there is none in time."""
        process, channel = self._process, self._channel
        assert process is not None
        deadline = time.monotonic() + seconds if seconds else math.inf
        while not channel.poll(0.2):
            # A fork that it left behind may hold the other end open.
            if process.poll() is not None and not channel.poll(0):
                raise EOFError
            if time.monotonic() > deadline:
                raise TransportFailure(f"{late}; its process was ended")
        return json.loads(channel.recv_bytes())

    def _end(self, seconds: float = 0.0) -> str:
        """Wait for the process to end by itself, then kill it and what it started; how it ended, in words."""
        process, self._process = self._process, None
        if process is None:
            return "with the run"
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._channel.close()
        if status is None:
            return "its end of the channel is broken"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


# -- in the child -----------------------------------------------------------------------------------------------------


def child(descriptor: int, parent: int) -> None:
    """Make the reward, then reply to one message after the other until the parent is gone.

    Args:
        descriptor: socket to the parent.
        parent: its process id.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # within a call that hangs too
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides; it needs the scores of its iteration
        signal.signal(number, signal.SIG_IGN)
    channel, own = Connection(descriptor), os.getpid()

    @contextlib.contextmanager
    def replying() -> Iterator[dict[str, Any]]:
        reply: dict[str, Any] = {}
        try:
            yield reply
        except BaseException as error:  # SystemExit too: the process goes on
            reply["error"] = str(error) if isinstance(error, UserError) else failure(error)
        if os.getpid() != own:  # a fork that came back from the reward
            os._exit(1)
        channel.send_bytes(json.dumps(reply).encode())

    start = json.loads(channel.recv_bytes())
    with replying():
        device = torch.device(start["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        reward = load_reward(RewardEntry(name=start["name"], args=start["args"]), start["key"], start["device"])
    while True:
        try:
            message = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            return
        with replying() as reply:
            # A private map: what the reward changes in the videos, only it sees.
            shape = message["shape"]
            videos = torch.from_file(message["path"], shared=False, size=math.prod(shape), dtype=torch.float32)
            parts = called(reward, videos.view(shape).to(device), message["prompts"])
            reply["parts"] = {part: values.tolist() for part, values in parts.items()}
