"""Measure the transition operators against the field's eager code, torch.compile and a copy of the same bytes.

All contenders are timed interleaved in one process. Each has its own inputs, which rotate past the last-level cache.
The table gives medians with p20 and p80. A correctness gate runs first: a wrong result gets no time.
`sage-fast bench` prints the table and writes JSON; `pytest benchmarks/` times single operators.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops import implementation, transition_score, transition_step
from sage_fast.ops.transition_score import transition_score_reference
from sage_fast.tools.harness import (
    H200_BF16_FLOPS,
    Save,
    fresh_compilation,
    head_line,
    host_timer,
    interleaved,
    save_nothing,
)
from sage_fast.util.console import progress
from sage_fast.util.environment import environment
from sage_fast.util.ranks import local_device

SIZES = {
    "tiny": (2, 4, 3, 6, 5),
    "480p batch 1": (1, 32, 21, 30, 52),
    "480p batch 4": (4, 32, 21, 30, 52),
    "480p batch 16": (16, 32, 21, 30, 52),
    "720p batch 1": (1, 32, 21, 45, 80),
    "720p batch 4": (4, 32, 21, 45, 80),
    "720p batch 16": (16, 32, 21, 45, 80),
    "large": (96, 32, 21, 45, 80),
}
CPU_SIZES = ("480p batch 1", "480p batch 4", "480p batch 16", "720p batch 4")
BAR = 0.9
"""Share of the copy's speed that a fused operator should reach on a GPU at 720p or larger. A 480p batch of 4 fills an
H200 1.29 times, so its last wave is mostly empty."""
H200_BYTES_PER_SECOND = 4.3e12
"""Bandwidth of a copy on one H200; measured, but not by this code."""
GUIDED_STEP_SECONDS = 2 * 6.6e14 / H200_BF16_FLOPS
"""Seconds of two forwards at 480p, 81 frames, at the matmul ceiling; an operator is small next to it."""

STEP, STEPS, ETA = 7, 20, 0.7
ROTATION_BYTES = 256 * 2**20
"""Bytes that a contender reads before it reuses an input: more than the L2 of any GPU (50 MiB on an H200)."""
MAX_CASES = 64
"""Maximum number of cases in a rotation; applies to small sizes."""


@dataclasses.dataclass(kw_only=True)
class Case:
    """Inputs at a production step: x and x_next float32, velocities bfloat16, the rest small.

    All tensors are on one device before anything is timed: a graph capture cannot copy from the host.
    """

    x: Tensor
    x_next: Tensor
    v: Tensor
    v_anchor: Tensor
    coefs: Tensor
    step: Tensor
    seed: Tensor
    sigma: Tensor
    sigma_next: Tensor

    @staticmethod
    def make(shape: Sequence[int], device: torch.device) -> Case:
        sigmas = sigma_schedule(STEPS, 5.0)
        table = transition_table(sigmas, "flow", ETA)
        coefs = table.coefficients(math.prod(shape[1:])).to(device)
        x, noise, v, drift = (torch.randn(shape, device=device) for _ in range(4))
        a, b, c = (float(value[STEP]) for value in (table.a, table.b, table.c))
        v = v.bfloat16()
        return Case(
            x=x,
            x_next=a * x + b * v.float() + c * noise,
            v=v,
            v_anchor=(v.float() + 0.01 * drift).bfloat16(),
            coefs=coefs,
            step=torch.tensor(STEP, device=device),
            seed=torch.arange(shape[0], device=device),
            sigma=torch.full((shape[0],), float(sigmas[STEP]), device=device),
            sigma_next=torch.full((shape[0],), float(sigmas[STEP + 1]), device=device),
        )

    def rotation(self, operator: str) -> list[Case]:
        """Return copies of this case in separate memory, enough that a pass over them reads ROTATION_BYTES.

        Each contender gets its own rotation: inputs that another has just read would be in the cache.
        """
        read = self.x.numel() * (6 if operator == "transition_step" else 12)
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return [
            Case(**{name: tensor.clone() for name, tensor in tensors.items()})
            for _ in range(min(MAX_CASES, math.ceil(ROTATION_BYTES / read)))
        ]


# -- the field's eager code, written from the formulas ---------------------------------------------------------------


def eager_step(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Flow-GRPO step as training code usually writes it: scalars as broadcast tensors, one operation at a time."""
    v = v.float()
    sigma, sigma_next = (s.view(-1, *[1] * (x.ndim - 1)) for s in (sigma, sigma_next))
    dt = sigma_next - sigma
    std = eta * torch.sqrt(sigma / (1 - sigma))
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    scale = std * torch.sqrt(-dt)
    x_next = mean + scale * torch.randn_like(x)
    return x_next, eager_log_prob(x_next, mean, scale)


def eager_log_prob(x_next: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    log_prob = -((x_next.detach() - mean) ** 2) / (2 * scale**2) - torch.log(scale) - 0.5 * math.log(2 * math.pi)
    return log_prob.mean(dim=tuple(range(1, x_next.ndim)))


def eager_score(
    x: Tensor, x_next: Tensor, v: Tensor, v_anchor: Tensor, sigma: Tensor, sigma_next: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of a stored transition and its KL to the anchor, in the style of `eager_step`."""
    sigma, sigma_next = (s.view(-1, *[1] * (x.ndim - 1)) for s in (sigma, sigma_next))
    dt = sigma_next - sigma
    std = eta * torch.sqrt(sigma / (1 - sigma))
    scale = std * torch.sqrt(-dt)

    def mean_of(velocity: Tensor) -> Tensor:
        gain = (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        return x * (1 + std**2 / (2 * sigma) * dt) + velocity.float() * gain

    mean = mean_of(v)
    kl = ((mean - mean_of(v_anchor)) ** 2).mean(dim=tuple(range(1, x.ndim)), keepdim=True) / (2 * scale**2)
    return eager_log_prob(x_next, mean, scale), kl.flatten()


# -- the contenders ---------------------------------------------------------------------------------------------------


def _forward_backward(score: Callable[..., tuple[Tensor, ...]], case: Case, *arguments: Any) -> Tensor:
    v = case.v.detach().requires_grad_()
    log_prob, kl, *_ = score(case.x, case.x_next, v, *arguments)
    return torch.autograd.grad(log_prob.sum() + kl.sum(), v)[0]


def contenders(operator: str, compiled: bool) -> dict[str, Callable[[Case], Any]]:
    """Return name -> function of a case; `copy` moves the bytes that the operator has to move."""

    def copied(case: Case) -> Any:
        # Bytes per element. Step: reads x 4 and v 2, writes x_next 4. Score: forward reads 12, backward reads 12 and
        # writes 2.
        half_v = case.v.flatten()[: case.v.numel() // 2].clone()
        if operator == "transition_step":
            return case.x.clone(), half_v
        return case.x.clone(), case.x_next.clone(), case.v.clone(), case.v_anchor.clone(), half_v

    def fused_step(case: Case) -> Any:
        return transition_step(case.x, case.v, case.coefs, case.step, case.seed)

    def fused_score(case: Case) -> Any:
        def score(x: Tensor, x_next: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return transition_score(x, x_next, v, case.coefs, case.step, case.v_anchor)

        return _forward_backward(score, case)

    def plain_step(function: Callable[..., Any], case: Case) -> Any:
        return function(case.x, case.v, case.sigma, case.sigma_next, ETA)

    def plain_score(function: Callable[..., Any], case: Case) -> Any:
        return _forward_backward(function, case, case.v_anchor, case.sigma, case.sigma_next, ETA)

    step = operator == "transition_step"
    source: Callable[..., Any] = eager_step if step else eager_score
    plain = plain_step if step else plain_score
    result: dict[str, Callable[[Case], Any]] = {
        "fused": fused_step if step else fused_score,
        "eager": functools.partial(plain, source),
        "copy": copied,
    }
    if compiled:
        result["compiled"] = functools.partial(plain, torch.compile(source, dynamic=False))
    return result


def bytes_moved(operator: str, numel: int) -> int:
    """Return the bytes an operator has to move: per element, step 10, score forward 12 and backward 14."""
    return numel * (10 if operator == "transition_step" else 26)


def check(case: Case) -> None:
    """Correctness gate: compare the fused results with the float64 reference and the eager code.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    x_next, log_prob = transition_step(case.x, case.v, case.coefs, case.step, case.seed)
    scored = transition_score_reference(
        case.x.double(), x_next, case.v, case.v_anchor, None, case.coefs.double(), case.step, None
    )
    torch.testing.assert_close(log_prob.double(), scored[0], rtol=1e-4, atol=1e-4)
    log_prob, kl, *_ = transition_score(case.x, x_next, case.v, case.coefs, case.step, case.v_anchor)
    torch.testing.assert_close(log_prob.double(), scored[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kl.double(), scored[1], rtol=1e-4, atol=1e-6)
    eager = eager_score(case.x.double(), x_next.double(), case.v, case.v_anchor, case.sigma, case.sigma_next, ETA)
    torch.testing.assert_close(scored[0], eager[0].double(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scored[1], eager[1].double(), rtol=1e-2, atol=1e-4)


# -- timing -----------------------------------------------------------------------------------------------------------


def _timer(device: torch.device, function: Callable[[Case], Any], cases: Sequence[Case]) -> Callable[[], float]:
    """Return a function that times one run: of the next case on the CPU, the mean over all cases on CUDA.

    On CUDA one graph holds the whole rotation: with one graph per case, the launch would dominate a kernel of
    microseconds. All results are kept until the end of the capture, so each has its own memory and none overwrites
    cached lines.
    """
    if device.type != "cuda":
        rotating = itertools.cycle(cases)
        return host_timer(lambda: function(next(rotating)), device)
    with torch.cuda.stream(torch.cuda.Stream()):
        for case in cases:
            function(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [function(case) for case in cases]
    del results

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / len(cases)

    return replay


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return p20, p50 and p80."""
    values = torch.tensor(seconds, dtype=torch.float64)
    return dict(zip(("p20", "p50", "p80"), values.quantile(values.new_tensor([0.2, 0.5, 0.8])).tolist()))


def measure(operator: str, shape: Sequence[int], device: torch.device, repetitions: int) -> dict[str, dict[str, float]]:
    """Return name -> p20, p50 and p80 in seconds, with all contenders interleaved.

    Raises:
        AssertionError: a result is wrong.
        FailOnRecompileLimitHit: torch.compile gave up, and its row would time eager code.
    """
    case = Case.make(shape, device)
    check(case)
    timers = {}
    with fresh_compilation():
        for name, function in contenders(operator, compiled=True).items():
            function(case)  # compilation and first allocations
            timers[name] = _timer(device, function, case.rotation(operator))
        return {name: quantiles(seconds) for name, seconds in interleaved(timers, repetitions).items()}


def run(sizes: Sequence[str] | None = None, repetitions: int = 15, save: Save = save_nothing) -> dict[str, Any]:
    """Measure every operator at `sizes`; return the result, as in the JSON, and pass it to `save` after each row."""
    device = local_device()
    names = sizes or (CPU_SIZES if device.type == "cpu" else [name for name in SIZES if name != "tiny"])
    rows: list[dict[str, Any]] = []
    result = {"environment": environment(device, implementation(device)), "rows": rows}
    work = list(itertools.product(("transition_step", "transition_score"), names))
    for operator, name in progress(work, "operators", len(work), "row"):
        rows.append(
            {
                "operator": operator,
                "size": name,
                "shape": list(SIZES[name]),
                "bytes": bytes_moved(operator, math.prod(SIZES[name])),
                "seconds": measure(operator, SIZES[name], device, repetitions),
            }
        )
        save(result)
    return result


def format_result(result: dict[str, Any]) -> str:
    """Format the table for a terminal: medians, ratios to each contender, share of the copy limit."""
    env = result["environment"]
    lines = [
        head_line(env),
        "",
        f"{'operator':<18}{'size':<16}{'fused':>11}{'eager':>11}{'x':>7}{'compiled':>11}{'x':>7}{'copy':>11}"
        f"{'of limit':>10}",
    ]
    for row in result["rows"]:
        p50 = {name: times["p50"] for name, times in row["seconds"].items()}
        fused = p50["fused"]
        lines.append(
            f"{row['operator']:<18}{row['size']:<16}{fused * 1e3:>8.3f} ms{p50['eager'] * 1e3:>8.2f} ms"
            f"{p50['eager'] / fused:>6.1f}x{p50['compiled'] * 1e3:>8.2f} ms{p50['compiled'] / fused:>6.2f}x"
            f"{p50['copy'] * 1e3:>8.2f} ms{p50['copy'] / fused:>9.0%}"
        )
    share = 12 * math.prod(SIZES["480p batch 1"]) / H200_BYTES_PER_SECOND / GUIDED_STEP_SECONDS
    lines += [
        "",
        "medians of one interleaved run on inputs that rotate past the cache; copy = the same bytes, copied",
        "In proportion: a guided 480p denoising step of the 8.3 B transformer takes at least "
        f"{GUIDED_STEP_SECONDS:.2f} s on one H200; the fused step at its "
        f"{H200_BYTES_PER_SECOND / 1e12:.1f} TB/s is {share:.0e} of that (both measured ceilings, not runs of ours).",
    ]
    if env["operators"] == "Triton":
        lines.append(
            f"The bar is {BAR:.0%} of the limit at 720p or larger; below that the fixed cost of a kernel counts."
        )
    else:
        lines.append("There is no GPU row yet.")
    return "\n".join(lines)
