"""What the tests of the Triton kernels share."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture
def guarded_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.empty* filled with NaN and followed by a guard that must still be NaN when the test is over."""
    buffers: list[tuple[Tensor, int]] = []

    def patch(owner: object, name: str) -> None:
        original: Callable[..., Tensor] = getattr(owner, name)

        def empty(*args: object, **kwargs: object) -> Tensor:
            like = original(*args, **kwargs)
            if not like.is_floating_point() or not like.is_contiguous():
                return like
            buffer = torch.full((like.numel() + 64,), float("nan"), dtype=like.dtype, device=like.device)
            buffers.append((buffer, like.numel()))
            return buffer[: like.numel()].view(like.shape)

        monkeypatch.setattr(owner, name, empty)

    patch(torch, "empty")
    patch(torch, "empty_like")
    patch(Tensor, "new_empty")
    yield
    for buffer, numel in buffers:
        assert buffer[numel:].isnan().all(), "written past the end of a tensor"
