"""Self-test rows of `sage-fast doctor`: that this machine computes correctly, and how fast."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.models.attention import ATTENTION, fastest, measure_attention, try_attention, usable
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.text import TextEmbedding, collate
from sage_fast.models.testbed.model import LATENT_SHAPE, TestbedTransformer
from sage_fast.models.testbed.text import embed
from sage_fast.ops.transition_score import transition_score_reference
from sage_fast.ops.transition_step import transition_step_reference
from sage_fast.rollout.graphs import CudaRecorder, Recorder, StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.tools import normalisations
from sage_fast.tools.harness import host_timer, matmul_ceiling, usual_dtype
from sage_fast.tools.verdict import Check, in_one_line, tried
from sage_fast.util.seeding import sample_seeds

PROMPT = "a red circle moves left quickly"
LEAST_SHARE = {"operator": 0.8, "attention": 0.4, "transformer": 0.5}
"""Threshold below which a GPU row is slow: share of a copy's bandwidth, or of a matrix product's ceiling."""


def checks(device: torch.device) -> Iterator[Check]:
    """Yield all rows of this module on `device`; the operators also run on the CPU."""
    yield from tried("operators", lambda: operators(device))
    if device.type != "cpu":
        yield from tried("operators, cpu", lambda: operators(torch.device("cpu")))
    ceiling = matmul_ceiling(device, usual_dtype(device))
    yield Check(name="matrix product", verdict="ok", found=f"{ceiling / 1e12:.3g} TFLOP/s in {usual_dtype(device)}")
    bandwidth = copy_bandwidth(device)
    yield Check(name="copy", verdict="ok", found=f"{bandwidth / 1e9:,.0f} GB/s, read and written")
    yield from tried("operators, speed", lambda: speeds(device, bandwidth))
    yield from tried("attention", lambda: attention(device, ceiling))
    yield from tried("transformer", lambda: [transformer(device, ceiling)])
    yield from tried("CUDA graph", lambda: [graphs(device)])


# -- the operators ----------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[..., Any]] = {
    "transition_step": transition_step_reference,
    "transition_score": transition_score_reference,
    **{name: reference for name, (_, reference) in normalisations.OPERATORS.items()},
}
"""Name -> reference."""


def inputs(operator: str, device: torch.device, dtype: torch.dtype, large: bool = False) -> list[Any]:
    """Make the arguments of an operator and its reference; the trained ones require gradients.

    Args:
        operator: a name in OPERATORS.
        device: device of the tensors.
        dtype: dtype of velocities and activations; latents are float32.
        large: whether to use a size at which only memory limits a copy, instead of a small odd one.
    """
    gpu = device.type == "cuda"
    if operator in normalisations.OPERATORS:
        size = ((4 if gpu else 1), 8000, 192, 16, 128) if large else (2, 75, 11, 2, 64)
        return normalisations.inputs(operator, size, device, dtype)
    shape = ((24 if gpu else 2), 32, 21, 45, 80) if large else (3, 32, 5, 7, 9)
    table = transition_table(sigma_schedule(20, 5.0), "flow", 0.7)
    coefs = table.coefficients(math.prod(shape[1:])).to(device)
    step = torch.tensor(7, device=device)
    x, v, other = (torch.randn(shape, device=device, dtype=kind) for kind in (torch.float32, dtype, dtype))
    if operator == "transition_step":
        guidance = None if large else torch.tensor(6.0, device=device)
        return [x, v, None if large else other, guidance, coefs, step, torch.arange(shape[0], device=device)]
    x_next = float(table.a[7]) * x + float(table.b[7]) * v.float() + float(table.c[7]) * torch.randn_like(x)
    return [x, x_next, v.requires_grad_(), other, None, coefs, step]


def fused(operator: str) -> Callable[..., Any]:
    """Return the operator itself, which takes the arguments of its reference."""
    if operator in normalisations.OPERATORS:
        return normalisations.OPERATORS[operator][0]
    return getattr(torch.ops.sage_fast, operator).default


def operators(device: torch.device) -> Iterator[Check]:
    """Check values and gradients of each operator, in float32 and bfloat16, against its reference in float64."""
    for operator in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            yield operator_check(operator, fused(operator), device, dtype)


def operator_check(operator: str, function: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Check:
    """Check that the error of `function` is at most twice that of plain PyTorch in the same dtypes, per tensor."""
    name = f"{operator}, {device.type}, {str(dtype).removeprefix('torch.')}"
    arguments = inputs(operator, device, dtype)
    advice = "pytest tests/ops says which case; SAGE_FAST_OPS=reference runs without the fused operators"
    upstream: list[Tensor] = []
    try:
        ours = _values_and_gradients(function, arguments, upstream)
    except Exception as error:  # this check looks for kernels that cannot be compiled or launched
        found = f"it does not run: {in_one_line(error)}"
        return Check(name=name, verdict="wrong", found=found, advice=advice)
    plain = _values_and_gradients(OPERATORS[operator], arguments, upstream)
    doubled = [a.detach().double().requires_grad_(a.requires_grad) if _floating(a) else a for a in arguments]
    exact = _values_and_gradients(OPERATORS[operator], doubled, upstream)
    worst, wrong = 0.0, []
    for label, truth in exact.items():
        off, allowed = ((values[label].double() - truth).abs().max().item() for values in (ours, plain))
        largest = truth.abs().max().item()
        worst = max(worst, off / max(largest, 1e-30))
        # A sum in plain PyTorch may happen to be exact; another order of summation differs by a few units.
        if not off <= 2 * allowed + 8 * torch.finfo(torch.float32).eps * largest:
            wrong.append(f"{label}: error {off:.1e}, plain PyTorch {allowed:.1e}")
    if wrong:
        return Check(name=name, verdict="wrong", found="; ".join(wrong), advice=advice)
    found = f"{', '.join(ours)}: largest error {worst:.0e} of the largest value"
    return Check(name=name, verdict="ok", found=found)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _values_and_gradients(
    function: Callable[..., Any], arguments: Sequence[Any], upstream: list[Tensor]
) -> dict[str, Tensor]:
    """Return name -> output or gradient. The first call fills `upstream`; later calls reuse it."""
    out = function(*arguments)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    if not upstream:
        upstream += [torch.randn_like(output, dtype=torch.float32) for output in outputs]
    named = {f"output {i}" if i else "output": output.detach() for i, output in enumerate(outputs)}
    trained = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    if trained:
        differentiable = [(output, up) for output, up in zip(outputs, upstream) if output.requires_grad]
        gradients = torch.autograd.grad(
            [output for output, _ in differentiable], trained, [up.to(output.dtype) for output, up in differentiable]
        )
        named |= {f"gradient {i}" if i else "gradient": gradient for i, gradient in enumerate(gradients)}
    return named


# -- speed ------------------------------------------------------------------------------------------------------------


def _seconds(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Return the seconds of one call: the median of five runs of `calls`, after one that compiles and allocates."""
    timer = host_timer(lambda: [function() for _ in range(calls)], device)
    timer()
    return statistics.median(timer() for _ in range(5)) / calls


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, read plus written, of a copy larger than any cache."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device, 5 if device.type == "cuda" else 2)


def speeds(device: torch.device, bandwidth: float) -> Iterator[Check]:
    """Check the speed of each operator's forward at a production size, as a share of a copy of the same bytes."""
    for operator in OPERATORS:
        arguments = [
            a.detach() if isinstance(a, Tensor) else a for a in inputs(operator, device, usual_dtype(device), True)
        ]
        function = fused(operator)
        out = function(*arguments)
        outputs, given = [out] if isinstance(out, Tensor) else out, [a for a in arguments if isinstance(a, Tensor)]
        # An output that is a view of an argument is neither read nor written.
        places = {a.untyped_storage().data_ptr() for a in given}
        moved = sum(a.nbytes for a in given)
        moved += sum(-o.nbytes if o.untyped_storage().data_ptr() in places else o.nbytes for o in outputs)
        call = functools.partial(function, *arguments)
        share = moved / _seconds(call, device, 10 if device.type == "cuda" else 1) / bandwidth
        found = f"forward at {share:.0%} of the bandwidth of a copy, {moved / 1e6:,.0f} MB"
        yield _speed(f"{operator}, speed", share, "operator", found, device)


def _speed(name: str, share: float, kind: str, found: str, device: torch.device) -> Check:
    slow = device.type == "cuda" and share < LEAST_SHARE[kind]
    advice = f"expected {LEAST_SHARE[kind]:.0%}: is the GPU shared or throttled? sage-fast bench says more"
    return Check(name=name, verdict="slow" if slow else "ok", found=found, advice=advice if slow else "")


def attention(device: torch.device, ceiling: float) -> Iterator[Check]:
    """Check every backend: availability, correctness, share of the ceiling (forward and backward).

    Only the fastest backend can be slow.
    """
    gpu, dtype = device.type == "cuda", usual_dtype(device)
    shape = (1, 8192, 16, 128) if gpu else (1, 512, 2, 64)
    flops = 3.5 * 4 * shape[0] * shape[1] ** 2 * shape[2] * shape[3]
    trials = {name: try_attention(ATTENTION[name], shape, device, dtype) for name in usable(device, dtype)}
    best = fastest(trials)
    for name in ATTENTION:
        row = f"attention {name}"
        if name not in trials:
            advice = ATTENTION[name].install if gpu else ""
            yield Check(name=row, verdict="missing", found=f"not for {dtype} on this {device.type}", advice=advice)
            continue
        trial = trials[name]
        if trial.problem:
            advice = "; ".join(filter(None, ("model.attention = auto skips it", ATTENTION[name].install)))
            yield Check(name=row, verdict="wrong", found=trial.problem, advice=advice)
            continue
        share = 1e3 * flops / trial.milliseconds / ceiling
        found = f"error {trial.error:.0e}; {trial.milliseconds:.3g} ms forward and backward, {share:.0%} of the ceiling"
        if name == best:
            yield _speed(row, share, "attention", found, device)
        else:
            yield Check(name=row, verdict="ok", found=found)


# -- the model --------------------------------------------------------------------------------------------------------


def tiny_policy(device: torch.device, wide: bool = False) -> HunyuanVideo15Policy:
    """Make two blocks with random weights: the testbed's architecture, or with `wide` the width of the 8.3 B model."""
    sizes: dict[str, Any] = {"num_attention_heads": 16, "attention_head_dim": 128, "rope_axes_dim": (16, 56, 56)}
    with device:
        transformer = TestbedTransformer(num_layers=2, **(sizes if wide else {})).eval().requires_grad_(False)
    nn.Module.to(transformer, usual_dtype(device))
    return HunyuanVideo15Policy(transformer, dtype=usual_dtype(device), guidance_scale=1.0)


def prompt() -> TextEmbedding:
    return TextEmbedding(text=embed(PROMPT), glyphs=torch.zeros(0, 8))


def transformer_forward(device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return a forward of two blocks and its tokens: as wide as the 8.3 B model on a GPU, the testbed's on a CPU."""
    gpu = device.type == "cuda"
    policy = tiny_policy(device, wide=gpu)
    space = (5, 30, 52) if gpu else LATENT_SHAPE[1:]
    x = torch.randn(1 if gpu else 4, policy.latent_channels, *space, device=device)
    tokens = x[0, 0].numel() + prompt().tokens
    heads = policy.transformer.config.num_attention_heads, policy.transformer.config.attention_head_dim
    best = fastest(measure_attention((len(x), tokens, *heads), device, policy.dtype))
    policy.forward.attention = ATTENTION[best]
    text = collate([prompt()] * len(x), device, policy.dtype)
    with torch.no_grad():
        conditioning = policy.condition(torch.full((len(x),), 0.7, device=device), text)
    return torch.no_grad()(lambda: policy.velocity(x, conditioning)), len(x) * tokens


def transformer(device: torch.device, ceiling: float) -> Check:
    """Check the speed of a forward, as a share of the ceiling."""
    run, tokens = transformer_forward(device)
    with FlopCounterMode(display=False) as counter:
        run()
    seconds = _seconds(run, device, 3 if device.type == "cuda" else 1)
    share = counter.get_total_flops() / seconds / ceiling
    found = f"two blocks forward in {1e3 * seconds:.3g} ms, {tokens:,} tokens, {share:.0%} of the ceiling"
    return _speed("transformer, speed", share, "transformer", found, device)


def graphs(device: torch.device, recorder: Callable[[], Recorder] = CudaRecorder) -> Check:
    """Check that a rollout replayed from a CUDA graph equals the one without a graph bit for bit.

    Args:
        device: device of the rollout. Without a GPU nothing is compared, unless `recorder` is replaced.
        recorder: factory of the step recorder.
    """
    name = "CUDA graph"
    if device.type != "cuda" and recorder is CudaRecorder:
        return Check(name=name, verdict="missing", found="needs a GPU; steps run one kernel at a time")
    notes: list[str] = []
    policy = tiny_policy(device)
    replayed = StepGraphs(policy, recorder(), 2**30, notes.append)
    table = transition_table(sigma_schedule(5, 3.0), "sage", 0.7)
    coefs = table.coefficients(math.prod(LATENT_SHAPE)).to(device)
    conditioning = policy.conditioning_table(table.sigmas[:-1], {"": prompt(), PROMPT: prompt()})

    def roll(index: int, using: StepGraphs | None) -> list[Tensor]:
        seeds = sample_seeds(0, index, 0, range(2))
        recorded: list[Tensor] = []
        latents = initial_latents(seeds, LATENT_SHAPE, device)

        def record(step: int, *tensors: Tensor) -> None:
            recorded.extend(tensor.clone() for tensor in tensors)

        last = rollout(policy, table, coefs, conditioning, [PROMPT] * 2, seeds, latents, record=record, graphs=using)
        return [last, *recorded]

    advice = "sampling.cuda_graphs = false runs without"
    for index in range(3):  # the second is recorded, the third is replayed with other values
        for mine, expected in zip(roll(index, replayed), roll(index, None), strict=True):
            if not torch.equal(mine, expected):
                error = (mine.float() - expected.float()).abs().max().item()
                found = f"rollout {index + 1} differs from the one without by {error:.1e}"
                return Check(name=name, verdict="wrong", found=found, advice=advice)
    if notes or not len(replayed):
        return Check(name=name, verdict="wrong", found="; ".join(notes) or "nothing was recorded", advice=advice)
    return Check(name=name, verdict="ok", found="replays give the same bits as a rollout without")
