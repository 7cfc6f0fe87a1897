"""Named ranges around the parts of an iteration, for Nsight (NVTX) and for torch.profiler; nothing while they are off.

    rollout > step k > transformer, transition
    decode, reward, anchor
    train > optimizer

Ranges open and close on the host. A captured CUDA graph holds none inside; they stand around its replay.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from sage_fast.errors import UserError

PHASES = ("rollout", "decode", "reward", "anchor", "train", "optimizer")
"""Of an iteration, in order; what the trainer's Stopwatch times."""
WAIT = "wait"
"""A phase of several ranks, within others: for the slowest of them."""
DOMAIN = "sage_fast"
"""NVTX domain of every range."""
SWITCH = "SAGE_FAST_NVTX"
"""Environment variable that switches NVTX ranges on for any command."""

Open = Callable[[str], AbstractContextManager[Any]]

_OFF = contextlib.nullcontext()
_tools: dict[str, Open] = {}
"""What opens a range, by the tool that wants it; empty while ranges are off."""


def annotate(name: str, index: int | None = None) -> AbstractContextManager[Any]:
    """A range called `name`, or `name index`, around a `with` block; one shared null context while ranges are off."""
    if not _tools:
        return _OFF
    return _range(name if index is None else f"{name} {index}")


@contextlib.contextmanager
def ranges(*tools: str) -> Iterator[None]:
    """Switch ranges on for a block, for `nvtx`, for `torch` (torch.profiler) or for both.

    Raises:
        UserError: `nvtx` is asked for and the package is not installed.
    """
    global _tools
    before = _tools
    _tools = before | {tool: _OPENERS[tool]() for tool in tools if tool not in before}
    try:
        yield
    finally:
        _tools = before


def tools_of_environment() -> list[str]:
    """`["nvtx"]` if SAGE_FAST_NVTX=1 asks for it.

    Raises:
        UserError: it is set to something else than 0 or 1.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{SWITCH} = {value!r} in the environment: expected 1 (ranges on) or 0")
    return ["nvtx"] if value == "1" else []


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for open_range in _tools.values():
            stack.enter_context(open_range(name))
        yield


class _NvtxRange:
    """Push and pop on the calling thread; the name is registered once."""

    def __init__(self, domain: Any, name: str) -> None:
        self.domain = domain
        self.attributes = domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self.domain.push_range(self.attributes)

    def __exit__(self, *error: object) -> None:
        self.domain.pop_range()


def _nvtx() -> Open:
    try:
        import nvtx
    except ImportError:
        raise UserError(
            "NVTX ranges need the nvtx package, which is not installed: pip install nvtx (or sage-fast[profile])"
        ) from None
    return functools.cache(functools.partial(_NvtxRange, nvtx.get_domain(DOMAIN)))


def _torch() -> Open:
    from torch.profiler import record_function

    return record_function


_OPENERS: dict[str, Callable[[], Open]] = {"nvtx": _nvtx, "torch": _torch}
