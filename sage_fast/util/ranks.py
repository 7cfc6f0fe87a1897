"""Ranks and collectives; in a single process every collective is the identity.

With `model.sequence_parallel`, consecutive ranks form a sequence group: they hold the same samples and count as one
data-parallel rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import reprlib
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sage_fast.util.errors import RankError, RewardError, RunError, Stopped, UserError, first_line


def launched(name: str, default: int) -> int:
    """Return a number that the launcher gives in the environment, such as WORLD_SIZE; `default` without a launcher.

    Raises:
        UserError: it is no whole number, or no rank is left.
    """
    text, least = os.environ.get(name) or str(default), min(default, 1)
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        expected = f"expected a whole number from {least}, as torchrun sets it; without a launcher, unset it"
        raise UserError(f"{name} = {reprlib.repr(text)} in the environment: {expected}")
    return int(text)


def local_device() -> torch.device:
    """Return this process's GPU, or the CPU; from then on, every bf16 matmul on it is summed in float32.

    By default cuBLAS may add the parts of a sum that it splits (a long K, few rows) in bfloat16.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", launched("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device


def initialize(timeout_minutes: float = 10) -> torch.device:
    """Join torchrun's process group, if there is one, and return this rank's device.

    Args:
        timeout_minutes: timeout of a collective; no effect on a group that is already joined.

    Raises:
        UserError: a variable of the launcher is missing or wrong.
        RunError: the other ranks cannot be reached.
    """
    device, size, own = local_device(), launched("WORLD_SIZE", 1), launched("RANK", 0)
    if size > 1 and not dist.is_initialized():
        if own >= size:
            raise UserError(f"RANK = {own} in the environment: expected less than WORLD_SIZE = {size}")
        timeout = timedelta(minutes=timeout_minutes)
        host, port = os.environ.get("MASTER_ADDR", ""), launched("MASTER_PORT", 0)
        where = f"MASTER_ADDR:MASTER_PORT = {host}:{port}"
        try:
            if own > 0 and host and port:
                _await_store(host, port, timeout)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=timeout,
                # NCCL connects eagerly and does not have to guess the device of a barrier.
                device_id=device if device.type == "cuda" else None,
                **_store_of_start(timeout),
            )
        except ValueError as error:
            raise UserError(f"WORLD_SIZE = {size}, {where} in the environment: {first_line(error)}") from error
        except (dist.DistError, OSError) as error:
            where += f" within timeout_minutes = {timeout_minutes:g}"
            raise RunError(f"rank {own} of {size} cannot join the others at {where}: {first_line(error)}") from error
    return device


def _await_store(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the store of rank 0 answers: PyTorch's own waiting prints a trace of its C++ code at each try.

    Raises:
        OSError: it does not, within the timeout.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return socket.create_connection((host, port), max(deadline - time.monotonic(), 0.1)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _store_of_start(timeout: timedelta) -> dict[str, Any]:
    """Return arguments of `init_process_group` that give each start of torchrun's ranks keys of its own.

    torchrun keeps its store over a restart, with the addresses of the old ranks and the error that ended them. Its
    count of restarts cannot name the keys: each machine counts only the restarts that its own ranks caused.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    name = _name_start(dist.PrefixStore("sage_fast", store), rank, world_size, timeout)
    return {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": world_size}


def _name_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a new name, the same on all ranks, from a store that may hold the keys of earlier starts. Collective.

    Rank 0 makes the name and answers the others' requests until each has confirmed it. A rank numbers its requests over
    all starts, so that it takes no answer to an earlier one.
    """
    if rank > 0:
        request = store.add(f"requests/{rank}", 1)
        name = store.get(f"answers/{rank}/{request}").decode()
        store.add(name, 1)
        return name
    name, deadline = f"start-{store.add('starts', 1)}", time.monotonic() + timeout.total_seconds()
    while (joined := 1 + store.add(name, 0)) < world_size:
        if time.monotonic() > deadline:
            raise RankError(f"{joined} of {world_size} ranks joined within timeout_minutes; look at the others' logs")
        for other in range(1, world_size):
            store.set(f"answers/{other}/{store.add(f'requests/{other}', 0)}", name)
        time.sleep(0.05)
    return name


def start_alone(device: torch.device) -> None:
    """Start a process group of this process alone unless it has joined one: DeepSpeed and FSDP2 need a group."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


_sequence_group: dist.ProcessGroup | None = None


def join_sequence_group(size: int, timeout_minutes: float = 10) -> None:
    """Split the ranks into sequence groups of `size` consecutive ranks; `size` divides the world size.

    Consecutive ranks share a node if `size` divides the ranks per node. That matters: a sequence group exchanges far
    more in every block than data-parallel ranks do in an iteration.
    """
    global _sequence_group
    if size == sequence_size():
        return
    timeout = timedelta(minutes=timeout_minutes)
    _sequence_group = dist.new_subgroups(size, timeout=timeout)[0] if size > 1 else None


def sequence_group() -> dist.ProcessGroup | None:
    """Process group of the ranks that share this rank's samples; None without sequence parallelism."""
    return _sequence_group


def sequence_size() -> int:
    return dist.get_world_size(_sequence_group) if _sequence_group is not None else 1


def sequence_rank() -> int:
    return rank() % sequence_size()


def data_rank() -> int:
    """Data-parallel rank: the index of this rank's sequence group."""
    return rank() // sequence_size()


def data_size() -> int:
    return world_size() // sequence_size()


def shutdown() -> None:
    global _sequence_group
    _sequence_group = None
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce over all ranks in place; `op` is `sum`, `min` or `max`."""
    if dist.is_initialized():
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op])
    return tensor


def data_sum(tensor: Tensor) -> Tensor:
    """Sum over the data-parallel ranks in place: shared samples count once."""
    return all_reduce(tensor).div_(sequence_size())


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, or of those of a group, in rank order; for small picklable objects."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_objects_of_sequence(value: Any) -> list[Any]:
    """Return the values of the ranks of this sequence group, as `all_gather_object` does."""
    return all_gather_object(value, _sequence_group) if _sequence_group is not None else [value]


def broadcast_object(value: Any, source: int) -> Any:
    """Return the value of rank `source` on every rank. It must be picklable, with tensors on the CPU."""
    if not dist.is_initialized():
        return value
    values = [value if rank() == source else None]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def collective_device() -> torch.device:
    """Return the device on which collectives run."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def exchange(sent: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """Send `given[i]` elements to rank i, in order, and return those that each rank sends here, `taken[i]` of them."""
    received = sent.new_empty(sum(taken), device=collective_device())
    dist.all_to_all_single(received, sent.to(received.device), taken, given, group)
    return received


def fails_alone() -> bool:
    """Return whether an exception is being handled that only this of several ranks raises.

    The others may wait for this rank in a collective, so it must not begin another one.
    """
    return (error := sys.exception()) is not None and world_size() > 1 and not getattr(error, "on_all_ranks", False)


@contextlib.contextmanager
def fail_together(collective: bool = False) -> Iterator[None]:
    """Fail on every rank if a block without collectives fails on one, so that no rank hangs. Collective.

    Args:
        collective: the block's forwards are collective. Only a RewardError or OSError, which such a block raises after
            its last forward, is shared. Any other error may leave the other ranks inside a forward, so it is raised on
            this rank alone, and `run.fail_fast` ends the others.

    Raises:
        RankError: another rank failed; raised where this rank's block finished or was stopped.
        Stopped: on all ranks, if it was raised on one and none failed.
    """
    if world_size() == 1:
        yield
        return
    failure: Exception | Stopped | None = None
    try:
        yield
    except (Exception, Stopped) as error:
        if collective and not isinstance(error, (RewardError, OSError)):
            raise
        failure = error
    number = failure.number if isinstance(failure, Stopped) else 0
    text = None if failure is None or number else f"{type(failure).__name__}: {failure}"
    outcomes: list[tuple[int, str | None]] = all_gather_object((number, text))
    if failure is not None and text is not None:
        vars(failure)["on_all_ranks"] = True
        raise failure
    for other, (_, why) in enumerate(outcomes):
        if why is not None:
            raise RankError(f"rank {other} failed: {why}")
    if stopped := max(number for number, _ in outcomes):
        raise Stopped(stopped)
