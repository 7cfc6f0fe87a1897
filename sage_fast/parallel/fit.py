"""Memory of a rank: what training, stored rollouts and CUDA graphs take, and the recomputation that
makes it fit."""

from __future__ import annotations

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.engines import ENGINES
from sage_fast.models.checkpointing import MODES, CheckpointPlan, fastest_that_fits
from sage_fast.models.model import Model
from sage_fast.models.policy import Policy
from sage_fast.models.spec import MAX_GRAPHS, Cost, Spec
from sage_fast.parallel.engine_memory import engine_memory
from sage_fast.parallel.stored_rollouts import stored_rollouts
from sage_fast.util.environment import free_bytes
from sage_fast.util.ranks import all_gather_object, world_size

MEMORY_SHARE = 0.92
"""Share of the free memory that a run may plan with; the rest is for decoding, workspaces and
fragmentation: 10 GiB on an H200 that holds the frozen weights, where 0.85 left 18 GiB idle.

In four iterations, training allocated 93 to 99 % of the plan: in benchmarks/results,
`2026-11-27-h200-iteration.json` and `2026-11-25-h100-full.json`, `-nft` and `-nft-zero3`. All ran
at 0.85; none has run at 0.92. What was reserved, and ranks that hold NCCL's buffers, were not
measured."""


def choose_checkpointing(resolved: ResolvedConfig, model: Model) -> tuple[CheckpointPlan, float]:
    """Resolve `model.gradient_checkpointing`. Collective.

    Return what is recomputed, and the bytes that are left for CUDA graphs: 0 if steps run without.

    Called while every rank holds all weights: the bytes that they take now count as usable. All
    ranks recompute as much as the rank with the least memory: they would wait for it anyway. The
    gradients are the same.
    """
    policy, cost = model.policy, model.spec.cost(resolved.config)
    usable = free_bytes(policy.device) + sum(p.nbytes for _, p in policy.named_parameters())
    room = training_room(resolved, model.spec, policy, usable, ranks=world_size())
    fits, graphs = fit_training(resolved, policy, cost, room)
    chosen = max(
        all_gather_object(fits), key=lambda of_rank: (MODES.index(of_rank.mode), of_rank.count)
    )
    return chosen, room - chosen.mean(cost.activations) if graphs else 0.0


def fit_training(
    resolved: ResolvedConfig,
    policy: Policy,
    cost: Cost,
    room: float,
    chosen: CheckpointPlan | None = None,
) -> tuple[CheckpointPlan, float]:
    """Fit activations and CUDA graphs into `room` bytes, for a run and for its plan.

    Return what is recomputed, `chosen` or for `auto` as little as fits, and the most bytes that
    CUDA graphs keep.
    """
    asked = resolved.config.model.gradient_checkpointing
    # a plan's policy is on `meta`
    graphs = graph_bytes(cost, resolved) if policy.device.type != "cpu" else 0.0
    least = cost.activations[MODES[-1] if asked == "auto" else asked]
    # nothing if none fits: recomputing for none would be in vain
    room -= cost.graphs_within(room - least, graphs)
    if chosen or asked != "auto":
        return chosen or CheckpointPlan(asked), graphs
    return fastest_that_fits(cost.activations, room, len(policy.block_list())), graphs


def graph_bytes(cost: Cost, resolved: ResolvedConfig) -> float:
    """Return the most bytes that the graphs of a run keep; 0 if its steps run without.

    They do if weights are gathered and released (ZeRO-3), and if ranks share samples, whose
    exchanges are not recorded.
    """
    config = resolved.config
    alone = not ENGINES[config.train.engine].gathers and config.model.sequence_parallel == 1
    return cost.step + MAX_GRAPHS * cost.context if config.sampling.cuda_graphs and alone else 0.0


def training_room(
    resolved: ResolvedConfig, spec: Spec, policy: Policy, usable: float, *, ranks: int
) -> float:
    """Return the bytes for activations and CUDA graphs, for a run and for its plan.

    It is what is left beside everything else that the engine and the stored rollouts will take on a
    rank.

    Args:
        policy: with whole weights, on any device (including meta).
        usable: bytes of the device for weights and training.
        ranks: number of ranks.
    """
    config = resolved.config
    groups = ranks // config.model.sequence_parallel
    stored = (
        {} if config.sampling.offload_trajectories else stored_rollouts(resolved, spec, groups)[1]
    )
    engine = engine_memory(config.model, config.train, resolved.objective.strategy, policy, ranks)
    taken = engine.total - engine.weights + sum(stored.values())
    return MEMORY_SHARE * (usable - engine.weights) - taken
