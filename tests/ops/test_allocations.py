"""The transition operators allocate their outputs and next to nothing else: no intermediate of
latent size.

The profiler hears of every tensor, those that the C++ extension allocates through torch's stable
ABI included. What C++ takes from the heap past PyTorch, such as a vector, shows in the peak memory
of the process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.tools.operators import inputs
from tests.ops.accuracy import kernels_of

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if GPU.type == "cuda" else []
CALLS = (
    "step",
    "step with guidance",
    "score",
    "score with guidance",
    "score backward",
    "backward with guidance",
)
Call = Callable[[], tuple[Tensor, ...] | Tensor]


def make(call: str, name: str, numel: int) -> tuple[Call, int]:
    """The call on float32 latents `[2, numel]` and bfloat16 velocities, and the bytes of a
    velocity."""
    functions, device = kernels_of(name)
    step, score = (
        inputs(f"transition_{part}", (2, numel), torch.bfloat16, device)
        for part in ("step", "score")
    )
    grads = (torch.ones(2, device=device),) * 3
    plain = [*score[:3], None, None, *score[5:]]
    calls: dict[str, Call] = {
        "step": lambda: functions("transition_step")(*step[:2], None, None, *step[4:]),
        "step with guidance": lambda: functions("transition_step")(*step),
        "score": lambda: functions("transition_score")(*plain),
        "score with guidance": lambda: functions("transition_score")(*score),
        "score backward": lambda: functions("transition_score_backward")(*grads, *plain[:-1]),
        "backward with guidance": lambda: functions("transition_score_backward")(
            *grads, *score[:-1]
        ),
    }
    return calls[call], step[1].nbytes


def total_bytes(outputs: tuple[Tensor, ...] | Tensor) -> int:
    return sum(t.nbytes for t in ((outputs,) if isinstance(outputs, Tensor) else outputs))


def allocated_bytes(call: Call, folder: Path) -> int:
    """What PyTorch's allocators hand out during `call`, whether it is freed again or not."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return sum(max(event["args"]["Bytes"], 0) for event in events if event["name"] == "[memory]")


@pytest.mark.parametrize("name", ["C++", "triton"])
@pytest.mark.parametrize("call", CALLS)
def test_tensors_are_the_outputs_alone(call: str, name: str, tmp_path: Path) -> None:
    device = GPU if name == "triton" else torch.device("cpu")
    run, latent = make(call, name, 2**12 if device.type == "cpu" else 2**20)
    outputs = total_bytes(run())  # also compiles and fills caches
    allocated = allocated_bytes(run, tmp_path)
    assert allocated >= outputs, "the profiler missed the outputs"
    assert allocated - outputs < latent / 50, (
        f"{allocated} bytes allocated, the outputs have {outputs}"
    )


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset only on Linux"
)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=[pytest.mark.soak] * ("with guidance" not in call))
        for call in CALLS
    ],
)
def test_cpp_takes_no_more_from_the_heap(call: str) -> None:
    """Latents of 64 and 128 MiB, which the C library maps for every allocation and returns when
    they are freed."""
    run, latent = make(call, "C++", 2**24)
    outputs = total_bytes(run())
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    start = peak_memory()
    run()
    grown = peak_memory() - start
    assert grown < outputs + latent / 4, (
        f"{grown} bytes more at the peak, the outputs have {outputs}"
    )
