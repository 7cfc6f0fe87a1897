"""What the operators return lies in memory as their fakes promise, whatever the layout of the inputs."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sage_fast.ops.gated_norm
import sage_fast.ops.norm_modulate
import sage_fast.ops.norm_rotate  # noqa: F401  for torch.ops
from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops import implementation

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels-last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "strided": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def calls(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every operator, with arguments of that layout."""

    def latents(*shape: int) -> Tensor:
        return layout(torch.randn(shape, dtype=dtype))

    def row(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    coefs = transition_table(sigma_schedule(6, 3.0), "precise", 0.8).coefficients(20)
    x, x_next, v, anchor, old = (latents(3, 4, 5) for _ in range(5))
    step, grads = torch.tensor([0, 3, 5]), (row(3), row(3), row(3))
    yield "transition_step", (x, v, anchor, torch.tensor(6.0), coefs, step, torch.arange(3))
    yield "transition_score", (x, x_next, v, anchor, old, coefs, step, 0.3)
    yield "transition_score_backward", (*grads, x, x_next, v, anchor, old, coefs, step)

    modulate = (latents(3, 4, 6), row(3, 6))
    rotate = (latents(2, 8, 3, 4, 8), *(row(8) for _ in range(4)), torch.randn(3, 4, 2), 1e-6)
    yield "norm_modulate", (*modulate, row(3, 6), 1e-6, 2, 1)
    yield "gated_norm", (latents(3, 4, 6), *modulate[:1], row(3, 6), row(3, 6), row(3, 6), 1e-6)
    yield "norm_rotate", rotate
    for trained in (False, True):
        yield "norm_modulate_backward", (latents(3, 4, 6), *modulate, 1e-6, trained, latents(3, 4, 6))
        y = latents(3, 4, 6) if trained else None
        yield "gated_norm_backward", (latents(3, 4, 6), latents(3, 4, 6), *modulate, row(3, 6), y, 1e-6)
        yield "norm_rotate_backward", (*(latents(2, 8, 4, 8) for _ in range(3)), *rotate, trained)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["reference", "fused"])
def test_outputs_are_those_of_the_fake(dtype: torch.dtype, layout: str) -> None:
    """Strides, types and aliases; float64 is the reference's, float32 whatever serves the CPU."""
    for name, arguments in calls(LAYOUTS[layout], dtype):
        operator = getattr(torch.ops.sage_fast, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(implementation(torch.device("cpu")) == "Triton interpreter", reason="this run is that test")
def test_outputs_of_triton_are_those_of_the_fake() -> None:
    """`make soak` has all layouts."""
    pytest.importorskip("triton")
    chosen = "fused" if "SAGE_FAST_SOAK" in os.environ else "fused and (channels-last or expanded)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", chosen],
        env=os.environ | {"TRITON_INTERPRET": "1", "SAGE_FAST_OPS": "triton"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
