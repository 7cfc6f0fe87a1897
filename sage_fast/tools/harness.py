"""Shared by all measurements: ceilings, timing, and the head line of a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sage_fast.util.environment import data_sheet_flops, synchronize
from sage_fast.util.text import counted

BURST_FLOPS = 789e12
"""FLOP/s of a large bf16 matrix product in a burst on one H200, whose bursts were 757 to 797
(docs/results/gpu.md)."""


def usual_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of activations on `device`: bfloat16 on a GPU, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def host_timer(function: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Return a function that runs `function` once and returns its seconds, including the device's
    work."""

    def measure() -> float:
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - start

    return measure


def matmul_ceiling(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measure FLOP/s of the fastest of several large square matrix products: the device's ceiling
    in this dtype."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timer = host_timer(lambda: a @ b, device)
    best, stop = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < stop:
        best = min(best, timer())
    return 2 * size**3 / best


def full_rate(environment: Mapping[str, Any], measured: float) -> tuple[float, str]:
    """Return the FLOP/s that MFU and HFU are shares of, and a line that says what it is.

    That is the card's data sheet, as in `throughput/mfu` of a run. A device without one, such as a
    CPU, is compared with a matrix product measured on it.

    Args:
        environment: that of a result.
        measured: FLOP/s of the matrix product.
    """
    sheet = None
    dtype = environment.get("dtype")
    if dtype == str(torch.bfloat16).removeprefix("torch."):
        sheet = data_sheet_flops(environment["device"])
    if sheet is None:
        return measured, f"shares are of that matrix product's {measured / 1e12:.3g} TFLOP/s"
    return sheet, f"shares are of the data sheet's {sheet / 1e12:.3g} TFLOP/s"


def head_line(environment: Mapping[str, Any]) -> str:
    """Format the first line of every table: device, threads, versions, date."""
    parts = [
        environment["device"],
        counted(environment["threads"], "thread"),
        f"torch {environment['torch']}",
    ]
    parts += [str(environment[key]) for key in ("dtype", "operators", "date") if key in environment]
    return ", ".join(parts)
