"""What the tests of the operators share."""

import dataclasses
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.accuracy import kernels_of
from tests.ops.checks import Kernels


@pytest.fixture(autouse=True)
def _sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's sanitizer needs where TRITON_INSTRUMENTATION_MODE=consan asks for it, as
    scripts/gpu.sh does.

    A kernel takes memory for its notes from an allocator of the launching thread, so backward
    passes run in this one. The interpreter knows no such mode, but can find 32-bit integers that
    overflow.
    """
    if os.environ.get("TRITON_INSTRUMENTATION_MODE") != "consan":
        return
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        from triton.runtime.interpreter import interpreter_builder as builder

        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    else:
        triton.set_allocator(
            lambda size, alignment, stream: torch.zeros(size, dtype=torch.int8, device="cuda")
        )
        torch.autograd.set_multithreading_enabled(False)


@pytest.fixture
def guarded_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.empty* filled with NaN and followed by a guard that must still be NaN when the test is
    over."""
    buffers: list[tuple[Tensor, int]] = []

    def patch(owner: object, name: str) -> None:
        original: Callable[..., Tensor] = getattr(owner, name)

        def empty(*args: object, **kwargs: object) -> Tensor:
            like = original(*args, **kwargs)
            if not like.is_floating_point() or not like.is_contiguous():
                return like
            buffer = torch.full(
                (like.numel() + 64,), float("nan"), dtype=like.dtype, device=like.device
            )
            buffers.append((buffer, like.numel()))
            return buffer[: like.numel()].view(like.shape)

        monkeypatch.setattr(owner, name, empty)

    patch(torch, "empty")
    patch(torch, "empty_like")
    patch(Tensor, "new_empty")
    yield
    for buffer, numel in buffers:
        assert buffer[numel:].isnan().all(), "written past the end of a tensor"


@pytest.fixture(params=["C++", "triton"])
def kernels(
    request: pytest.FixtureRequest, guarded_empty: None
) -> Iterator[tuple[Kernels, torch.device]]:
    """The functions of an implementation, and their device.

    What they allocate holds NaN until it is written.
    """
    found = kernels_of(request.param)
    torch.use_deterministic_algorithms(request.param == "C++")  # fills what C++ allocates with NaN
    yield found
    torch.use_deterministic_algorithms(False)
