"""Gloo ranks as torchrun would start them, forked from a process that has imported everything
once."""

import contextlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import sage_fast.report.page
import sage_fast.run.train
import tests.tiny  # noqa: F401  imports the testbed's model, which a command imports late
from sage_fast.cli import main

PRELOADED = [__name__, "sage_fast.parallel.zero", "deepspeed.runtime.zero.muon.muon_optimizer"]
"""What all ranks import; DeepSpeed, if it is installed, only in the process that they are forked
from."""


def run_ranks(
    target: Callable[..., None], count: int, folder: Path, *arguments: Any
) -> list[int | None]:
    """Exit statuses of `target(folder, *arguments)` on so many ranks; what they print is in
    `folder/screen-RANK`."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        server.Process(target=_become, args=(rank, count, port, target, folder, arguments))
        for rank in range(count)
    ]
    # where the server, started by the first, finds its imports
    with contextlib.chdir(Path(__file__).parent.parent):
        for process in ranks:
            process.start()
    for process in ranks:
        process.join(timeout=300)
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def screens(folder: Path, count: int = 2) -> list[str]:
    return [(folder / f"screen-{rank}").read_text() for rank in range(count)]


def command_on_ranks(words: Sequence[str], folder: Path, count: int = 2, **environment: str) -> str:
    """What all print, together; `folder` is where they are."""
    assert run_ranks(_command, count, folder, list(words), environment) == [0] * count, screens(
        folder, count
    )
    return "".join(screens(folder, count))


def _command(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ |= environment
    sys.exit(main(words))


def _become(
    rank: int,
    count: int,
    port: int,
    target: Callable[..., None],
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    with (folder / f"screen-{rank}").open("wb") as screen:
        for stream in (1, 2):
            os.dup2(screen.fileno(), stream)
    torch.set_num_threads(1)
    sage_fast.report.page._charts = lambda data: []  # they take longer than the runs
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    target(folder, *arguments)
