"""TFLOP/s of attention and matmuls, and GB/s of our operators, from a profile.

torch.profiler notes the shapes and dtypes of each call (`record_shapes`), and the kernels that it
launched. Its own FLOPs (`with_flops`) leave out attention, and it counts no bytes, so both are
computed here from the shapes. A call that a CUDA graph replays is no call to the profiler: the
kernels of a replayed rollout step are in the table of kernels alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType

from sage_fast.models.attention.backends import is_attention, is_attention_backward
from sage_fast.ops._calls import bytes_of_call, registered
from sage_fast.ops._common import LIBRARY

MATMULS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
}
"""Matmul of aten -> positions of its factors. One before them is added to the product."""
NARROW = 256
"""A matmul with a side below this is bound by memory: an H200 computes 206 FLOPs in the time of a
byte."""
BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward: five products instead of two."""
DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "long int": torch.int64,
    "int": torch.int32,
    "bool": torch.bool,
}
"""Name of a dtype in C++, as the profiler has it -> the dtype. All else is no tensor."""
FIRST = ("attention forward", "attention backward", "matmuls", f"matmuls, a side below {NARROW}")
"""Rows that come before those of our operators."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call does.

    Attributes:
        row: the row of the table that counts it.
        flops, bytes: None if the row does not have them.
    """

    row: str
    flops: float | None = None
    bytes: float | None = None


def rate_table(events: Iterable[Any], *, on_gpu: bool) -> list[dict[str, Any]]:
    """Return name, calls, seconds, FLOPs and bytes of attention, matmuls and our operators.

    Args:
        events: `events()` of a profiler with `record_shapes`.
        on_gpu: whether to count the time of the kernels that a call launched, or that of the call.
    """
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        work = _work_of(event)
        # an operator may call others of the table, as attention's reference calls matmuls
        if work is None or _is_within_another(event):
            continue
        row = rows.setdefault(
            work.row,
            {"name": work.row, "calls": 0, "seconds": 0.0, "flops": None, "bytes": None},
        )
        micros = event.device_time_total if on_gpu else event.cpu_time_total
        row["calls"] += 1
        row["seconds"] += micros / 1e6
        if work.flops is not None:
            row["flops"] = (row["flops"] or 0.0) + work.flops
        if work.bytes is not None:
            row["bytes"] = (row["bytes"] or 0.0) + work.bytes
    first = [rows.pop(name) for name in FIRST if name in rows]
    return first + sorted(rows.values(), key=lambda row: -row["seconds"])


def format_rates(rows: Sequence[dict[str, Any]], *, on_gpu: bool) -> list[str]:
    """Format the table for a terminal, with a line of titles."""
    titles = ("GPU seconds" if on_gpu else "seconds", "calls", "TFLOP/s", "GB/s")
    head = "".join(f"{title:>11}" for title in titles)
    lines = [f"{head}  operation, by the shapes of its calls"]
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{seconds:.4f}", str(row["calls"])]
        for count, unit in ((row["flops"], 1e12), (row["bytes"], 1e9)):
            is_known = count is not None and seconds > 0
            cells.append(f"{count / seconds / unit:.4g}" if is_known else "")
        lines.append("".join(f"{cell:>11}" for cell in cells) + f"  {row['name']}")
    return lines


def _work_of(event: Any) -> Work | None:
    """Return what a call does; None if it is none of the table."""
    if event.device_type != DeviceType.CPU or not event.input_shapes:
        return None
    library, _, operator = event.name.partition("::")
    if library == "aten" and operator in MATMULS:
        return _matmul(event, *MATMULS[operator])
    if is_attention(event.name) or is_attention_backward(event.name):
        return _attention(event.name, event.input_shapes)
    if library == LIBRARY.ns:
        return Work(operator, bytes=_bytes_of(operator, _arguments_of(event)))
    return None


def _is_within_another(event: Any) -> bool:
    around = event.cpu_parent
    while around is not None:
        if _work_of(around) is not None:
            return True
        around = around.cpu_parent
    return False


def _matmul(event: Any, left: int, right: int) -> Work:
    """Count a matmul whose factors are the arguments `left` and `right`."""
    shapes = event.input_shapes
    *batch, rows, inner = shapes[left]
    columns = shapes[right][-1]
    flops = 2.0 * math.prod(batch) * rows * inner * columns
    if min(rows, inner, columns) >= NARROW:
        return Work(FIRST[2], flops=flops)
    values = math.prod(batch) * rows * columns
    values += sum(math.prod(shape) for shape in shapes[: right + 1])
    return Work(FIRST[3], flops=flops, bytes=values * DTYPES[event.input_dtypes[left]].itemsize)


def _attention(name: str, shapes: Sequence[Sequence[int]]) -> Work | None:
    """Count the FLOPs of attention without a mask.

    Queries, outputs and their gradients have one shape, keys and values another or the same; the
    order of the arguments differs among the kernels.
    """
    tensors = [list(shape) for shape in shapes if len(shape) == 4]
    if not tensors:
        return None
    query = tensors[0]
    key = next((shape for shape in tensors if shape != query), query)
    # PyTorch's operators have [B, H, S, D], all others [B, S, H, D]
    tokens = 2 if "scaled_dot_product" in name else 1
    flops = 4.0 * math.prod(query) * key[tokens]
    if is_attention_backward(name):
        return Work(FIRST[1], flops=BACKWARD * flops)
    return Work(FIRST[0], flops=flops)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Shape and dtype of an argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _arguments_of(event: Any) -> tuple[Any, ...]:
    """Return the arguments of a call: a `_Tensor` each, or the value."""
    arguments = []
    for shape, name, value in zip(
        event.input_shapes, event.input_dtypes, event.concrete_inputs, strict=True
    ):
        dtype = DTYPES.get(name)
        arguments.append(value if dtype is None else _Tensor(tuple(shape), dtype))
    return tuple(arguments)


@functools.cache
def _bytes_of(operator: str, arguments: Sequence[Any]) -> int:
    """Return the bytes that one of our operators moves; its results are those of meta tensors."""
    given = []
    for argument in arguments:
        if isinstance(argument, _Tensor):
            argument = torch.empty(argument.shape, dtype=argument.dtype, device="meta")
        given.append(argument)
    results = registered(operator)(*given)
    return bytes_of_call(operator, given, results)
