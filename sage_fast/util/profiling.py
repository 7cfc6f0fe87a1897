"""Named ranges around the parts of an iteration, for Nsight or torch.profiler; no-ops while switched off.

    rollout > step k > transformer, transition
    decode, reward, anchor
    train > forward, backward, optimizer

Ranges open and close on the host. They surround the replay of a CUDA graph; the graph itself contains none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

PHASES = ("rollout", "decode", "reward", "anchor", "train", "optimizer")
"""Phases of an iteration in order, as the trainer's Stopwatch times them."""
WAIT = "wait"
"""Phase of waiting for the slowest rank, nested in other phases; only with several ranks."""

Open = Callable[[str], AbstractContextManager[Any]]

_OFF = contextlib.nullcontext()
_open: Open | None = None


def annotate(name: str, index: int | None = None) -> AbstractContextManager[Any]:
    """Return a context manager for the range `name` or `name index`; a shared null context while ranges are off."""
    return _OFF if _open is None else _open(name if index is None else f"{name} {index}")


@contextlib.contextmanager
def ranges(open_range: Open) -> Iterator[None]:
    """Switch ranges on within a block: `torch.profiler.record_function`, or `torch.cuda.nvtx.range` for Nsight."""
    global _open
    before, _open = _open, open_range
    try:
        yield
    finally:
        _open = before
