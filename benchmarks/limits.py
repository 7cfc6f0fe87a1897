"""Measure what kernels can reach for three seconds on end: `sage-fast bench limits`.

- `ceiling`: a large matrix product, beside its best single call. A power limit sets the rate of
  seconds, and zeros need less power than data.
- `attention`: every backend at 480p and 81 frames, forward and backward apart.
- `adapter_rows`: the kernel behind the adapters over its tiles, against PyTorch's GELU with cuBLAS,
and a copy.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from sage_fast.benchmarks.operators import LEAST_SHARE
from sage_fast.benchmarks.timing import Save, interleaved, save_nothing
from torch import Tensor

from sage_fast.models.attention.backends import ATTENTION, usable
from sage_fast.models.attention.trial import try_attention
from sage_fast.ops import implementation
from sage_fast.ops.adapter_rows import adapter_rows_backward_reference, adapter_rows_reference
from sage_fast.tools.harness import (
    full_rate,
    head_line,
    host_timer,
    matmul_ceiling,
    usual_dtype,
)
from sage_fast.util.environment import environment
from sage_fast.util.errors import in_one_line
from sage_fast.util.ranks import local_device

PARTS = ("ceiling", "attention", "adapter_rows")
DATA = ("normal", "zeros")
SIZES: dict[str, dict[str, Any]] = {
    "480p 81 frames": {"attention": (1, 32_960, 16, 128), "adapter_rows": (1, 32_760, 8192)},
    "tiny": {"attention": (1, 64, 2, 32), "adapter_rows": (1, 24, 32)},
}
"""Size -> shape of a part's inputs: `[B, S, H, D]` with 200 text tokens, and `[B, S, d]` of the
feed-forward."""
SECONDS = {"cuda": 3.0, "cpu": 0.2}
"""Length of a sustained measurement."""
RANK = 64
TILES = tuple(
    {"ROWS": rows, "BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}
    for rows, block, warps in (
        (32, 64, 8),
        (32, 64, 4),
        (64, 64, 4),
        (64, 64, 8),
        (128, 64, 8),
        (64, 32, 4),
        (64, 128, 8),
    )
)
"""Tiles of `adapter_rows`: rows, columns and warps of a program."""
CALLS = 10
"""Calls of `adapter_rows` that are timed together."""
BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward: fused kernels compute the scores again.
"""


# -- back to back ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched(device: torch.device) -> Iterator[list[tuple[float, float]]]:
    """Yield a list that holds, after the block, (MHz, W) of the GPU every 0.2 s; empty without
    nvidia-smi."""
    samples: list[tuple[float, float]] = []
    smi = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if smi is None:
        yield samples
        return
    query = [
        smi,
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
        "--loop-ms=200",
    ]
    query.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    process = subprocess.Popen(
        query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
    )
    try:
        yield samples
    finally:
        process.terminate()
        for line in process.communicate()[0].splitlines():
            with contextlib.suppress(ValueError):  # [N/A], or cut off at the end
                clock, power = map(float, line.split(","))
                samples.append((clock, power))


def sustain(
    function: Callable[[], Any], flops: float, device: torch.device
) -> dict[str, float | None]:
    """Call a function back to back for `SECONDS`.

    Returns:
        FLOP/s, those of the best single call before, calls, seconds, and the medians of clock (MHz)
        and power (W); None without nvidia-smi.
    """
    timer = host_timer(function, device)
    timer()
    once = min(timer() for _ in range(3))
    # between two waits, so that the host never lets the device run dry for long
    batch = max(1, int(0.1 / once))
    many = host_timer(lambda: [function() for _ in range(batch)], device)
    calls, start = 0, time.perf_counter()
    with _watched(device) as samples:
        while (seconds := time.perf_counter() - start) < SECONDS[device.type] or not calls:
            many()
            calls += batch
        seconds = time.perf_counter() - start
    steady = samples[len(samples) // 3 :]  # before, the clock may still rise
    clock, power = (
        (statistics.median(column) for column in zip(*steady)) if steady else (None, None)
    )
    return {
        "flops_per_second": flops * calls / seconds, "burst_flops_per_second": flops / once,
        "calls": calls, "seconds": seconds, "clock_mhz": clock, "power_watts": power,
    }  # fmt: skip


def sustained_ceiling(
    device: torch.device, dtype: torch.dtype, data: str = "normal"
) -> dict[str, float | None]:
    """Measure a large square matrix product back to back, as `sustain` returns it."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (_data((size, size), device, dtype, data) for _ in range(2))
    return sustain(lambda: a @ b, 2.0 * size**3, device)


def _data(shape: Sequence[int], device: torch.device, dtype: torch.dtype, data: str) -> Tensor:
    make = torch.zeros if data == "zeros" else torch.randn
    return make(*shape, device=device, dtype=dtype)


# -- attention -------------------------------------------------------------------------------------


def attention(shape: tuple[int, int, int, int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row per backend, data and direction, or one with the problem of a backend that cannot
    be timed."""
    dtype = usual_dtype(device)
    batch, tokens, heads, width = shape
    flops = 4.0 * batch * tokens**2 * heads * width
    for name in usable(device, dtype):
        attend = ATTENTION[name]
        if problem := try_attention(attend, shape, device, dtype).problem:
            yield {"backend": name, "problem": problem}
            continue
        for data in DATA:
            query, key, upstream = (_data(shape, device, dtype, data) for _ in range(3))
            # strided, as in the blocks
            value = _data((batch, tokens, 3, heads, width), device, dtype, data)[:, :, 2]
            inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
            with torch.no_grad():
                forward = sustain(functools.partial(attend, query, key, value), flops, device)
            yield {"backend": name, "data": data, "direction": "forward", **forward}
            out = attend(query, key, value)
            run = functools.partial(torch.autograd.grad, out, inputs, upstream, retain_graph=True)
            yield {
                "backend": name,
                "data": data,
                "direction": "backward",
                **sustain(run, BACKWARD * flops, device),
            }
            del out, run


# -- adapter_rows ----------------------------------------------------------------------------------


def adapter_rows(
    shape: tuple[int, int, int], device: torch.device, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row per kind of call: the bytes it moves, and the median seconds of a copy, of
    PyTorch and of each tile.

    A tile that is wrong or does not compile gets its problem.
    """
    dtype = usual_dtype(device)
    batch, tokens, width = shape
    x, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    gate = torch.randn(batch, width, device=device, dtype=dtype)
    down = torch.randn(RANK, width, device=device, dtype=dtype) * width**-0.5
    inner, up = (torch.randn(batch * tokens, RANK, device=device, dtype=dtype) for _ in range(2))
    forwards: dict[str, tuple[Any, ...]] = {
        "plain": (x, down, False),
        "GELU": (x, down, True),
        "gate": (x, down, False, gate),
    }
    out = adapter_rows_reference(*forwards["GELU"])
    rows = (grad.flatten(0, 1), inner, x.flatten(0, 1), up)
    kinds: dict[str, tuple[str, Callable[..., Any], Sequence[Any], int]] = {
        name: ("adapter_rows", adapter_rows_reference, arguments, x.nbytes + out.nbytes)
        for name, arguments in forwards.items()
    }
    moved = 3 * x.nbytes + inner.nbytes + up.nbytes  # the gradient is overwritten with dx
    kinds["backward of GELU"] = (
        "adapter_rows_backward",
        adapter_rows_backward_reference,
        rows,
        moved,
    )
    for kind, (name, reference, arguments, size) in kinds.items():
        half = torch.empty(size // 2, dtype=torch.uint8, device=device)
        contenders: dict[str, Callable[[], Any]] = {
            "copy": half.clone,
            "PyTorch": functools.partial(reference, *arguments),
        }
        problems: dict[str, str] = {}
        if implementation(device).startswith("Triton"):
            expected = _results(reference, arguments)
            for tile in TILES:
                label = "{ROWS} x {BLOCK}, {num_warps} warps".format(**tile)
                function = functools.partial(_with_tile, tile, name)
                try:
                    found = _results(function, arguments)
                except (
                    Exception
                ) as error:  # a compiler's, or lack of shared memory: the other tiles can still run
                    problems[label] = in_one_line(error)
                    continue
                off = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected))
                if off > 0.02:
                    problems[label] = f"wrong: off by {off:.1e}"
                else:
                    contenders[label] = functools.partial(function, *arguments)
        timers = {
            label: host_timer(functools.partial(_repeat, call), device)
            for label, call in contenders.items()
        }
        for timer in timers.values():
            timer()
        times = interleaved(timers, rounds)
        seconds = {label: statistics.median(found) / CALLS for label, found in times.items()}
        yield {
            "kind": kind,
            "bytes": size,
            "seconds": seconds,
            "rounds": rounds,
            "problems": problems,
        }


def _repeat(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def _with_tile(tile: Mapping[str, int], name: str, *arguments: Any) -> Any:
    """Launch a kernel of `adapter_rows` with another tile than its own choice."""
    from sage_fast.kernels import adapter_rows as kernels

    with mock.patch.object(kernels, "options", return_value=dict(tile)):
        return getattr(kernels, name)(*arguments)


def _results(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    """Return the results in float32 of a call on copies: the backward overwrites its gradient."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    found = function(*copies)
    found = [found] if isinstance(found, Tensor) else [*found, copies[0]]
    return [tensor.float() for tensor in found]


# -- all of it -------------------------------------------------------------------------------------


def run(
    size: str = "480p 81 frames",
    parts: Sequence[str] | None = None,
    rounds: int = 15,
    save: Save = save_nothing,
) -> dict[str, Any]:
    """Measure `parts`, all by default.

    Return what `sage-fast bench limits` writes as JSON, after every row too.
    """
    device = local_device()
    dtype = usual_dtype(device)
    result: dict[str, Any] = {
        "environment": environment(device, implementation(device))
        | {"dtype": str(dtype).removeprefix("torch.")},
        "size": size,
        "limits": {"burst_flops_per_second": matmul_ceiling(device, dtype)},
    }
    found: dict[str, Iterator[dict[str, Any]]] = {
        "ceiling": ({"data": data, **sustained_ceiling(device, dtype, data)} for data in DATA),
        "attention": attention(SIZES[size]["attention"], device),
        "adapter_rows": adapter_rows(SIZES[size]["adapter_rows"], device, rounds),
    }
    for part in parts or PARTS:
        rows = result["limits"][part] = []
        for row in found[part]:
            rows.append(row)
            save(result)
    return result


# -- tables ----------------------------------------------------------------------------------------


def format_sustained(row: Mapping[str, Any]) -> str:
    """Format one row of `sustain` for a matrix product."""
    where = (
        ""
        if row["clock_mhz"] is None
        else f", at {row['clock_mhz']:.0f} MHz and {row['power_watts']:.0f} W"
    )
    return (
        f"the same back to back for {row['seconds']:.1f} s: {row['flops_per_second'] / 1e12:.3g} "
        f"TFLOP/s{where}"
    )


def format_limits(result: Mapping[str, Any]) -> str:
    """Format the tables for a terminal."""
    limits = result["limits"]
    burst = limits["burst_flops_per_second"]
    full, full_line = full_rate(result["environment"], burst)
    lines = [
        head_line(result["environment"]),
        f"burst of a {result['environment']['dtype']} matrix product: {burst / 1e12:.3g} TFLOP/s",
        full_line,
    ]
    head = (
        f"{'TFLOP/s':>10}{'one call':>10}{'share':>10}{'calls':>8}{'seconds':>9}{'MHz':>7}{'W':>6}"
    )

    def cells(row: Mapping[str, Any]) -> str:
        rate, once = row["flops_per_second"], row["burst_flops_per_second"]
        watched = [
            f"{row[key]:.0f}" if row[key] is not None else ""
            for key in ("clock_mhz", "power_watts")
        ]
        return (
            f"{rate / 1e12:>10.3g}{once / 1e12:>10.3g}{rate / full:>10.1%}"
            f"{row['calls']:>8}{row['seconds']:>9.1f}{watched[0]:>7}{watched[1]:>6}"
        )

    if rows := limits.get("ceiling"):
        lines += ["", f"{'matrix product, back to back':<34}{head}"]
        lines += [f"{row['data']:<34}{cells(row)}".rstrip() for row in rows]
    if rows := limits.get("attention"):
        shape = " x ".join(map(str, SIZES[result["size"]]["attention"]))
        lines += ["", f"{'attention ' + shape:<34}{head}"]
        for row in rows:
            if "problem" in row:
                lines.append(f"{row['backend']:<34}{row['problem']}")
            else:
                label = f"{row['backend']:<12}{row['direction']:<10}{row['data']}"
                lines.append(f"{label:<34}{cells(row)}".rstrip())
    if rows := limits.get("adapter_rows"):
        shape = " x ".join(map(str, SIZES[result["size"]]["adapter_rows"]))
        lines += [
            "",
            f"{'adapter_rows ' + shape + ', rank ' + str(RANK):<46}"
            f"{'time':>12}{'GB/s':>8}{'of a copy':>11}",
        ]
        for row in rows:
            for label, seconds in row["seconds"].items():
                share = row["seconds"]["copy"] / seconds
                lines.append(
                    f"{row['kind']:<18}{label:<28}{1e3 * seconds:>9.3f} "
                    f"ms{row['bytes'] / seconds / 1e9:>8.0f}"
                    f"{share:>11.0%}"
                )
            lines += [
                f"{row['kind']:<18}{label:<28}{why}" for label, why in row["problems"].items()
            ]
        lines.append(
            f"medians of {rows[0]['rounds']} interleaved rounds of {CALLS} calls; PyTorch: GELU or "
            f"gate, then a matrix product of cuBLAS; the bar is {LEAST_SHARE['adapter_rows']:.0%} "
            "of a copy"
        )
    return "\n".join(line.rstrip() for line in lines)
