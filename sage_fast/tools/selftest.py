"""Self-test rows of `sage-fast doctor`: that this machine computes correctly, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sage_fast.models.attention.backends import ATTENTION, usable
from sage_fast.models.attention.trial import fastest, try_attention
from sage_fast.rollout.graphs import Recorder
from sage_fast.rollout.recorder import CudaRecorder
from sage_fast.tools.checks import Check, tried
from sage_fast.tools.harness import matmul_ceiling, usual_dtype
from sage_fast.tools.operators import OPERATORS, OperatorResult, check, inputs, wrong
from sage_fast.util.errors import in_one_line

LEAST_SHARE = 0.4
"""Share of a matrix product's ceiling below which attention on a GPU is slow. An H100 that ran
alone reached 0.73: `2026-11-25-h100-doctor.json` in benchmarks/results."""


def checks(device: torch.device) -> Iterator[Check]:
    """Yield all rows of this module on `device`; the operators also run on the CPU."""
    yield from tried("operators", lambda: operators(device))
    if device.type != "cpu":
        yield from tried("operators, cpu", lambda: operators(torch.device("cpu")))
    ceiling = matmul_ceiling(device, usual_dtype(device))
    yield Check("matrix product", "ok", f"{ceiling / 1e12:.3g} TFLOP/s in {usual_dtype(device)}")
    yield from tried("attention", lambda: attention(device, ceiling))
    yield from tried("CUDA graphs", lambda: cuda_graphs(device))


# -- the operators ---------------------------------------------------------------------------------


def operators(device: torch.device) -> Iterator[Check]:
    """Check values and gradients of each operator, in float32 and bfloat16, against its reference
    in float64."""
    for operator in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            yield operator_check(operator, device, dtype)


def operator_check(operator: str, device: torch.device, dtype: torch.dtype) -> Check:
    """Check the examples of an operator: its error is at most twice that of plain PyTorch, per
    tensor."""
    row = OPERATORS[operator]
    compared: list[OperatorResult] = []
    name = f"{operator}, {device.type}, {str(dtype).removeprefix('torch.')}"
    advice = (
        "pytest tests/ops says which case; SAGE_FAST_OPS=reference runs without the fused operators"
    )
    try:
        for shape in (row.example, *row.more_examples):
            compared += check(operator, inputs(operator, shape, dtype, device))
    except Exception as error:  # this check looks for kernels that cannot be compiled or launched
        found = f"it does not run: {in_one_line(error)}"
        return Check(name, "wrong", found, advice)
    problem = wrong(compared)
    if problem:
        return Check(name, "wrong", problem, advice)
    worst = 0.0
    for comparison in compared:
        difference, _, largest = comparison.errors()
        worst = max(worst, difference / max(largest, 1e-30))
    names = dict.fromkeys(comparison.name.partition(".")[0] for comparison in compared)
    found = f"{', '.join(names)}: largest error {worst:.0e} of the largest value"
    return Check(name, "ok", found)


# -- attention -------------------------------------------------------------------------------------


def attention(device: torch.device, ceiling: float) -> Iterator[Check]:
    """Check every backend: availability, correctness, share of the ceiling (forward and backward).

    Only the fastest backend can be slow.
    """
    gpu, dtype = device.type == "cuda", usual_dtype(device)
    shape = (1, 8192, 16, 128) if gpu else (1, 512, 2, 64)
    flops = 3.5 * 4 * shape[0] * shape[1] ** 2 * shape[2] * shape[3]
    trials = {
        name: try_attention(ATTENTION[name], shape, device, dtype) for name in usable(device, dtype)
    }
    best = fastest(trials)
    for name in ATTENTION:
        row = f"attention {name}"
        if name not in trials:
            advice = ATTENTION[name].install if gpu else ""
            yield Check(row, "missing", f"not for {dtype} on this {device.type}", advice)
            continue
        trial = trials[name]
        if trial.problem:
            advice = "model.attention = auto skips it"
            if ATTENTION[name].install:
                advice += f"; {ATTENTION[name].install}"
            yield Check(row, "wrong", trial.problem, advice)
            continue
        share = 1e3 * flops / trial.milliseconds / ceiling
        found = f"error {trial.error:.0e}; {trial.milliseconds:.3g} ms forward and backward"
        # on a CPU other programs slow down one of the two
        if gpu:
            found += f", {share:.0%} of the ceiling"
        if not trial.agrees:
            found += (
                "; rounds differently under no_grad, so model.attention = auto skips it for clip "
                "and kl_mask"
            )
        slow = gpu and name == best and share < LEAST_SHARE
        advice = (
            f"expected {LEAST_SHARE:.0%}: is the GPU shared or throttled? sage-fast bench says more"
        )
        yield Check(row, "slow" if slow else "ok", found, advice if slow else "")


# -- CUDA graphs -----------------------------------------------------------------------------------


def cuda_graphs(
    device: torch.device, make_recorder: Callable[[], Recorder] = CudaRecorder
) -> Iterator[Check]:
    """Record a small graph as a rollout does, replay it on other input, and compare the result."""
    name = "CUDA graphs"
    if device.type != "cuda":
        yield Check(name, "missing", "no GPU")
        return
    yield check_replay(name, make_recorder(), device)


def check_replay(name: str, record: Recorder, device: torch.device) -> Check:
    """Check that a graph computes from what its input holds when it is replayed."""
    x = torch.randn(256, 256, device=device, dtype=usual_dtype(device))

    def step() -> tuple[torch.Tensor, ...]:
        return (torch.nn.functional.gelu(x @ x),)

    replay, (output,), _ = record(step)
    recorded = output.clone()
    x.mul_(2)
    replay()
    (expected,) = step()
    error = (output.double() - expected.double()).abs().max().item()
    # a few roundings of the largest value: another stream may add up in another order
    tolerance = 4 * torch.finfo(x.dtype).eps * expected.abs().max().item()
    if error <= tolerance:
        return Check(name, "ok", "a recorded step gives the same values when it is replayed")
    stale = torch.equal(output, recorded)
    found = "a replay changes nothing" if stale else f"a replay is off by {error:.1e}"
    return Check(name, "wrong", found, "sampling.cuda_graphs = false runs without them")
