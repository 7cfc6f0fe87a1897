"""What the tests of the Triton kernels share."""

import importlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def interpreter_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 to 3.9 truncates fp32 to bf16; compiled kernels round to nearest even."""
    if DEVICE.type != "cpu":
        return
    tl = pytest.importorskip("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def rounding(data: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return torch.from_numpy(data.astype(np.float32)).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounding)


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
