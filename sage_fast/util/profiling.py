"""Named ranges around the parts of an iteration, for Nsight (NVTX) and torch.profiler; no-ops while
switched off.

    rollout > step k > transformer, transition
    decode, reward, anchor
    train > forward, backward, optimizer

Ranges open and close on the host. They surround the replay of a CUDA graph; the graph itself
contains none.

A range belongs to the thread that opens it, and a profiler assigns to it the kernels which that
thread launches. CUDA's backward would run in a thread of autograd's own, so the outermost range of
a thread has its backwards run in the thread itself. NVTX has ranges that belong to no thread
(start/end), but record_function does not, and they do not nest.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from sage_fast.util.errors import UserError

PHASES = ("rollout", "decode", "reward", "anchor", "train", "optimizer")
"""Phases of an iteration in order, as the trainer's Stopwatch times them."""
WAIT = "wait"
"""Phase of waiting for the slowest rank, nested in other phases; only with several ranks."""
SWITCH = "SAGE_FAST_NVTX"
"""Environment variable that switches NVTX ranges on for any command."""

Open = Callable[[str], AbstractContextManager[Any]]

_OFF = contextlib.nullcontext()
_tools: dict[str, Open] = {}
"""Functions that open a range, keyed by tool; empty while ranges are off."""


def annotate(name: str, index: int | None = None) -> AbstractContextManager[Any]:
    """Return a context manager for the range `name` or `name index`; a shared null context while
    ranges are off."""
    return _range(name if index is None else f"{name} {index}") if _tools else _OFF


@contextlib.contextmanager
def ranges(*tools: str) -> Iterator[None]:
    """Switch ranges on within a block, for the tools `nvtx`, `torch` (torch.profiler) or both.

    Raises:
        UserError: `nvtx` is requested but not installed.
    """
    global _tools
    before = _tools
    _tools = before | {tool: _OPENERS[tool]() for tool in tools if tool not in before}
    try:
        yield
    finally:
        _tools = before


def tools_of_environment() -> list[str]:
    """Return the tools that the environment switches on: `["nvtx"]` if SAGE_FAST_NVTX=1, else [].

    Raises:
        UserError: SAGE_FAST_NVTX is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{SWITCH} = {value!r} in the environment: expected 1 (ranges on) or 0")
    return ["nvtx"] if value == "1" else []


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    # only commands that have imported PyTorch come here: an import above would slow the others
    from torch.autograd import set_multithreading_enabled

    with contextlib.ExitStack() as stack:
        # of this thread alone; nested ranges find it off, and leave it off
        stack.enter_context(set_multithreading_enabled(False))
        for open_range in _tools.values():
            stack.enter_context(open_range(name))
        yield


def _nvtx() -> Open:
    try:
        import nvtx
    except ImportError:
        raise UserError(
            "NVTX ranges need the nvtx package: pip install nvtx, or the extra profile"
        ) from None
    return functools.partial(nvtx.annotate, domain="sage_fast")


def _torch() -> Open:
    from torch.profiler import record_function

    return record_function


_OPENERS: dict[str, Callable[[], Open]] = {"nvtx": _nvtx, "torch": _torch}
