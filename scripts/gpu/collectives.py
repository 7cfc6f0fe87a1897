"""Time collectives of training, on every GPU of the machine: `torchrun ... -m
scripts.gpu.collectives --json FILE`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sage_fast.ops import implementation
from sage_fast.tools.harness import host_timer
from sage_fast.util.environment import environment
from sage_fast.util.files import write_json
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, world_size

LORA_ELEMENTS, BLOCK_ELEMENTS = 184_000_000, 151_000_000
TINY_ELEMENTS = 10_000
PARAMETERS = 1300
"""Parameters of the LoRA."""
CALLS = 10


def median_seconds(function: Callable[[], Any], device: torch.device) -> float:
    timer = host_timer(function, device)
    timer()
    times = []
    for _ in range(CALLS if device.type == "cuda" else 1):
        dist.barrier()
        times.append(timer())
    return statistics.median(times)


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each collective: its name, seconds, and the bytes that a GPU sends."""
    ranks, on_gpu = world_size(), device.type == "cuda"
    lora, block = (LORA_ELEMENTS, BLOCK_ELEMENTS) if on_gpu else (TINY_ELEMENTS, TINY_ELEMENTS)
    share = (ranks - 1) / ranks
    flat = torch.ones(lora, device=device)
    parts = [part.clone() for part in flat.chunk(PARAMETERS)]
    whole = torch.ones(block // ranks * ranks, device=device, dtype=torch.bfloat16)
    shard = whole.chunk(ranks)[rank()].clone()

    def reduce_parts() -> None:
        for part in parts:
            dist.all_reduce(part)

    reduced, gathered = 2 * share * flat.nbytes, share * whole.nbytes
    collectives: list[tuple[str, float, Callable[[], Any]]] = [
        ("all-reduce of a LoRA in one buffer", reduced, lambda: dist.all_reduce(flat)),
        (f"the same in {PARAMETERS:,} all-reduces", reduced, reduce_parts),
        (
            "all-gather of a block",
            gathered,
            lambda: dist.all_gather_into_tensor(whole, shard),
        ),
    ]
    rows = []
    for name, sent, function in collectives:
        seconds = median_seconds(function, device)
        rows.append({"collective": name, "seconds": seconds, "sent_bytes": sent})
        if rank() == 0:
            rate = sent / seconds / 1e9
            print(f"{name}: {1e3 * seconds:.2f} ms, {rate:.1f} GB/s sent a GPU", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    device = initialize(10)
    rows = measure(device)
    if rank() == 0:
        facts = environment(device, implementation(device))
        write_json({"environment": facts, "ranks": world_size(), "collectives": rows}, options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
