"""Named ranges around the parts of an iteration (`RANGES`), for Nsight (NVTX) and torch.profiler;
no-ops while switched off.

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
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from sage_fast.util.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PHASES = ("rollout", "decode", "reward", "anchor", "train", "optimizer")
"""Phases of an iteration in order, as the trainer's Stopwatch times them."""
WAIT = "wait"
"""Phase of waiting for the slowest rank, nested in other phases; only with several ranks."""
SWITCH = "SAGE_FAST_NVTX"
"""Environment variable that switches NVTX ranges on for any command."""


Run = TypeVar("Run", bound=Callable[..., Any])


class RangeRow(NamedTuple):
    """A range as the documentation lists it.

    Attributes:
        depth: number of ranges around it.
        name: what `annotate` gets, and a letter in place of the index.
        meaning: what it is around.
    """

    depth: int
    name: str
    meaning: str

    @property
    def label(self) -> str:
        """The name without the index."""
        return self.name.split(" ")[0]


RANGES = (
    RangeRow(0, "iteration n", "a profiled iteration"),
    RangeRow(1, "rollout", "of every sample; one pass over the steps for each sampling batch"),
    RangeRow(2, "step k", "one denoising step"),
    RangeRow(3, "transformer", "its forward, or both of them with guidance"),
    RangeRow(4, "block k", "one block of the transformer"),
    RangeRow(5, "attention", "the attention kernel"),
    RangeRow(3, "transition", "the fused step"),
    RangeRow(1, "decode", "latents to videos"),
    RangeRow(1, "reward", "the scores of the videos"),
    RangeRow(1, "anchor", "velocities of the anchor; empty right after its refresh"),
    RangeRow(1, "train", "forward, backward and loss of every update"),
    RangeRow(2, "forward", "of every micro-batch, up to the loss"),
    RangeRow(3, "block k", ""),
    RangeRow(4, "attention", ""),
    RangeRow(2, "backward", "of every micro-batch"),
    RangeRow(3, "block k", "its backward, and within it"),
    RangeRow(4, "block k", "what is recomputed of it"),
    RangeRow(5, "attention", ""),
    RangeRow(2, "optimizer", "clip, step, average, and the waits they cause"),
    RangeRow(1, "wait", "for the slowest rank, within any phase; only with several ranks"),
)
"""The ranges of an iteration, each below the range around it. `block k` and `attention` are also
around other forwards, such as those of the anchor."""

Open = Callable[[str], AbstractContextManager[Any]]

_OFF = contextlib.nullcontext()
_tools: dict[str, Open] = {}
"""Functions that open a range, keyed by tool; empty while ranges are off."""


class _Within(contextlib.ExitStack):
    """The range that a backward has opened within another one.

    Attributes:
        part: identifies what the range is around; None if there is no range.
    """

    part: object = None


class _Thread(threading.local):
    """Ranges of a thread.

    Attributes:
        within: for each open range, the outermost first, what a backward has opened within it.
    """

    def __init__(self) -> None:
        self.within: list[_Within] = []


_thread = _Thread()


def annotate(name: str, index: int | None = None) -> AbstractContextManager[Any]:
    """Return a context manager for the range `name` or `name index`; a shared null context while
    ranges are off."""
    return _range(name if index is None else f"{name} {index}") if _tools else _OFF


def annotate_block(run: Run) -> Run:
    """Decorate the forward of a block, which has its number in `index`: the range `block k` is
    around it and around its backward."""

    @functools.wraps(run)
    def annotated(block: Any, *args: Any, **kwargs: Any) -> Any:
        with annotate("block", block.index):
            outputs = run(block, *args, **kwargs)
        annotate_backward(outputs, "block", block.index)
        return outputs

    return cast(Run, annotated)


def annotate_backward(outputs: Iterable[Tensor | None], name: str, index: int) -> None:
    """Open the range `name index` in a backward, once it has the gradient of an output.

    It closes where the next one of these opens, or with the range around the backward. So it is for
    parts that run one after the other: autograd runs the nodes of a later part before all nodes of
    an earlier one. No-op while ranges are off.

    Args:
        outputs: what the part returns; those without a gradient are left out.
    """
    if not _tools:
        return

    part = object()  # the same index may come twice: with guidance there are two forwards
    title = f"{name} {index}"

    def reached(_: Tensor) -> None:
        _open_within(title, part)

    for output in outputs:
        if output is not None and output.requires_grad:
            output.register_hook(reached)


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
        within = stack.enter_context(_Within())
        _thread.within.append(within)
        try:
            yield
        finally:
            _thread.within.pop()


def _open_within(name: str, part: object) -> None:
    """Open the range of a part of a backward, unless it is open already; close the one before."""
    if not _thread.within:
        return
    within = _thread.within[-1]
    if within.part is part:
        return
    within.close()
    within.part = part
    for open_range in _tools.values():
        within.enter_context(open_range(name))


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
