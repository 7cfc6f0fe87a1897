"""Reward backend in a child process, and the child itself: killed when it hangs, restarted when it dies.

The child ends with its parent, however the parent ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from sage_fast.config.schema import RewardEntry
from sage_fast.rewards.backends import load_reward
from sage_fast.rewards.calls import called
from sage_fast.rewards.failures import RewardFailure, failure
from sage_fast.rewards.interface import Metadata
from sage_fast.util.errors import SIGNALS, UserError
from sage_fast.util.process_state import end_started
from sage_fast.util.ranks import limit_threads
from sage_fast.util.text import escape_on_screen
from sage_fast.util.time_limit import TimeLimit

IDLE_EXIT_GRACE = 5.0
"""Time for an idle child to exit by itself."""
EXIT_GRACE = 0.5
"""Time for a child to exit after its channel has closed."""
SPAWN = multiprocessing.get_context("spawn")


class ChildProcess:
    """Calls a reward in a child process. The child starts right away; the first call waits until it is ready.

    Args:
        entry: settings of the reward, which the child creates.
        key: setting that holds its name, for messages.
        device: device of the reward.
    """

    in_background = True

    def __init__(self, entry: RewardEntry, key: str, device: str) -> None:
        self._reward, self._closed, self._idle = (entry, key, device), False, False
        self._start()

    def score(
        self,
        videos: Tensor,
        prompts: list[str],
        metadata: list[Metadata],
        seconds: float,
        fps: float | None = None,
    ) -> dict[str, Tensor]:
        if self._closed:
            raise RewardFailure("its process was ended with the run")
        if not self._process.is_alive():
            self._start()
        ready, self._idle = self._idle, False
        try:
            if not ready:
                late = f"its process was not ready within reward.timeout_seconds = {seconds:g}"
                if why := self._receive(seconds, late)[1]:
                    raise RewardFailure(why)
            # Send a copy: the reward could change videos in shared memory, which containers limit to 64 MB.
            self._channel.send((videos.float().numpy(), prompts, metadata, fps))
            parts, error = self._receive(seconds, f"no answer within {seconds:g} s for {len(videos)} videos")
            self._idle = True
        except (EOFError, OSError) as broken:
            raise RewardFailure(f"its process ended: {self._end(EXIT_GRACE)}") from broken
        finally:
            if not self._idle:
                self._end()
        if error:
            raise RewardFailure(error)
        return {part: torch.tensor(values, dtype=torch.float32) for part, values in parts.items()}

    def close(self) -> None:
        """End the child for good; an idle one has time to clean up."""
        self._closed = True
        if self._idle:
            self._channel.close()
        self._end(IDLE_EXIT_GRACE if self._idle else 0.0)

    def _start(self) -> None:
        self._channel, theirs = SPAWN.Pipe()
        with theirs:
            self._process = SPAWN.Process(target=child, args=(theirs, *self._reward))
            self._process.start()
        self._idle = False

    def _receive(self, seconds: float, late: str) -> tuple[dict[str, list[float]], str]:
        """Wait for the child's next answer: parts and error; `late` is the failure's text if none comes in time."""
        limit = TimeLimit(seconds)
        while not self._channel.poll(0.2):
            # A process that the child forked may still hold the other end open, so ask for the child as well.
            if not self._process.is_alive() and not self._channel.poll():
                raise EOFError
            if limit.is_over():
                raise RewardFailure(f"{late}; its process was ended")
        return self._channel.recv()

    def _end(self, seconds: float = 0.0) -> str:
        """Wait for the child to exit, then kill it and its process group; return how it ended, in words."""
        self._process.join(seconds)
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self._channel.close()
        status = self._process.exitcode or 0
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


# -- in the child -----------------------------------------------------------------------------------------------------


def child(channel: Connection, entry: RewardEntry, key: str, device: str) -> None:
    """Create the reward, then answer one message after another until the parent is gone."""
    escape_on_screen()  # a reward may print any letter
    os.setsid()  # Ctrl-C in the terminal stops the run, which still needs its iteration's scores
    for number in SIGNALS:  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    limit_threads()
    own, reward, message = os.getpid(), None, None
    while True:
        parts: dict[str, list[float]] = {}
        error = ""
        try:
            if message is None:
                if device.startswith("cuda"):
                    torch.cuda.set_device(device)
                reward = load_reward(entry, key, device)
            else:
                videos, prompts, metadata, fps = message
                scores = called(entry.name, reward, torch.from_numpy(videos).to(device), prompts, metadata, fps)
                parts = {part: values.tolist() for part, values in scores.items()}
        except BaseException as failed:  # SystemExit too: the child reports it and waits for the next message
            error = str(failed) if isinstance(failed, UserError) else failure(failed)
        if os.getpid() != own:  # a fork that returned from the reward's code
            os._exit(1)
        channel.send((parts, error))
        try:
            message = channel.recv()
        except EOFError:
            return


def _end_with_parent() -> None:
    """Kill this process, even in a call that hangs, and what the reward has forked when the parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    end_started()
    os.killpg(0, signal.SIGKILL)
