"""Reward backend in a child process, and the child itself: killed when it hangs, restarted when it dies.

Videos are passed in an anonymous memory file, without a further copy; messages are JSON. Nothing is pickled. The child
ends with its parent, however the parent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from sage_fast.rewards.interface import Metadata
from sage_fast.rewards.load import called, load_reward
from sage_fast.util.errors import SIGNALS, UserError

IDLE_EXIT_GRACE = 5.0
"""Time for an idle child to exit by itself."""
EXIT_GRACE = 0.5
"""Time for a child to exit after its channel has closed."""
PR_SET_PDEATHSIG = 1

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sage_fast.rewards.process import child; child(int(sys.argv[2]), int(sys.argv[3]))"
)


class ChildProcess:
    """Calls a reward in a child process. The child starts right away; the first call waits until it is ready.

    Args:
        entry: settings of the reward, which the child creates.
        key: setting that holds its name, for messages.
        device: device of the reward.
    """

    in_background, patience = True, 0.0

    def __init__(self, entry: RewardEntry, key: str, device: str) -> None:
        self._settings = {"name": entry.name, "args": entry.args, "key": key, "device": device}
        self._closed = self._idle = False
        self._spawn()

    def score(
        self, videos: Tensor, prompts: list[str], metadata: list[Metadata], seconds: float, name: str
    ) -> dict[str, Tensor]:
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
                message = {"path": path, "shape": list(videos.shape), "prompts": prompts, "metadata": metadata}
                self._channel.send_bytes(json.dumps(message).encode())
                reply = self._reply(seconds, f"no answer within {seconds:g} s for {len(videos)} videos")
            self._idle = True
        except (EOFError, OSError, ValueError) as error:
            raise TransportFailure(f"its process ended: {self._end(EXIT_GRACE)}") from error
        finally:
            if not self._idle:
                self._end()
        if "error" in reply:
            raise RewardFailure(reply["error"])
        return {part: torch.tensor(values, dtype=torch.float32) for part, values in reply["parts"].items()}

    def close(self) -> None:
        """End the child for good; an idle one has time to clean up."""
        self._closed = True
        if self._idle:
            self._channel.close()
        self._end(IDLE_EXIT_GRACE if self._idle else 0.0)

    def _spawn(self) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable, "-P", "-c", _CHILD, path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            # A session of its own: Ctrl-C in the terminal stops the run, which still needs its iteration's scores.
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._channel.send_bytes(json.dumps(self._settings).encode())
        self._idle = False

    def _reply(self, seconds: float, late: str) -> dict[str, Any]:
        """Wait for the reply to the previous message; `late` is the failure's text if none comes in time."""
        process, channel = self._process, self._channel
        assert process is not None
        deadline = time.monotonic() + seconds if seconds else math.inf
        while not channel.poll(0.2):
            # A process that the child forked may still hold the other end open, so poll the child as well.
            if process.poll() is not None and not channel.poll(0):
                raise EOFError
            if time.monotonic() > deadline:
                raise TransportFailure(f"{late}; its process was ended")
        return json.loads(channel.recv_bytes())

    def _end(self, seconds: float = 0.0) -> str:
        """Wait for the child to exit, then kill its process group; return how it ended, in words."""
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


def _fork_guard(descriptor: int) -> None:
    """Fork a process that waits for the end of this one, then kills the group: also what the reward has forked.

    It is no child of this one: a reward may wait for all of its children, or end them.
    """
    alive = os.memfd_create("alive")
    fcntl.lockf(alive, fcntl.LOCK_EX)  # forks do not inherit the lock: it ends with this process
    if (between := os.fork()) == 0:
        if os.fork() == 0:
            os.close(descriptor)
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            fcntl.lockf(alive, fcntl.LOCK_EX)
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.waitpid(between, 0)


def child(descriptor: int, parent: int) -> None:
    """Create the reward, then reply to one message after another until the parent is gone.

    Args:
        descriptor: socket to the parent.
        parent: the parent's process id.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # works even within a call that hangs
    if os.getppid() != parent:
        return
    _fork_guard(descriptor)
    for number in SIGNALS:  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    channel, own = Connection(descriptor), os.getpid()

    @contextlib.contextmanager
    def replying() -> Iterator[dict[str, Any]]:
        reply: dict[str, Any] = {}
        try:
            yield reply
        except BaseException as error:  # even SystemExit: the child keeps serving
            reply["error"] = str(error) if isinstance(error, UserError) else failure(error)
        if os.getpid() != own:  # a fork that returned from the reward's code
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
            # A private mapping: changes that the reward makes to the videos stay in this process.
            shape = message["shape"]
            videos = torch.from_file(message["path"], shared=False, size=math.prod(shape), dtype=torch.float32)
            parts = called(reward, videos.view(shape).to(device), message["prompts"], message["metadata"])
            reply["parts"] = {part: values.tolist() for part, values in parts.items()}
