"""Rewards that fail in every way, for `tests/test_reward_workers.py`: each score is a fingerprint
of its own video."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sage_fast.rewards.interface import Request


def request(videos: Tensor, prompts: Sequence[str] | None = None, seed: int = 0) -> Request:
    """Return what a backend gets, with prompts `a`, `b`, ... unless given."""
    texts = [chr(97 + i) for i in range(len(videos))] if prompts is None else list(prompts)
    return Request(videos=videos, prompts=texts, metadata=[{} for _ in texts], seed=seed)


def fingerprints(videos: Tensor) -> Tensor:
    """`[B]`: another number for every video."""
    weights = torch.linspace(0.5, 1.5, videos[0].numel(), dtype=torch.float64)
    return (videos.flatten(1).double() * weights).mean(1)


class Fingerprint:
    """Fails as `how` says on the prompt `poison`, and as `plan` says at calls that are counted from
    1 over all lives of the process of a rank: "3 kill".

    Args:
        folder: of the count, and of a file pid-<number> for each process; it has one for each rank.
    """

    def __init__(
        self,
        how: str = "",
        folder: str | None = None,
        plan: Sequence[str] = (),
        poison: str = "",
        device: str = "cpu",
    ) -> None:
        self.how, self.poison, self.device = how, poison, device
        self.plan = {int(number): what for number, what in map(str.split, plan)}
        self.folder = folder and Path(folder, os.environ.get("RANK", "0"))
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"pid-{os.getpid()}").touch()

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        value = fingerprints(videos)
        planned = self.plan.get(self._count(), "")
        wrong = [
            planned == "nan" or (self.how == "nan" and prompt == self.poison) for prompt in prompts
        ]
        value[torch.tensor(wrong)] = torch.nan
        if planned not in ("", "nan"):
            fail(planned)
        if self.how not in ("", "nan") and self.poison in prompts:
            fail(self.how)
        return {"print": value, "watched": torch.full((len(prompts),), torch.nan)}

    def _count(self) -> int:
        if not self.folder:
            return 0
        with (self.folder / "calls").open("a") as file:
            file.write(".")
            file.flush()
            return file.tell()


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("wrong\nvalue")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(4)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "fork":
        os.fork()
    if how in ("hang", "fork"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    raise AssertionError(how)


class Returns:
    """What the test says, whatever the videos."""

    def __init__(self, what: str) -> None:
        self.what = what

    def score(self, videos: Tensor, prompts: list[str]) -> object:
        count = len(prompts)
        print("a reward may print", flush=True)
        if self.what == "children":
            own = os.getpid()
            for process in Path(f"/proc/{own}/task/{own}/children").read_text().split():
                os.kill(int(process), signal.SIGTERM)
            time.sleep(0.3)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
            if os.fork() == 0:
                return {"a": [9.0] * count}
        return {
            "ints": {"a": torch.arange(count)},
            "bools": {"a": torch.ones(count, dtype=torch.bool)},
            "float64": {"a": torch.ones(count, dtype=torch.float64)},
            "list": {"a": [1.0] * count},
            "numpy": {"a": torch.ones(count).numpy()},
            "graph": {"a": torch.ones(count, requires_grad=True) * 2},
            "empty": {},
            "none": None,
            "text": {"a": ["much"] * count},
            "matrix": {"a": torch.ones(count, 1)},
            "number": {"a": 1.0},
            "complex": {"a": torch.ones(count, dtype=torch.complex64)},
            "nan": {"a": torch.full((count,), torch.nan)},
            "key": {3: torch.ones(count)},
        }.get(self.what, {"a": torch.ones(count)})


def gradients(videos: Tensor, prompts: list[str]) -> dict[str, list[float]]:
    return {
        "on": [float((videos * torch.ones(1, requires_grad=True)).requires_grad)] * len(prompts)
    }


class Named:
    """One part of any name."""

    def __init__(self, part: str) -> None:
        self.part = part

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {self.part: fingerprints(videos)}


def count_and_print(
    videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]
) -> dict[str, Tensor]:
    """The metadata's `count`, or -1, and the prints, so that a mix-up shows.

    Fails on a batch with count 3.
    """
    if len(prompts) > 1 and any(one.get("count") == 3 for one in metadata):
        raise ValueError("three in a batch")
    counts = torch.tensor([float(one.get("count", -1)) for one in metadata])
    return {"count": counts, "print": fingerprints(videos)}


class Meddles(Fingerprint):
    """Does to the process what `what` says, in each call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        if self.what == "destroy" and dist.is_initialized():
            dist.destroy_process_group()
        if self.what == "abort" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        if self.what == "fork":
            os.fork()
        if self.what == "launcher":
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        if self.what == "alarm":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
        if self.what == "event loop":
            loop = asyncio.new_event_loop()
            loop.add_signal_handler(signal.SIGTERM, print)
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        if self.what == "autocast":
            torch.autocast("cpu", torch.bfloat16).__enter__()
        if self.what == "optimizer":
            torch.optim.AdamW.zero_grad = lambda self, set_to_none=True: None  # type: ignore[method-assign]
        return super().score(videos, prompts)


class Draws:
    """Adds what it draws to its scores: with torch, NumPy and Python, when it is created and in
    each call."""

    def __init__(self) -> None:
        self.drawn = float(torch.rand(())) + float(np.random.rand()) + random.random()

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        drawn = (
            torch.rand(len(prompts))
            + torch.from_numpy(np.random.rand(len(prompts)))
            + random.random()
        )
        return {"print": fingerprints(videos) + drawn + self.drawn}
