"""Joining the process group of torchrun's ranks; sage_fast/util/ranks.py has what they do
together."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from sage_fast.util.errors import RankError, RunError, UserError, first_line, print_error
from sage_fast.util.launchers import check_launch, launched
from sage_fast.util.ranks import local_device, shutdown

FLIGHT_RECORDER = {
    # collectives that the recorder keeps of each rank; gloo keeps none by default
    "TORCH_FR_BUFFER_SIZE": "2000",
    # NCCL's watchdog writes them to a file when a collective has timed out
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Variables that PyTorch reads when the process group is made."""

PATIENCE_S = 30.0
"""Seconds of waiting for the other ranks after which a line says so."""


def initialize(timeout_minutes: float = 10) -> torch.device:
    """Join torchrun's process group, if there is one, and return this rank's device.

    Args:
        timeout_minutes: timeout of a collective; no effect on a group that is already joined.

    Raises:
        UserError: a variable of the launcher is missing or wrong.
        RunError: the other ranks cannot be reached.
    """
    if not dist.is_initialized():
        check_launch()
    device = local_device()
    size = launched("WORLD_SIZE", 1)
    own = launched("RANK", 0)
    if size > 1 and not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        host = os.environ.get("MASTER_ADDR", "")
        port = launched("MASTER_PORT", 0)
        where = f"MASTER_ADDR:MASTER_PORT = {host}:{port}"
        _record_collectives()
        patience = threading.Timer(PATIENCE_S, _note_waiting, (own, size, where))
        patience.daemon = True
        patience.start()
        try:
            _await_store(host, port, timeout, own)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=timeout,
                # NCCL connects eagerly and does not have to guess the device of a barrier.
                device_id=device if device.type == "cuda" else None,
                **_store_of_start(timeout),
            )
        except ValueError as error:
            raise UserError(
                f"WORLD_SIZE = {size}, {where} in the environment: {first_line(error)}"
            ) from error
        except (dist.DistError, OSError) as error:
            where += f" within timeout_minutes = {timeout_minutes:g}"
            raise RunError(
                f"rank {own} of {size} cannot join the others at {where}: {first_line(error)}"
            ) from error
        finally:
            patience.cancel()
    return device


def _note_waiting(rank: int, size: int, where: str) -> None:
    """Say, on whichever rank it is, that the others have not come: the variables may have been left
    in a shell."""
    print_error(
        f"sage-fast: rank {rank} of {size} waits for the others at {where}. If no launcher has "
        "started them, type `unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`"
    )


def _record_collectives() -> None:
    """Switch PyTorch's flight recorder on, unless the environment has settings of its own."""
    if os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE"):  # an older name of the first
        return
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def joined(timeout_minutes: float) -> Iterator[None]:
    """Join the ranks for a block, and leave them after it unless they had joined before.

    So a call from Python leaves the process as it found it. An error leaves the ranks joined: the
    others may still read why this one has failed.
    """
    had_joined = dist.is_initialized()
    initialize(timeout_minutes)
    yield
    if not had_joined:
        shutdown()


def _await_store(host: str, port: int, timeout: timedelta, rank: int) -> None:
    """Wait until the store of rank 0 answers, on rank 0 until its own name is known.

    PyTorch's own waiting prints a trace of its C++ code at each try.

    Raises:
        OSError: it does not, within the timeout.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            addresses = socket.getaddrinfo(host, port)
            if addresses and rank > 0:
                seconds_left = max(deadline - time.monotonic(), 0.1)
                socket.create_connection((host, port), seconds_left).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _store_of_start(timeout: timedelta) -> dict[str, Any]:
    """Return arguments of `init_process_group` that give each start of torchrun's ranks keys of its
    own.

    torchrun keeps its store over a restart, with the addresses of the old ranks and the error that
    ended them. Its count of restarts cannot name the keys: each machine counts only the restarts
    that its own ranks caused.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    name = _name_start(dist.PrefixStore("sage_fast", store), rank, world_size, timeout)
    return {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": world_size}


def _name_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a new name, the same on all ranks, from a store that may hold the keys of earlier
    starts. Collective.

    Rank 0 makes the name and answers the others' requests until each has confirmed it. A rank
    numbers its requests over all starts, so that it takes no answer to an earlier one.
    """
    if rank > 0:
        request = store.add(f"requests/{rank}", 1)
        name = store.get(f"answers/{rank}/{request}").decode()
        store.add(name, 1)
        return name
    deadline = time.monotonic() + timeout.total_seconds()
    name = f"start-{store.add('starts', 1)}"
    while True:
        joined = 1 + store.add(name, 0)  # rank 0, and the ranks that have confirmed the name
        if joined >= world_size:
            return name
        if time.monotonic() > deadline:
            raise RankError(
                f"{joined} of {world_size} ranks joined within timeout_minutes; look at the "
                "others' logs"
            )
        for other in range(1, world_size):
            newest_request = store.add(f"requests/{other}", 0)
            store.set(f"answers/{other}/{newest_request}", name)
        time.sleep(0.05)
