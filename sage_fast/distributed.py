"""Ranks and reductions; every function is the identity in a single process.

Ranks that follow each other may share samples (`model.sequence_parallel`): they form a sequence group, hold the same
samples and count as one data-parallel rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sage_fast.errors import RankError, Stopped


def initialize(timeout_minutes: float = 10) -> torch.device:
    """Join the process group that torchrun describes, if any, and return this rank's device.

    Args:
        timeout_minutes: longest wait for the other ranks in a collective, for a group that is not joined yet.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(minutes=timeout_minutes),
            # NCCL connects at once, and never guesses the device of a barrier.
            device_id=device if device.type == "cuda" else None,
            **_store_of_restart(),
        )
    return device


def _store_of_restart() -> dict[str, Any]:
    """A part of torchrun's store for each restart on one machine: without --rdzv-backend or --standalone it keeps the
    store, in which these ranks would find the addresses of those before them. Across machines it makes a new one."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts == 0 or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    return {"store": dist.PrefixStore(f"restart-{restarts}", store), "rank": rank, "world_size": world_size}


_sequence_group: dist.ProcessGroup | None = None


def join_sequence_group(size: int, timeout_minutes: float = 10) -> None:
    """Make each `size` ranks in a row one sequence group; `size` divides the number of ranks.

    Neighbours, so that a group lies within a node if `size` divides the ranks of a node: what it exchanges in every
    block is far more than what data-parallel ranks exchange in an iteration.
    """
    global _sequence_group
    if size == sequence_size():
        return
    timeout = timedelta(minutes=timeout_minutes)
    _sequence_group = dist.new_subgroups(size, timeout=timeout)[0] if size > 1 else None


def sequence_group() -> dist.ProcessGroup | None:
    """The ranks that share this rank's samples; None if it shares none."""
    return _sequence_group


def sequence_size() -> int:
    return dist.get_world_size(_sequence_group) if _sequence_group is not None else 1


def sequence_rank() -> int:
    return rank() % sequence_size()


def data_rank() -> int:
    """This rank's place among those that have samples of their own."""
    return rank() // sequence_size()


def data_size() -> int:
    return world_size() // sequence_size()


def join_deepspeed() -> None:
    """Let DeepSpeed communicate in the process group that is there, within its timeout; it would make another one."""
    import deepspeed  # optional, and takes seconds
    from deepspeed.utils import groups

    # An operator for inference that nothing here calls; on a CPU it is compiled at start, and says so on the screen.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(verbose=False)
    vars(groups)["_WORLD_GROUP"] = dist.group.WORLD


def shutdown() -> None:
    global _sequence_group
    _sequence_group = None
    if (groups := sys.modules.get("deepspeed.utils.groups")) is not None:
        vars(groups)["_WORLD_GROUP"] = None
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
    """`sum`, `min` or `max` over the ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op])
    return tensor


def data_sum(tensor: Tensor) -> Tensor:
    """Sum over the ranks, in place, with samples that ranks share counted once."""
    return all_reduce(tensor).div_(sequence_size())


def all_gather_object(value: Any) -> list[Any]:
    """The values of all ranks; small picklable things only."""
    return _gather_objects(value, world_size(), None) if dist.is_initialized() else [value]


def gather_objects_of_sequence(value: Any) -> list[Any]:
    """The values of the ranks of this sequence group, likewise."""
    return _gather_objects(value, sequence_size(), _sequence_group) if _sequence_group is not None else [value]


def _gather_objects(value: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, source: int) -> Any:
    """The value of rank `source`, on every rank; something picklable, tensors on the CPU."""
    if not dist.is_initialized():
        return value
    values = [value if rank() == source else None]
    dist.broadcast_object_list(values, src=source)
    return values[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around work without collectives: what fails on one rank fails on all, so that none waits for it in vain.

    Raises:
        RankError: on the ranks whose own work went well, or was stopped, if that of another one failed.
        Stopped: on all ranks, if it was raised on one.
    """
    if world_size() == 1:
        yield
        return
    failure: Exception | Stopped | None = None
    try:
        yield
    except (Exception, Stopped) as error:
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
