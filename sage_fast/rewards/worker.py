"""The process of a reward: makes it, then answers one question after the other until its parent is gone."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from sage_fast.config.schema import RewardEntry
from sage_fast.errors import UserError
from sage_fast.rewards.failure import failure
from sage_fast.rewards.load import load_reward, score_of
from sage_fast.rewards.score import checked

PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """
    Args:
        descriptor: of a socket to the parent.
        parent: its process id.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # within a call that hangs too
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides; it needs the scores of its iteration
        signal.signal(number, signal.SIG_IGN)
    channel, own = Connection(descriptor), os.getpid()
    start = json.loads(channel.recv_bytes())
    try:
        device = torch.device(start["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        entry = RewardEntry(name=start["entry"]["name"], args=start["entry"]["args"])
        score = score_of(load_reward(entry, start["key"], start["device"]))
    except UserError as error:
        _send(channel, {"number": 0, "error": str(error)})
        return
    except BaseException as error:
        _send(channel, {"number": 0, "error": failure(error)})
        return
    _send(channel, {"number": 0})
    while True:
        try:
            question = json.loads(channel.recv_bytes())
            memory = recv_handle(channel)
        except (EOFError, OSError):
            return
        answer: dict[str, Any] = {"number": question["number"]}
        try:
            count = len(question["prompts"])
            with torch.no_grad():
                returned = score(_videos(memory, question["shape"]).to(device), question["prompts"])
            parts = checked(returned, count)
            answer["parts"] = {part: values.tolist() for part, values in parts.items()}
        except BaseException as error:  # SystemExit too: the process goes on
            answer["error"] = failure(error)
        if os.getpid() != own:  # a fork that came back from the reward
            os._exit(1)
        _send(channel, answer)


def _send(channel: Connection, answer: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(answer).encode())


def _videos(memory: int, shape: list[int]) -> torch.Tensor:
    """The videos in a file in memory; what the reward changes in them, only it sees."""
    try:
        pages = mmap.mmap(memory, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(memory)
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)
