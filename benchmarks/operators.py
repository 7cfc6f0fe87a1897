"""Measure the operators against eager PyTorch, torch.compile and a copy of the same bytes.

All contenders are timed interleaved in one process, with their backward where they have one. Each
has its own inputs, which rotate past the last-level cache. The table gives medians with p20 and
p80. A correctness gate runs first: a wrong result gets no time. `sage-fast bench` prints the table
and writes JSON.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sage_fast.benchmarks.timing import Save, fresh_compilation, interleaved, save_nothing
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops import implementation
from sage_fast.ops.adapter_rows import adapter_rows_reference
from sage_fast.ops.gated_norm import gated_norm_reference
from sage_fast.ops.gated_sum import gated_sum_reference
from sage_fast.ops.norm_modulate import norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_reference
from sage_fast.ops.norm_silu import norm_silu_reference
from sage_fast.ops.transition_score import transition_score_reference
from sage_fast.tools.harness import head_line, host_timer, usual_dtype
from sage_fast.tools.operators import OPERATORS, STEP, check, double, inputs, wrong
from sage_fast.util.console import progress
from sage_fast.util.environment import environment
from sage_fast.util.ranks import local_device

LATENTS = {
    "tiny": (2, 4, 3, 6, 5),
    "480p batch 1": (1, 32, 21, 30, 52),
    "480p batch 4": (4, 32, 21, 30, 52),
    "480p batch 16": (16, 32, 21, 30, 52),
    "720p batch 1": (1, 32, 21, 45, 80),
    "720p batch 4": (4, 32, 21, 45, 80),
    "720p batch 16": (16, 32, 21, 45, 80),
    "large": (96, 32, 21, 45, 80),
}
"""Name -> shape of the latents of the transitions."""
TOKENS = {
    "tiny tokens": (2, 6, 3, 2, 8),
    "testbed batch 32": (32, 80, 7, 4, 16),
    "8192 tokens": OPERATORS["norm_rotate"].production,
}
"""Name -> samples, video tokens, text tokens, heads and width of a head."""
TOGETHER = {"24-head norm": (1, 8192, 0, 24, 128, 24)}
"""The same of `norm_rotate` alone, and the heads of a token that are normalised together."""
PIXELS = {"tiny pixels": (1, 2, 3, 4, 8), "480p frame": OPERATORS["norm_silu"].production}
"""Name -> samples, frames, height, width and channels of the decoder's activations."""
SIZES = LATENTS | TOKENS | TOGETHER | PIXELS
CPU_SIZES = (
    "480p batch 1",
    "480p batch 4",
    "480p batch 16",
    "720p batch 4",
    "testbed batch 32",
    "8192 tokens",
)
LEAST_SHARE = dict.fromkeys(OPERATORS, 0.9) | {"adapter_rows": 0.6}
"""Operator -> share of a copy's speed to reach on a GPU, at 720p, 8192 tokens or larger. A 480p
batch of 4 fills an H200 1.29 times, so its last wave is mostly empty; `adapter_rows` also has a
matrix product and GELU."""

STEPS, ETA = 20, 0.7
ROTATION_BYTES = 256 * 2**20
"""Bytes that a contender reads before it reuses an input: more than the L2 of any GPU (50 MiB on an
H200)."""
MAX_CASES = 64
"""Maximum number of cases in a rotation; applies to small sizes."""

Case = Sequence[Any]
"""Arguments of a contender. All tensors are on one device before anything is timed: a graph capture
cannot copy from the host."""


def rotation(case: Case) -> list[Case]:
    """Return copies of a case in separate memory, enough that a pass over them reads
    ROTATION_BYTES.

    Each contender gets its own rotation: inputs that another has just read would be in the cache.
    """
    read = sum(value.nbytes for value in case if isinstance(value, Tensor))
    return [
        [
            v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
            for v in case
        ]
        for _ in range(min(MAX_CASES, math.ceil(ROTATION_BYTES / read)))
    ]


# -- the field's eager code, written from the formulas ---------------------------------------------


def eager_step(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Flow-GRPO step as training code usually writes it: scalars as broadcast tensors, one
    operation at a time."""
    v = v.float()
    sigma, sigma_next = (s.view(-1, *[1] * (x.ndim - 1)) for s in (sigma, sigma_next))
    dt = sigma_next - sigma
    std = eta * torch.sqrt(sigma / (1 - sigma))
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    scale = std * torch.sqrt(-dt)
    x_next = mean + scale * torch.randn_like(x)
    return x_next, eager_log_prob(x_next, mean, scale)


def eager_log_prob(x_next: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    log_prob = (
        -((x_next.detach() - mean) ** 2) / (2 * scale**2)
        - torch.log(scale)
        - 0.5 * math.log(2 * math.pi)
    )
    return log_prob.mean(dim=tuple(range(1, x_next.ndim)))


def eager_score(
    x: Tensor,
    x_next: Tensor,
    v: Tensor,
    v_anchor: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: float,
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
    kl = ((mean - mean_of(v_anchor)) ** 2).mean(dim=tuple(range(1, x.ndim)), keepdim=True) / (
        2 * scale**2
    )
    return eager_log_prob(x_next, mean, scale), kl.flatten()


def joined_reference(joint: Tensor, text: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_rotate` in plain PyTorch: queries, keys and values. Does not modify joint."""
    joint = torch.cat([joint[:, : joint.shape[1] - text.shape[1]], text], dim=1)
    return *norm_rotate_reference(joint, *rest), joint[:, :, 2]


# -- the contenders --------------------------------------------------------------------------------

REFERENCES = {
    "adapter_rows": adapter_rows_reference,
    "gated_norm": gated_norm_reference,
    "gated_sum": gated_sum_reference,
    "norm_modulate": norm_modulate_reference,
    "norm_rotate": joined_reference,
    "norm_silu": norm_silu_reference,
}
BYTES = {
    "transition_step": (8, 1),
    "transition_score": (16, 5),
    "adapter_rows": (0, 2),
    "gated_norm": (0, 9),
    "gated_sum": (0, 5),
    "norm_modulate": (0, 5),
    "norm_rotate": (0, 4),
    "norm_silu": (0, 2),
}
"""Bytes that an operator has to move for each element of its first input, backward included: of
float32 latents, and in elements of the velocity, the tokens, or the joint queries, keys and
values."""


def bytes_moved(operator: str, case: Case) -> int:
    """Return the bytes an operator has to move, its inputs read once by the forward and once by the
    backward."""
    latents, elements = BYTES[operator]
    activation = case[{"transition_step": 1, "transition_score": 2}.get(operator, 0)]
    return case[0].numel() * (latents + elements * activation.element_size())


def sizes_of(operator: str) -> Mapping[str, Sequence[int]]:
    """Return the sizes of an operator: of latents for a transition, of pixels in the decoder, of
    tokens in a block."""
    if operator.startswith("transition"):
        return LATENTS
    if operator == "norm_silu":
        return PIXELS
    if operator == "norm_rotate":
        return TOKENS | TOGETHER
    return TOKENS


def case_of(operator: str, size: Sequence[int], device: torch.device) -> Case:
    """Make the arguments of an operator as a run has them; those that the backward is for require
    gradients."""
    norm = not operator.startswith("transition")
    shape = (
        (*size[:2], size[3] * size[4])
        if norm and operator not in ("norm_rotate", "norm_silu")
        else size
    )
    coefs = transition_table(sigma_schedule(STEPS, 5.0), "flow", ETA).coefficients()
    dtype = usual_dtype(device) if norm else torch.bfloat16
    case = inputs(operator, shape, dtype, device, coefs=coefs, optional=False)
    for place in OPERATORS[operator].trained:
        case[place].requires_grad_()
    return case


def eager(
    operator: str, case: Case, wrapped: Callable[..., Any] = lambda function: function
) -> Callable[..., Any]:
    """Return plain PyTorch code on the arguments of an operator: the field's, or the reference of a
    normalisation."""
    if operator in REFERENCES:
        return wrapped(REFERENCES[operator])
    sigmas = (
        sigma_schedule(STEPS, 5.0)[STEP : STEP + 2, None]
        .expand(2, len(case[0]))
        .to(case[0].device, torch.float32)
    )
    if operator == "transition_step":
        step = wrapped(eager_step)
        return lambda x, v, *_: step(x, v, *sigmas, ETA)
    score = wrapped(eager_score)
    return lambda x, x_next, v, *others: score(x, x_next, v, others[2], *sigmas, ETA)


def contenders(
    operator: str, case: Case, compiled: bool
) -> dict[str, tuple[Callable[..., Any], Case]]:
    """Return name -> function and its case; `copy` moves the bytes that the operator has to
    move."""
    functions = {"fused": OPERATORS[operator].function, "eager": eager(operator, case)}
    if compiled:
        functions["compiled"] = eager(
            operator, case, functools.partial(torch.compile, dynamic=False)
        )
    half = torch.empty(bytes_moved(operator, case) // 2, dtype=torch.uint8, device=case[0].device)
    made = {name: _with_backward(function, case) for name, function in functions.items()}
    return made | {"copy": (torch.clone, [half])}


def _with_backward(function: Callable[..., Any], case: Case) -> tuple[Callable[..., Any], Case]:
    """Return a function that runs `function` forward and backward, if it has one, and a case with
    random gradients."""
    outs = [out for out in tree_leaves(function(*case)) if isinstance(out, Tensor)]
    grads = [torch.randn_like(out) for out in outs if out.requires_grad]

    def run(*case: Any) -> Any:
        arguments, upstream = case[: len(case) - len(grads)], case[len(case) - len(grads) :]
        outs = tree_leaves(function(*arguments))
        if not upstream:
            return outs
        trained = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
        return torch.autograd.grad([out for out in outs if out.requires_grad], trained, upstream)

    return run, [*case, *grads]


def gate(operator: str, case: Case) -> None:
    """Correctness gate: compare values and gradients with the float64 reference, and that with the
    field's eager code.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    arguments = [value.detach() if isinstance(value, Tensor) else value for value in case]
    if found := wrong(check(operator, arguments), units=64):
        raise AssertionError(f"{operator}: {found}")
    if operator == "transition_score":
        exact = double(*arguments)
        for theirs, ours in zip(eager(operator, exact)(*exact), transition_score_reference(*exact)):
            torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


# -- timing ----------------------------------------------------------------------------------------


def _timer(
    device: torch.device, function: Callable[..., Any], cases: Sequence[Case]
) -> Callable[[], float]:
    """Return a function that times one run: of the next case on the CPU, the mean over all cases on
    CUDA.

    On CUDA one graph holds the whole rotation: with one graph per case, the launch would dominate a
    kernel of microseconds. All results are kept until the end of the capture, so each has its own
    memory and none overwrites cached lines.
    """
    if device.type != "cuda":
        rotating = itertools.cycle(cases)
        return host_timer(lambda: function(*next(rotating)), device)
    with torch.cuda.stream(torch.cuda.Stream()):
        for case in cases:
            function(*case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [function(*case) for case in cases]
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
    return dict(
        zip(("p20", "p50", "p80"), values.quantile(values.new_tensor([0.2, 0.5, 0.8])).tolist())
    )


def measure(
    operator: str, size: Sequence[int], device: torch.device, repetitions: int
) -> dict[str, dict[str, float]]:
    """Return name -> p20, p50 and p80 in seconds, with all contenders interleaved.

    Raises:
        AssertionError: a result is wrong.
        FailOnRecompileLimitHit: torch.compile gave up, and its row would time eager code.
    """
    case = case_of(operator, size, device)
    gate(operator, case)
    timers = {}
    with fresh_compilation():
        for name, (function, own) in contenders(operator, case, compiled=True).items():
            cases = rotation(own)
            function(*cases[0])  # compilation and first allocations
            timers[name] = _timer(device, function, cases)
        return {
            name: quantiles(seconds) for name, seconds in interleaved(timers, repetitions).items()
        }


def run(
    sizes: Sequence[str] | None = None, repetitions: int = 15, save: Save = save_nothing
) -> dict[str, Any]:
    """Measure every operator at `sizes`; return the result, as in the JSON, and pass it to `save`
    after each row."""
    device = local_device()
    names = sizes or (
        CPU_SIZES if device.type == "cpu" else [name for name in SIZES if "tiny" not in name]
    )
    rows: list[dict[str, Any]] = []
    result = {
        "environment": environment(device, implementation(device)),
        "rounds": repetitions,
        "rows": rows,
    }
    work = [
        (operator, name) for operator in OPERATORS for name in sizes_of(operator) if name in names
    ]
    for operator, name in progress(work, "operators", len(work), "row"):
        rows.append(
            {
                "operator": operator,
                "size": name,
                "shape": list(SIZES[name]),
                "bytes": bytes_moved(
                    operator, case_of(operator, SIZES[name], torch.device("meta"))
                ),
                "seconds": measure(operator, SIZES[name], device, repetitions),
            }
        )
        save(result)
    return result


def format_result(result: dict[str, Any]) -> str:
    """Format the table for a terminal: medians, ratios to each contender, share of the copy
    limit."""
    env = result["environment"]
    lines = [
        head_line(env),
        "",
        f"{'operator':<18}{'size':<16}{'fused':>11}{'p20 to p80':>18}{'GB/s':>8}"
        f"{'eager':>11}{'x':>7}{'compiled':>11}{'x':>7}{'copy':>11}{'of limit':>10}",
    ]
    for row in result["rows"]:
        ms = {name: 1e3 * times["p50"] for name, times in row["seconds"].items()}
        low, fused, high = (1e3 * row["seconds"]["fused"][at] for at in ("p20", "p50", "p80"))
        spread, speed = f"{low:.3f} to {high:.3f}", row["bytes"] / fused / 1e6
        lines.append(
            f"{row['operator']:<18}{row['size']:<16}{fused:>8.3f} "
            f"ms{spread:>18}{speed:>8.1f}{ms['eager']:>8.2f} ms"
            f"{ms['eager'] / fused:>6.1f}x{ms['compiled']:>8.2f} ms{ms['compiled'] / fused:>6.2f}x"
            f"{ms['copy']:>8.2f} ms{ms['copy'] / fused:>9.0%}"
        )
    lines += [
        "",
        f"medians of {result.get('rounds', 'the')} interleaved rounds on inputs that rotate past "
        f"the cache; copy = the same bytes, copied; fused = {env['operators']}",
    ]
    if any(
        row["seconds"]["copy"]["p50"] > row["seconds"]["fused"]["p50"] for row in result["rows"]
    ):
        lines.append(
            "Above 100% a copy is no limit: what mostly reads can be faster (a CPU also reads what "
            "it writes)."
        )
    if env["operators"] == "Triton":
        bar, lower = LEAST_SHARE["transition_step"], LEAST_SHARE["adapter_rows"]
        lines.append(
            f"The bar is {bar:.0%} of the limit at 720p or larger ({lower:.0%} for adapter_rows); "
            "below that the fixed cost of a kernel counts."
        )
    return "\n".join(lines)
