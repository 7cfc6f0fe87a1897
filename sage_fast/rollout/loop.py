"""The denoising loop: drive a policy through a transition table and pass each step on for storage.

Each step is one velocity (two with guidance) and one fused `transition_step`. Latents stay float32
between steps, so rollout and training see the same numbers. All randomness is a function of a
sample's seed, so a sample comes out the same in any batch and on any rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import Rollouts
from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.models.interface import ConditionKey, ConditionTable
from sage_fast.models.policy import Policy
from sage_fast.ops.philox import STREAM_INITIAL_LATENTS, philox_normal
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.step import denoise
from sage_fast.util.profiling import annotate

Record = Callable[[int, Tensor, Tensor, Tensor, Callable[[], Tensor]], None]
"""(step, x, x_next, log_prob, function that computes the guided velocity) of a step. The next step
may overwrite the tensors, those behind the function included."""


def bucket_by_length(lengths: Sequence[object], size: int) -> list[slice]:
    """Return consecutive slices of at most `size` samples with equal text lengths, so that no batch
    needs a mask.

    Args:
        lengths: per sample, its text length in each pass (`pass_lengths`).
        size: maximum slice length.
    """
    slices = []
    first = 0
    for _, equal in itertools.groupby(lengths):
        end = first + len(list(equal))
        slices += [slice(i, min(i + size, end)) for i in range(first, end, size)]
        first = end
    return slices


def rollout_batches(
    batch_keys: Sequence[object], groups: Sequence[int], rollouts: Rollouts, size: int
) -> list[tuple[list[int], range]]:
    """Return the batches of one rank's rollouts, in order: indices of samples, and the steps to
    denoise them over.

    First the steps that a group shares, with one of its samples; then the other steps, with every
    sample.

    Args:
        batch_keys: per sample, what the samples of a batch have in common: text lengths and
            transitions.
        groups: group of each sample.
        rollouts: denoising steps of the iteration's samples.
        size: maximum batch size.
    """
    prefixes = [rollouts.prefixes[group] for group in groups]
    heads = [i for i, group in enumerate(groups) if prefixes[i] and group not in groups[:i]]
    batches = [heads[rows] for rows in bucket_by_length([batch_keys[i] for i in heads], size)]
    shared = [(batch, range(prefixes[batch[0]])) for batch in batches]

    every = list(range(len(groups)))
    alone = [
        (every[rows], range(prefixes[rows.start], rollouts.steps))
        for rows in bucket_by_length(batch_keys, size)
    ]
    return shared + alone


def initial_latents(seeds: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return standard normal latents at sigma = 1, float32 `[B, *shape]`, determined by the
    seeds."""
    return philox_normal(
        seeds.to(device),
        torch.zeros((), dtype=torch.int64, device=device),
        shape,
        STREAM_INITIAL_LATENTS,
    )


@torch.no_grad()
def rollout(
    policy: Policy,
    table: TransitionTable,
    coefs: Tensor,
    conditioning: ConditionTable,
    keys: Sequence[ConditionKey],
    seeds: Tensor,
    latents: Tensor,
    *,
    steps: range | None = None,
    record: Record | None = None,
    on_step: Callable[[], object] | None = None,
    graphs: StepGraphs | None = None,
) -> Tensor:
    """Sample from sigma = 1 to 0, or a part of the way.

    Args:
        policy: predicts the velocity.
        table: the transitions, on the host.
        coefs: `table.coefficients(...)` on the policy's device.
        conditioning: conditions at the noise levels of `table`.
        keys: condition keys of B samples.
        seeds: int64 `[B]`, noise key of each sample.
        latents: float32 `[B, C, T, H, W]` before the first of `steps`; at sigma = 1 by default.
        steps: consecutive steps to run, all by default.
        record: called with the results of every step (`Trajectories.record`).
        on_step: called after every step (progress).
        graphs: CUDA graphs to replay steps from; results are bit-identical.

    Returns:
        float32 `[B, C, T, H, W]` after the last of `steps`: the final samples (VAE-scaled) by
            default.
    """
    conditions = conditioning.of(keys)
    seeds = seeds.to(policy.device)
    steps = range(len(table)) if steps is None else steps
    graph = None
    if graphs is not None:
        graph = graphs.prepare(coefs, conditions, seeds, latents)
    index = torch.arange(len(table), device=policy.device)
    x = latents
    for t in steps:
        step = index[t : t + 1]
        with annotate("step", t):
            if graph is not None:
                x, x_next, log_prob, *velocities = graph.step(x, step)
            else:
                x_next, log_prob, *velocities = denoise(
                    policy, coefs, conditions.at(step), seeds, x, step
                )
            if record is not None:
                record(t, x, x_next, log_prob, functools.partial(policy.guided, *velocities))
        x = x_next
        if on_step is not None:
            on_step()
    return x.clone() if graph is not None else x
