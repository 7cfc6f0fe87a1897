"""Self-test rows of `sage-fast doctor`: that this machine computes correctly, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import TransitionTable, sigma_schedule, transition_table
from sage_fast.config.schema import SamplingConfig
from sage_fast.models.attention.backends import ATTENTION, usable
from sage_fast.models.attention.trial import fastest, try_attention
from sage_fast.models.interface import Condition
from sage_fast.models.load import find_spec
from sage_fast.models.policy import Policy
from sage_fast.models.random_weights import random_module
from sage_fast.models.spec import Spec
from sage_fast.rollout.graphs import Recorder, StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.rollout.recorder import CudaRecorder
from sage_fast.testbed.model import LATENT_SHAPE
from sage_fast.tools.checks import Check, tried
from sage_fast.tools.harness import matmul_ceiling, usual_dtype
from sage_fast.tools.operators import OPERATORS, Kernels, check, inputs, registered, wrong
from sage_fast.util.captions import Caption
from sage_fast.util.console import quiet
from sage_fast.util.errors import in_one_line
from sage_fast.util.seeding import sample_seeds

PROMPT = "a red circle moves left quickly"
TESTBED = "random:testbed"
LEAST_SHARE = 0.4
"""Share of a matrix product's ceiling below which attention on a GPU is slow. An H100 that ran alone reached 0.73:
`2026-11-25-h100-doctor.json` in benchmarks/results."""


def checks(device: torch.device) -> Iterator[Check]:
    """Yield all rows of this module on `device`; the operators also run on the CPU."""
    yield from tried("operators", lambda: operators(device))
    if device.type != "cpu":
        yield from tried("operators, cpu", lambda: operators(torch.device("cpu")))
    ceiling = matmul_ceiling(device, usual_dtype(device))
    yield Check("matrix product", "ok", f"{ceiling / 1e12:.3g} TFLOP/s in {usual_dtype(device)}")
    yield from tried("attention", lambda: attention(device, ceiling))
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
        return Check(name, "wrong", found, advice)
    if found := wrong(compared):
        return Check(name, "wrong", found, advice)
    worst = max(error / max(largest, 1e-30) for error, _, largest in (each.errors() for each in compared))
    names = dict.fromkeys(comparison.name for comparison in compared)
    found = f"{', '.join(names)}: largest error {worst:.0e} of the largest value"
    return Check(name, "ok", found)


# -- attention ---------------------------------------------------------------------------------------------------------


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
            yield Check(row, "missing", f"not for {dtype} on this {device.type}", advice)
            continue
        trial = trials[name]
        if trial.problem:
            advice = "; ".join(filter(None, ("model.attention = auto skips it", ATTENTION[name].install)))
            yield Check(row, "wrong", trial.problem, advice)
            continue
        share = 1e3 * flops / trial.milliseconds / ceiling
        found = f"error {trial.error:.0e}; {trial.milliseconds:.3g} ms forward and backward"
        found += f", {share:.0%} of the ceiling" * gpu  # on a CPU other programs slow down one of the two
        if not trial.agrees:
            found += "; rounds differently under no_grad, so model.attention = auto skips it for clip and kl_mask"
        slow = gpu and name == best and share < LEAST_SHARE
        advice = f"expected {LEAST_SHARE:.0%}: is the GPU shared or throttled? sage-fast bench says more"
        yield Check(row, "slow" if slow else "ok", found, advice if slow else "")


# -- CUDA graphs -------------------------------------------------------------------------------------------------------

TABLE = transition_table(sigma_schedule(5, 3.0), "sage", 0.7)


def roll(
    policy: Policy,
    embeddings: Mapping[Any, Any],
    prompts: Sequence[str],
    index: int = 0,
    graphs: StepGraphs | None = None,
    table: TransitionTable = TABLE,
) -> list[Tensor]:
    """Roll out a testbed sample per prompt; return the last latents and all tensors of every step.

    Args:
        policy: a policy of the testbed's latents.
        embeddings: prompt -> embedding.
        prompts: prompt of each sample.
        index: iteration, which seeds the noise.
        graphs: recorded steps to replay; None runs each step one kernel at a time.
        table: transitions of the rollout.
    """
    seeds = sample_seeds(0, index, 0, range(len(prompts)))
    recorded: list[Tensor] = []
    last = rollout(
        policy,
        table,
        table.coefficients().to(policy.device),
        policy.conditioning_table(table.sigmas[:-1], embeddings),
        prompts,
        seeds,
        initial_latents(seeds, LATENT_SHAPE, policy.device),
        record=lambda step, x, x_next, log_prob, v: recorded.extend(t.clone() for t in (x, x_next, log_prob, v())),
        graphs=graphs,
    )
    return [last, *recorded]


def replay_problem(
    graphs: StepGraphs, embeddings: Mapping[Any, Any], batches: Sequence[Sequence[str]], table: TransitionTable = TABLE
) -> str:
    """Say how rollouts with `graphs` differ from plain ones in any bit, or return an empty text.

    A shape is recorded at its second batch and replayed with other values at its third.
    """
    for index, prompts in enumerate(batches):
        ours, plain = (roll(graphs.policy, embeddings, prompts, index, on, table) for on in (graphs, None))
        for mine, expected in zip(ours, plain, strict=True):
            if not torch.equal(mine, expected):
                error = (mine.float() - expected.float()).abs().max().item()
                return f"rollout {index + 1} differs from the one without by {error:.1e}"
    return ""


def random_policy(spec: Spec, device: torch.device) -> Policy:
    """Make a policy with random weights in the usual dtype."""
    dtype = usual_dtype(device)
    networks = {part: random_module(spec, part, dtype, device).requires_grad_(False) for part in spec.networks}
    return spec.policy(networks, dtype=dtype, guidance_scale=1.0)


def conditions(spec: Spec, policy: Policy) -> dict[str, Condition]:
    """Return prompt -> condition, for `PROMPT` and the empty one."""
    condition = spec.load_encoder(policy.dtype, policy.device, SamplingConfig())(Caption(PROMPT))
    return {"": condition, PROMPT: condition}


@quiet()
def graphs(device: torch.device, recorder: Callable[[], Recorder] = CudaRecorder) -> Check:
    """Check that a rollout replayed from a CUDA graph equals the one without a graph bit for bit.

    Args:
        device: device of the rollout. Without a GPU nothing is compared, unless `recorder` is replaced.
        recorder: factory of the step recorder.
    """
    name = "CUDA graph"
    if device.type != "cuda" and recorder is CudaRecorder:
        return Check(name, "missing", "needs a GPU; steps run one kernel at a time")
    spec = find_spec(TESTBED)
    policy = random_policy(spec, device)
    replayed = StepGraphs(policy, recorder(), 2**30)
    problem = replay_problem(replayed, conditions(spec, policy), [[PROMPT] * 2] * 3)
    if problem or replayed.refused or not len(replayed):
        found = problem or "; ".join(replayed.refused.values()) or "nothing was recorded"
        return Check(name, "wrong", found, "sampling.cuda_graphs = false runs without")
    return Check(name, "ok", "replays give the same bits as a rollout without")
