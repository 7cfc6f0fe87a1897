"""A reward in a worker process, and the worker itself: killed when it hangs, restarted when it
dies.

The worker ends with its parent, however the parent ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch import Tensor

from sage_fast.config.schema import RewardEntry
from sage_fast.rewards.failure_policy import RewardFailure, failure
from sage_fast.rewards.in_process import call
from sage_fast.rewards.interface import Backend, Request, compares_group, in_unit_range
from sage_fast.rewards.load import load_reward
from sage_fast.util.errors import SIGNALS, UserError
from sage_fast.util.guard import belongs_to_plugin
from sage_fast.util.ranks import limit_threads
from sage_fast.util.text import counted, escape_on_screen
from sage_fast.util.time_limit import LOOK_S, TimeLimit

IDLE_EXIT_GRACE = 5.0
"""Seconds for an idle worker to exit by itself."""
EXIT_GRACE = 0.5
"""Seconds for a worker to exit after its channel has closed."""
SPAWN = multiprocessing.get_context("spawn")


class Worker(Backend):
    """Calls a reward in a worker process. It starts right away; the first call waits until it is
    ready.

    Args:
        entry: settings of the reward, which the worker creates.
        key: setting that holds its name, for messages.
        device: device of the reward.
    """

    in_background = True

    def __init__(self, entry: RewardEntry, key: str, device: str) -> None:
        self._reward = (entry, key, device)
        self._closed = False
        self._idle = False
        self._start()

    def ask(self, seconds: float) -> bool:
        self._become_ready(seconds)
        return self.compares_group

    def score(self, request: Request, seconds: float) -> dict[str, Tensor]:
        self._become_ready(seconds)
        # Not in shared memory, which containers limit to 64 MB.
        videos = request.videos
        if videos.dtype != torch.uint8:
            videos = videos.float()
        parts = self._answer(
            seconds,
            f"no answer for {counted(len(request), 'video')}",
            (videos.numpy(), request.prompts, request.metadata, request.fps, request.seed),
        )
        return {part: torch.from_numpy(values) for part, values in parts.items()}

    def _become_ready(self, seconds: float) -> None:
        """Start the worker unless it runs, and wait until it has made its reward.

        Raises:
            RewardFailure: it could not.
        """
        if self._closed:
            raise RewardFailure("its process was ended with the run")
        if not self._process.is_alive():
            self._start()
        if self._idle:
            return
        try:
            self.compares_group = self._answer(seconds, "it was not ready")
        except RewardFailure:
            self._idle = False
            self._end()
            raise

    def _answer(self, seconds: float, missed: str, message: object = None) -> Any:
        """Send a message, if there is one, and return the worker's next answer.

        Args:
            seconds: time limit.
            missed: what did not happen, if it takes longer.

        Raises:
            RewardFailure: the reward failed, or there is no answer, and the worker was ended.
        """
        self._idle = False
        try:
            with self._ended_after(seconds, missed) as late:
                if message is not None:
                    self._channel.send(message)
                answer, error = self._receive(late)
            self._idle = True
        except (EOFError, OSError) as broken:
            if late.over:
                raise RewardFailure(
                    f"{late.what} within {seconds:g} s; its process was ended"
                ) from broken
            raise RewardFailure(f"its process ended: {self._end(EXIT_GRACE)}") from broken
        finally:
            if not self._idle:
                self._end()
        if error:
            raise RewardFailure(error)
        return answer

    def close(self) -> None:
        """End the worker for good; an idle one has time to clean up."""
        self._closed = True
        if self._idle:
            self._channel.close()
        self._end(IDLE_EXIT_GRACE if self._idle else 0.0)

    def _start(self) -> None:
        self._channel, theirs = SPAWN.Pipe()
        with theirs:
            self._process = SPAWN.Process(target=work, args=(theirs, *self._reward))
            self._process.start()
        self._idle = False

    @contextlib.contextmanager
    def _ended_after(self, seconds: float, what: str) -> Iterator[_Deadline]:
        """Kill the worker if the block takes longer than `seconds`: sending can block as well as
        receiving.

        A worker that is stopped does not read, and a pipe holds 64 KiB.
        """
        deadline = _Deadline(what, seconds)
        watch = threading.Thread(target=deadline.watch, args=(self._kill,), daemon=True)
        watch.start()
        try:
            yield deadline
        finally:
            deadline.done.set()
            watch.join()

    def _receive(self, late: _Deadline) -> tuple[Any, str]:
        """Wait for the worker's next message: its answer, and an error or ""."""
        while not self._channel.poll(0.2):
            # A process that the worker forked may still hold the other end open, so ask for the
            # worker as well.
            gone = not self._process.is_alive() and not self._channel.poll()
            if gone or late.over:
                raise EOFError
        return self._channel.recv()

    def _kill(self) -> None:
        """Kill the worker, its process group, and what it has started in groups of their own."""
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _end(self, seconds: float = 0.0) -> str:
        """Wait for the worker to exit, then kill it and its process group; return how it ended, in
        words."""
        self._process.join(seconds)
        self._kill()
        self._process.join()
        self._channel.close()
        status = self._process.exitcode or 0
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class _Deadline:
    """A time limit of a call.

    Args:
        what: what did not happen in time.
        seconds: the limit; 0: none.

    Attributes:
        over: whether the limit has passed.
        done: set when the call has ended.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self.over = False
        self.done = threading.Event()
        self._limit = TimeLimit(seconds)

    def watch(self, kill: Callable[[], None]) -> None:
        """Call `kill` once the limit has passed, unless the call has ended before."""
        while not self.done.wait(self._limit.next_look):
            if self._limit.is_over():
                self.over = True
                kill()
                return


# -- in the worker ---------------------------------------------------------------------------------


def work(channel: Connection, entry: RewardEntry, key: str, device: str) -> None:
    """Create the reward and say whether it compares the videos of a group, then answer one message
    after another with scores, until the parent is gone."""
    escape_on_screen()  # a reward may print any letter
    os.setsid()  # Ctrl-C in the terminal stops the run, which still needs its iteration's scores
    for number in SIGNALS:  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent(channel)
    belongs_to_plugin()
    limit_threads()
    reward = message = None
    while True:
        answer: Any = None
        error = ""
        try:
            if message is None:
                if device.startswith("cuda"):
                    torch.cuda.set_device(device)
                reward = load_reward(entry, key, device)
                answer = compares_group(reward)
            else:
                videos, prompts, metadata, fps, seed = message
                request = Request(
                    videos=in_unit_range(torch.from_numpy(videos).to(device)),
                    prompts=prompts,
                    metadata=metadata,
                    fps=fps,
                    seed=seed,
                )
                scores = call(entry.name, reward, request)
                answer = {part: values.numpy() for part, values in scores.items()}
        except (
            BaseException
        ) as failed:  # SystemExit too: the worker reports it and waits for the next message
            error = str(failed) if isinstance(failed, UserError) else failure(failed)
        channel.send((answer, error))
        try:
            message = channel.recv()
        except EOFError:
            return


def _end_with_parent(channel: Connection) -> None:
    """Start a process that kills this one, and all that it starts, when the trainer has ended.

    A thread could not: a reward in C may hold the interpreter's lock. The process is no child of
    the worker, whose reward may wait for all of its children.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    worker = os.getpid()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    try:
        channel.close()
        _wait_for_first(parent.pid or 0, worker)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(worker).children(recursive=True):
                process.kill()
        os.killpg(worker, signal.SIGKILL)  # this process too
    finally:
        os._exit(0)  # it must not go on as a second worker


def _wait_for_first(trainer: int, worker: int) -> None:
    """Wait until one of two processes, by their ids, has ended."""
    try:
        ends = [os.pidfd_open(trainer), os.pidfd_open(worker)]
    except ProcessLookupError:
        return
    except OSError:  # an old kernel, or a container that forbids the call
        while all(map(_runs, (trainer, worker))):
            time.sleep(LOOK_S)
    else:
        poll = select.poll()  # `select` refuses files above 1023
        for end in ends:
            poll.register(end, select.POLLIN)
        poll.poll()


def _runs(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
