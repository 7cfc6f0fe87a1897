"""Self-test rows of `sage-fast doctor`: that this machine computes correctly, and how fast."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.attention.backends import ATTENTION, usable
from sage_fast.models.attention.trial import fastest, measure_attention, try_attention
from sage_fast.models.interface import Condition
from sage_fast.models.load import find_spec
from sage_fast.models.policy import Policy
from sage_fast.models.random_weights import random_module
from sage_fast.models.registry import default_family
from sage_fast.models.spec import Spec
from sage_fast.rollout.graphs import Recorder, StepGraphs
from sage_fast.rollout.recorder import CudaRecorder
from sage_fast.tools.doctor import Check, tried
from sage_fast.tools.harness import host_timer, matmul_ceiling, of_limit, usual_dtype
from sage_fast.tools.operators import OPERATORS, Kernels, check, inputs, registered, wrong
from sage_fast.tools.replays import replay_problem
from sage_fast.util.captions import Caption
from sage_fast.util.console import quiet
from sage_fast.util.errors import in_one_line

PROMPT = "a red circle moves left quickly"
TESTBED = "random:testbed"
LEAST_SHARE = {"operator": 0.8, "adapter_rows": 0.6, "attention": 0.4, "transformer": 0.5}
"""Threshold below which a GPU row is slow: share of a copy's bandwidth, or of a matrix product's ceiling. An H100 that
ran alone reached 0.81 to 0.99; 0.73; and 0.64. `adapter_rows` multiplies too, and its 0.25 there evaluated GELU five
times an element. The files are `2026-11-25-h100-doctor.json` in benchmarks/results, and
`2026-11-25-h100-operators.json` for the transitions."""
NO_CEILING = "the matrix product above was slowed down, as by other programs, or its library is slow on this device"


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


def operators(device: torch.device) -> Iterator[Check]:
    """Check values and gradients of each operator, in float32 and bfloat16, against its reference in float64."""
    for operator in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16):
            yield operator_check(operator, registered, device, dtype)


def operator_check(operator: str, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> Check:
    """Check the example of an operator: the error of `kernels` is at most twice that of plain PyTorch, per tensor."""
    name = f"{operator}, {device.type}, {str(dtype).removeprefix('torch.')}"
    advice = "pytest tests/ops says which case; SAGE_FAST_OPS=reference runs without the fused operators"
    try:
        compared = list(check(operator, kernels, inputs(operator, OPERATORS[operator].example, dtype, device)))
    except Exception as error:  # this check looks for kernels that cannot be compiled or launched
        found = f"it does not run: {in_one_line(error)}"
        return Check(name=name, verdict="wrong", found=found, advice=advice)
    if found := wrong(compared):
        return Check(name=name, verdict="wrong", found=found, advice=advice)
    worst = max(error / max(largest, 1e-30) for error, _, largest in (each.errors() for each in compared))
    names = dict.fromkeys(comparison.name for comparison in compared)
    found = f"{', '.join(names)}: largest error {worst:.0e} of the largest value"
    return Check(name=name, verdict="ok", found=found)


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


def large_inputs(operator: str, device: torch.device) -> list[Any]:
    """Make the arguments of an operator in the usual dtype, so large that only memory limits a copy.

    24 samples of a transition took an H100 less time than its host took for the launches.
    """
    gpu = device.type == "cuda"
    batch = (96 if gpu else 2) if operator.startswith("transition") else (4 if gpu else 1)
    shape = (batch, *OPERATORS[operator].production[1:])
    return inputs(operator, shape, usual_dtype(device), device, optional=False)


def speeds(device: torch.device, bandwidth: float) -> Iterator[Check]:
    """Check the speed of each operator's forward at a production size, as a share of a copy of the same bytes."""
    for operator, (function, *_) in OPERATORS.items():
        arguments = large_inputs(operator, device)
        out = function(*arguments)
        outputs = [out] if isinstance(out, Tensor) else out or ()
        given = [a for a in arguments if isinstance(a, Tensor)]
        # An output that is a view of an argument is neither read nor written.
        places = {a.untyped_storage().data_ptr() for a in given}
        moved = sum(a.nbytes for a in given)
        moved += sum(-o.nbytes if o.untyped_storage().data_ptr() in places else o.nbytes for o in outputs)
        call = functools.partial(function, *arguments)
        share = moved / _seconds(call, device, 10 if device.type == "cuda" else 1) / bandwidth
        beyond = "its data lie in cache, or it reads more than it writes"
        found = f"forward of {moved / 1e6:,.0f} MB at {of_limit(share, 'the bandwidth of a copy', beyond)}"
        yield _speed(f"{operator}, speed", share, operator if operator in LEAST_SHARE else "operator", found, device)


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
        limit = of_limit(share, "the ceiling", NO_CEILING)
        found = f"error {trial.error:.0e}; {trial.milliseconds:.3g} ms forward and backward, {limit}"
        if not trial.agrees:
            found += "; rounds differently under no_grad, so model.attention = auto skips it for clip and kl_mask"
        if name == best:
            yield _speed(row, share, "attention", found, device)
        else:
            yield Check(name=row, verdict="ok", found=found)


# -- the model --------------------------------------------------------------------------------------------------------


def shallow(path: str) -> Spec:
    """Return the spec of a random model with two blocks in each network."""
    spec = find_spec(path)
    layouts = {part: {**spec.meta(part).config, "num_layers": 2} for part in spec.networks}
    return type(spec)(path, layouts)


def random_policy(spec: Spec, device: torch.device) -> Policy:
    """Make a policy with random weights in the usual dtype."""
    dtype = usual_dtype(device)
    networks = {part: random_module(spec, part, dtype, device).requires_grad_(False) for part in spec.networks}
    return spec.policy(networks, dtype=dtype, guidance_scale=1.0)


def conditions(spec: Spec, policy: Policy) -> dict[str, Condition]:
    """Return prompt -> condition, for `PROMPT` and the empty one."""
    condition = spec.load_encoder(policy.dtype, policy.device, SamplingConfig())(Caption(PROMPT))
    return {"": condition, PROMPT: condition}


def transformer_forward(device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return a forward of two blocks and its tokens: of the default model at 480p on a GPU, the testbed's on a CPU."""
    if device.type == "cuda":
        spec, sampling = shallow(default_family().randoms[0]), SamplingConfig(num_frames=17, batch_size=1)
    else:
        spec, sampling = shallow(TESTBED), SamplingConfig(num_frames=17, height=32, width=32)
    policy, count = random_policy(spec, device), sampling.batch_size
    known = conditions(spec, policy)
    x = torch.randn(count, *spec.latent_shape(sampling), device=device)
    tokens = spec.tokens(x.shape[1:]) + known[PROMPT].tokens
    if (shape := spec.attention_shape(sampling)) is not None:
        policy.set_attention(ATTENTION[fastest(measure_attention((count, tokens, *shape[1:]), device, policy.dtype))])
    with torch.no_grad():
        table = policy.conditioning_table(torch.tensor([0.7]), known)
        inputs = table.of([PROMPT] * count).at(torch.zeros(1, dtype=torch.int64, device=device))
    return torch.no_grad()(lambda: policy.velocity(x, inputs)), count * tokens


def transformer(device: torch.device, ceiling: float) -> Check:
    """Check the speed of a forward, as a share of the ceiling."""
    run, tokens = transformer_forward(device)
    with FlopCounterMode(display=False) as counter:
        run()
    seconds = _seconds(run, device, 3 if device.type == "cuda" else 1)
    share = counter.get_total_flops() / seconds / ceiling
    limit = of_limit(share, "the ceiling", NO_CEILING)
    found = f"two blocks forward in {1e3 * seconds:.3g} ms, {tokens:,} tokens, {limit}"
    return _speed("transformer, speed", share, "transformer", found, device)


@quiet()
def graphs(device: torch.device, recorder: Callable[[], Recorder] = CudaRecorder) -> Check:
    """Check that a rollout replayed from a CUDA graph equals the one without a graph bit for bit.

    Args:
        device: device of the rollout. Without a GPU nothing is compared, unless `recorder` is replaced.
        recorder: factory of the step recorder.
    """
    name = "CUDA graph"
    if device.type != "cuda" and recorder is CudaRecorder:
        return Check(name=name, verdict="missing", found="needs a GPU; steps run one kernel at a time")
    spec = find_spec(TESTBED)
    policy = random_policy(spec, device)
    replayed = StepGraphs(policy, recorder(), 2**30)
    problem = replay_problem(replayed, conditions(spec, policy), [[PROMPT] * 2] * 3)
    if problem or replayed.refused or not len(replayed):
        found = problem or "; ".join(replayed.refused.values()) or "nothing was recorded"
        return Check(name=name, verdict="wrong", found=found, advice="sampling.cuda_graphs = false runs without")
    return Check(name=name, verdict="ok", found="replays give the same bits as a rollout without")
