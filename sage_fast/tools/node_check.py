"""`sage-fast doctor --node`: whether the GPUs of a node are fast enough for a job, in a minute.

One process a GPU: all of them multiply matrices at the same time, as in training, and then gather
from each other. Without a GPU two processes do the same on the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import queue
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sage_fast.tools.checks import Check
from sage_fast.tools.harness import host_timer, matmul_ceiling, usual_dtype
from sage_fast.util.errors import in_one_line

log = logging.getLogger(__name__)

CARDS = ("H100 80GB HBM3", "H200")
"""Parts of the names of cards with NVLink for which `LEAST` holds."""

GATHERED_BYTES = {"cuda": 2**30, "cpu": 2**22}
"""Size of what each rank has after an all-gather."""

REPETITIONS = 10


class Least(NamedTuple):
    """The smallest rates with which a node is not refused; 0: any rate.

    Attributes:
        tflops: of a bf16 matrix product on each GPU, in TFLOP/s.
        gigabytes: bus bandwidth of an all-gather over the GPUs of the node, in GB/s.
    """

    tflops: float
    gigabytes: float


LEAST = Least(600, 300)


class Rates(NamedTuple):
    """What one rank measured: FLOP/s, and bytes/s of an all-gather, 0 if it is the only one."""

    flops: float
    gather: float


def check_node(tflops: float | None, gigabytes: float | None, timeout_s: float) -> int:
    """Print a row for each GPU and one for the all-gather; return 1 if the node is refused.

    Args:
        tflops, gigabytes: as of `Least`; by default those of an H100 or H200 with NVLink, and none
            for another card.
        timeout_s: a node that has not answered by then is refused.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count() if device_type == "cuda" else 2
    name = torch.cuda.get_device_name(0) if device_type == "cuda" else "CPU"
    usual = LEAST if any(card in name for card in CARDS) else Least(0, 0)
    least = Least(
        usual.tflops if tflops is None else tflops,
        usual.gigabytes if gigabytes is None else gigabytes,
    )
    measured, errors = _measure(count, device_type, timeout_s)
    checks = list(_rows(measured, errors, count, least))
    for check in checks:
        log.info(f"{check.verdict:<9}{check.name:<34}{check.found}")

    refused = [check.name for check in checks if check.verdict != "ok"]
    verdict = f"refused: {', '.join(refused)}" if refused else "passed"
    log.info(f"\n{socket.gethostname()}, {count} x {name}: {verdict}")
    return int(bool(refused))


def _rows(
    measured: dict[int, Rates], errors: dict[int, str], count: int, least: Least
) -> Iterator[Check]:
    for number in range(count):
        name = f"matrix product, rank {number}"
        if number in measured:
            rate = measured[number].flops / 1e12
            yield _compared(name, rate, least.tflops, "TFLOP/s")
        else:
            yield Check(name, "wrong", errors.get(number, "no answer"))
    if count > 1 and measured:
        slowest = min(rates.gather for rates in measured.values())
        yield _compared("all-gather", slowest / 1e9, least.gigabytes, "GB/s")


def _compared(name: str, rate: float, least: float, unit: str) -> Check:
    found = f"{rate:.4g} {unit}"
    if rate >= least:
        return Check(name, "ok", found)
    return Check(name, "slow", f"{found}; expected at least {least:g}")


def _measure(
    count: int, device_type: str, timeout_s: float
) -> tuple[dict[int, Rates], dict[int, str]]:
    """Return the rates by rank, and the errors of the ranks that have none."""
    measured: dict[int, Rates] = {}
    errors: dict[int, str] = {}
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            spawn.Process(
                target=_answer,
                args=(number, count, device_type, store, timeout_s, answers),
                daemon=True,
            )
            for number in range(count)
        ]
        for process in ranks:
            process.start()
        stop = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while len(measured) + len(errors) < count:
                number, found = answers.get(timeout=max(stop - time.monotonic(), 0))
                if isinstance(found, Rates):
                    measured[number] = found
                else:
                    errors[number] = found
        for process in ranks:
            process.kill()
            process.join(timeout=5)  # one that waits for a driver cannot be killed
    return measured, errors


def _answer(
    number: int, count: int, device_type: str, store: str, timeout_s: float, answers: Any
) -> None:
    """Put this rank's `Rates`, or its error, into the queue."""
    try:
        found: Rates | str = _rates(number, count, device_type, store, timeout_s)
    except Exception as error:  # of a driver, of NCCL
        found = f"ended in {in_one_line(error)}"
    answers.put((number, found))


def _rates(number: int, count: int, device_type: str, store: str, timeout_s: float) -> Rates:
    device = torch.device(device_type, number) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.FileStore(store, count),
        rank=number,
        world_size=count,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device_type == "cuda" else None,
    )
    dist.barrier()  # so that all draw power together
    flops = matmul_ceiling(device, usual_dtype(device), seconds=2.0)
    gather = _gather_rate(device, count) if count > 1 else 0.0
    dist.destroy_process_group()
    return Rates(flops, gather)


def _gather_rate(device: torch.device, count: int) -> float:
    """Return the bus bandwidth of an all-gather in bytes/s: what each GPU receives, over the
    time."""
    size = GATHERED_BYTES[device.type] // count
    own = torch.ones(size, dtype=torch.uint8, device=device)
    whole = torch.empty(size * count, dtype=torch.uint8, device=device)
    # PyTorch 2.13 has another name for it, and warns of the old one
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    timer = host_timer(lambda: gather(whole, own), device)
    timer()  # connects
    seconds = sorted(timer() for _ in range(REPETITIONS))
    return size * (count - 1) / seconds[REPETITIONS // 2]
