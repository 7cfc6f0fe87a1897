"""Check of recorded rollouts against plain ones, which `sage-fast doctor` and the tests run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import TransitionTable, sigma_schedule, transition_table
from sage_fast.models.policy import Policy
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.testbed.model import LATENT_SHAPE
from sage_fast.util.seeding import sample_seeds

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
