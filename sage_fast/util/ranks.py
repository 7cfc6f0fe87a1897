"""Ranks and collectives; in a single process every collective is the identity.

With `model.sequence_parallel`, consecutive ranks form a sequence group: they hold the same samples
and count as one data-parallel rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sage_fast.util.container import available_cpus
from sage_fast.util.errors import RankError, RewardError, Stopped, UserError
from sage_fast.util.launchers import launched


def limit_threads() -> None:
    """Give PyTorch no more threads than the container has CPUs, unless the environment says how
    many."""
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(min(torch.get_num_threads(), available_cpus()))


def local_device() -> torch.device:
    """Return this process's GPU, or the CPU; from then on, every bf16 matmul on it is summed in
    float32.

    By default cuBLAS may add the parts of a sum that it splits (a long K, few rows) in bfloat16.

    Raises:
        UserError: LOCAL_RANK names no GPU that this process sees, or several ranks would share one.
    """
    limit_threads()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", _number_of_gpu())
    torch.cuda.set_device(device)
    return device


def _number_of_gpu() -> int:
    local_rank = launched("LOCAL_RANK", 0)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"LOCAL_RANK = {local_rank} in the environment, but the process sees {count} GPU(s): "
            f"expected less than {count}; start at most one rank a GPU, or set LOCAL_RANK=0 where "
            "each task sees a GPU of its own"
        )
    if count > 1 and launched("WORLD_SIZE", 1) > 1 and not os.environ.get("LOCAL_RANK"):
        raise UserError(
            f"no LOCAL_RANK in the environment: expected 0 to {count - 1}, the rank's number on "
            "its node, as torchrun sets it; without it every rank would take the first GPU"
        )
    return local_rank


def start_alone(device: torch.device) -> None:
    """Start a process group of this process alone unless it has joined one: DeepSpeed and FSDP2
    need a group."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


_sequence_group: dist.ProcessGroup | None = None


def join_sequence_group(size: int, timeout_minutes: float = 10) -> None:
    """Split the ranks into sequence groups of `size` consecutive ranks; `size` divides the world
    size.

    Consecutive ranks share a node if `size` divides the ranks per node. That matters: a sequence
    group exchanges far more in every block than data-parallel ranks do in an iteration.
    """
    global _sequence_group
    if size == sequence_size():
        return
    _sequence_group = (
        dist.new_subgroups(size, timeout=timedelta(minutes=timeout_minutes))[0]
        if size > 1
        else None
    )


def sequence_group() -> dist.ProcessGroup | None:
    """Process group of the ranks that share this rank's samples; None without sequence
    parallelism."""
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


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of all ranks, or of those of a group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def all_reduce(tensor: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce over all ranks, or over those of a group, in place; `op` is `sum`, `min` or `max`."""
    if dist.is_initialized():
        dist.all_reduce(
            tensor,
            {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op],
            group,
        )
    return tensor


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is true on any rank. Collective."""
    if world_size() == 1:
        return flag
    return bool(all_reduce(torch.tensor(int(flag), device=device), "max"))


def data_sum(tensor: Tensor) -> Tensor:
    """Sum over the data-parallel ranks in place: shared samples count once."""
    return all_reduce(tensor).div_(sequence_size())


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, or of those of a group, in rank order; for small picklable
    objects."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(values, value, group=group)
    return values


def gather_objects_of_sequence(value: Any) -> list[Any]:
    """Return the values of the ranks of this sequence group, as `all_gather_object` does."""
    return all_gather_object(value, _sequence_group) if _sequence_group is not None else [value]


def broadcast_object(value: Any, source: int) -> Any:
    """Return the value of rank `source` on every rank.

    It must be picklable, with tensors on the CPU.
    """
    if not dist.is_initialized():
        return value
    values = [value if rank() == source else None]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def check_agreement(values: Mapping[str, object], hint: str = "") -> None:
    """Check that all ranks go by the same values, which decide how many collectives each makes.
    Collective.

    Args:
        values: what each rank has read for itself, by name.
        hint: what to do, at the end of the message.

    Raises:
        UserError: on all ranks, naming the first value that differs.
    """
    found = all_gather_object({name: repr(value) for name, value in values.items()})
    for number, of_rank in enumerate(found):
        for name in sorted({*found[0], *of_rank}):
            first, other = found[0].get(name, "not there"), of_rank.get(name, "not there")
            if first != other:
                raise UserError(
                    f"{name} = {other} on rank {number}, and {first} on rank 0; expected the same "
                    f"on all ranks{hint}"
                )


def collective_device() -> torch.device:
    """Return the device on which collectives run."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def exchange(
    sent: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Send `given[i]` elements to rank i, in order, and return those that each rank sends here,
    `taken[i]` of them."""
    received = sent.new_empty(sum(taken), device=collective_device())
    dist.all_to_all_single(received, sent.to(received.device), taken, given, group)
    return received


def fails_alone() -> bool:
    """Return whether an exception is being handled that only this of several ranks raises.

    The others may wait for this rank in a collective, so it must not begin another one.
    """
    return (
        (error := sys.exception()) is not None
        and world_size() > 1
        and not getattr(error, "on_all_ranks", False)
    )


@contextlib.contextmanager
def fail_together(collective: bool = False) -> Iterator[None]:
    """Fail on every rank if a block without collectives fails on one, so that no rank hangs.
    Collective.

    Args:
        collective: the block's forwards are collective. Only a RewardError or OSError, which such a
            block raises after its last forward, is shared. Any other error may leave the other
            ranks inside a forward, so it is raised on this rank alone, and `run.fail_fast` ends the
            others.

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
    stopped = max(number for number, _ in outcomes)  # of a signal; 0 without one
    if stopped:
        raise Stopped(stopped)
