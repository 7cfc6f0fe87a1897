"""Memory of a rank: what training, stored rollouts and CUDA graphs take, and the streaming and the
recomputation that make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from sage_fast.algorithm.flops import training_flops
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import Config
from sage_fast.models.checkpointing import MODES, CheckpointPlan, fastest_that_fits
from sage_fast.models.cost import Cost
from sage_fast.models.model import Model
from sage_fast.models.policy import Policy
from sage_fast.models.spec import MAX_GRAPHS, Spec
from sage_fast.models.streaming import StreamSizes, block_sizes, stream_sizes
from sage_fast.models.trainable import meta_policy
from sage_fast.parallel.engine_memory import EngineMemory, engine_memory
from sage_fast.parallel.stored_rollouts import stored_rollouts
from sage_fast.util.cards import Rates, rates_of
from sage_fast.util.environment import format_bytes, free_bytes
from sage_fast.util.errors import UserError
from sage_fast.util.launchers import launched
from sage_fast.util.ranks import all_gather_object, world_size

MEMORY_SHARE = 0.92
"""Share of the free memory that a run may plan with; the rest is for decoding, workspaces and
fragmentation: 10 GiB on an H200 that holds the frozen weights, where 0.85 left 18 GiB idle.

In four iterations, training allocated 93 to 99 % of the plan: in benchmarks/results,
`2026-11-27-h200-iteration.json` and `2026-11-25-h100-full.json`, `-nft` and `-nft-zero3`. All ran
at 0.85; none has run at 0.92. What was reserved, and ranks that hold NCCL's buffers, were not
measured."""


STREAMING_GAIN = 0.9
"""Share of a sample's time, by the plan, below which `auto` streams although training fits without:
the plan's times are estimates, and streamed blocks take host memory and CUDA graphs."""


NEARLY_AS_FAST = 1.02
"""Of counts of blocks whose time by the plan is below this many times the shortest, `auto` takes
the smallest, which takes the least host memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """How training fits on a rank, or what it would take if it does not.

    Attributes:
        streamed: streamed blocks.
        sizes: bytes that follow from them.
        engine: bytes that the engine holds.
        checkpointing: what is recomputed.
        activations: bytes of activations and their gradients.
        graphs: most bytes that CUDA graphs keep.
        room: bytes for activations and CUDA graphs.
    """

    streamed: int
    sizes: StreamSizes
    engine: EngineMemory
    checkpointing: CheckpointPlan
    activations: float
    graphs: float
    room: float

    @property
    def fits(self) -> bool:
        return self.activations <= self.room


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a run has what is not trained.

    Attributes:
        streamed: number of streamed blocks.
        parked: what is on the device only while it is used (`util.parking`).
        copy_rate: bytes a second from host memory, measured.
    """

    streamed: int = 0
    parked: tuple[str, ...] = ()
    copy_rate: float = 0.0


AUTOENCODER, REWARDS = "autoencoder", "rewards"
"""What may be parked, in a run."""


def choose_placement(
    resolved: ResolvedConfig, spec: Spec, device: torch.device, reward_bytes: int
) -> Placement:
    """Resolve `model.stream_blocks`, and choose what leaves the device while training, before the
    model is loaded. Collective.

    All ranks stream as many blocks and park as much as the rank with the least memory.

    Args:
        reward_bytes: what rewards have on the device and could leave.

    Raises:
        UserError: there are not as many blocks, or host memory is too small for them.
    """
    config = resolved.config
    # a CPU has no other memory than that of the host
    if device.type == "cpu" and not config.model.streams:
        return Placement()
    policy = meta_policy(spec, config.model)
    decoder = config.model.element_bytes * spec.cost(config).decoder_weights
    rates = rates_of(device)
    host_memory = free_bytes(torch.device("cpu")) / launched("LOCAL_WORLD_SIZE", 1)
    fitting = Fitting(resolved, spec, policy, world_size())
    fit, parked = fitting.beside(
        {AUTOENCODER: decoder, REWARDS: reward_bytes},
        free_bytes(device) + reward_bytes,
        rates,
        host_memory=host_memory,
    )
    count = max(all_gather_object(fit.streamed))
    parked = max(all_gather_object(parked), key=len)
    sizes = stream_sizes(fitting.blocks, count)
    for problem in all_gather_object(_host_memory_problem(config, count, sizes.host)):
        if problem:
            raise UserError(problem)
    return Placement(streamed=count, parked=tuple(parked), copy_rate=rates.copies)


def _host_memory_problem(config: Config, count: int, needed: int) -> str:
    """Return why the host memory of this node is too small for streamed blocks; empty if it is
    not."""
    ranks = launched("LOCAL_WORLD_SIZE", 1)
    free = free_bytes(torch.device("cpu"))
    if ranks * needed <= free:
        return ""
    nearest = int(count * free / (ranks * needed))
    each = f" for each of the {ranks} ranks of a node" if ranks > 1 else ""
    return (
        f"model.stream_blocks = {config.model.stream_blocks!r}: {count} streamed blocks take "
        f"{format_bytes(needed)} of page-locked host memory{each}, and {format_bytes(free)} are "
        f"free; the nearest is {nearest}: fewer frames need fewer streamed blocks"
    )


def choose_checkpointing(resolved: ResolvedConfig, model: Model) -> tuple[CheckpointPlan, float]:
    """Resolve `model.gradient_checkpointing`. Collective.

    Return what is recomputed, and the bytes that are left for CUDA graphs: 0 if steps run without.

    Called while every rank holds all weights: the bytes that they take now count as usable. All
    ranks recompute as much as the rank with the least memory: they would wait for it anyway. The
    gradients are the same.
    """
    policy, cost = model.policy, model.spec.cost(resolved.config)
    usable = free_bytes(policy.device) + sum(p.nbytes for _, p in policy.named_parameters())
    stream = policy.stream
    if stream is not None:
        usable += stream.sizes.slots + stream.sizes.copies - stream.sizes.leaving
    fitting = Fitting(resolved, model.spec, policy, world_size())
    fit = fitting.streaming(0 if stream is None else stream.count, usable)
    chosen = max(
        all_gather_object(fit.checkpointing),
        key=lambda of_rank: (MODES.index(of_rank.mode), of_rank.count),
    )
    return chosen, fit.room - chosen.mean(cost.activations) if fit.graphs else 0.0


class Fitting:
    """Finds what makes training fit on a rank, for a run and for its plan.

    Args:
        resolved: the settings.
        spec: of the model.
        policy: with whole weights, on any device (including meta).
        ranks: number of ranks.

    Attributes:
        blocks: bytes of each block.
    """

    def __init__(self, resolved: ResolvedConfig, spec: Spec, policy: Policy, ranks: int) -> None:
        config = resolved.config
        self.resolved = resolved
        self.cost = spec.cost(config)
        self.blocks = block_sizes(policy, config.model.element_bytes)
        self._on_cpu = policy.device.type == "cpu"  # a plan's policy is on `meta`
        strategy = resolved.objective.strategy
        self._engine = engine_memory(config.model, config.train, strategy, policy, ranks)
        self._stored = 0.0
        if not config.sampling.offload_trajectories:
            groups = ranks // config.model.sequence_parallel
            _, stored = stored_rollouts(resolved, spec, groups)
            self._stored = sum(stored.values())

    def streaming(self, count: int, usable: float, chosen: CheckpointPlan | None = None) -> Fit:
        """Return how training fits with `count` streamed blocks.

        Args:
            usable: bytes of the device for weights and training.
            chosen: what is recomputed; by default what the settings say, or what fits.
        """
        config, cost = self.resolved.config, self.cost
        sizes = StreamSizes()
        if _can_stream(config):  # gathered weights are not joined with adapters
            sizes = stream_sizes(self.blocks, count)
        engine = self._engine.with_streaming(sizes)
        taken = engine.total - engine.weights + self._stored
        room = MEMORY_SHARE * (usable - engine.weights) - taken

        graphs = 0.0 if self._on_cpu else graph_bytes(cost, self.resolved, count)
        asked = config.model.gradient_checkpointing
        least = cost.activations[MODES[-1] if asked == "auto" else asked]
        # nothing if none fits: recomputing for none would be in vain
        left = room - cost.graphs_within(room - least, graphs)
        if chosen is not None:
            checkpointing = chosen
        elif asked != "auto":
            checkpointing = CheckpointPlan(asked)
        else:
            checkpointing = fastest_that_fits(cost.activations, left, len(self.blocks))
        return Fit(
            streamed=count,
            sizes=sizes,
            engine=engine,
            checkpointing=checkpointing,
            activations=checkpointing.mean(cost.activations),
            graphs=graphs,
            room=room,
        )

    def best(
        self,
        usable: float,
        rates: Rates,
        *,
        host_memory: float = math.inf,
        chosen: CheckpointPlan | None = None,
    ) -> Fit:
        """Choose what is streamed and what is recomputed.

        `auto` streams as many blocks as make a sample fastest: more of them leave room to recompute
        less. Of counts that are nearly as fast (`NEARLY_AS_FAST`) it takes the smallest. It streams
        nothing where training fits without, unless streaming saves more than `STREAMING_GAIN`
        leaves.

        Args:
            usable, chosen: as of `streaming`.
            rates: of the device.
            host_memory: bytes of it for streamed blocks; `auto` takes more only if nothing else
                fits.

        Raises:
            UserError: more blocks are to be streamed than there are.
        """
        fits = [self.streaming(count, usable, chosen) for count in self._counts()]

        def seconds(fit: Fit) -> float:
            return sample_seconds(self.resolved, self.cost, fit, rates)

        fitting = [fit for fit in fits if fit.fits]
        if not fitting:
            return fits[-1]  # which takes the least
        affordable = [fit for fit in fitting if fit.sizes.host <= host_memory] or fitting
        shortest = min(map(seconds, affordable))
        fewest = next(fit for fit in affordable if seconds(fit) <= NEARLY_AS_FAST * shortest)
        without = fitting[0]
        if without.streamed == 0 and seconds(fewest) > STREAMING_GAIN * seconds(without):
            return without
        return fewest

    def beside(
        self,
        others: Mapping[str, float],
        memory: float,
        rates: Rates,
        *,
        host_memory: float = math.inf,
        chosen: CheckpointPlan | None = None,
    ) -> tuple[Fit, list[str]]:
        """Choose as `best` does beside `others` (name -> bytes); return the fit, and which of them
        have to leave the device, the first ones first.

        None leaves unless training would not fit by streaming and recomputation alone. On a CPU
        none does.
        """
        names = [name for name, size in others.items() if size]
        most = 0 if self._on_cpu else len(names)
        for count in range(most + 1):
            staying = sum(others[name] for name in names[count:])
            fit = self.best(memory - staying, rates, host_memory=host_memory, chosen=chosen)
            if fit.fits:
                break
        return fit, names[:count]

    def _counts(self) -> Sequence[int]:
        """Return the numbers of streamed blocks that the settings allow.

        Raises:
            UserError: more than there are.
        """
        config, blocks = self.resolved.config, len(self.blocks)
        asked = config.model.stream_blocks
        if asked == "auto":
            return range(blocks + 1) if _can_stream(config) else [0]
        if asked == "all":
            return [blocks]
        config.model.require(
            asked <= blocks,
            "stream_blocks",
            f"expected at most {blocks}, the blocks of the model; the nearest is all",
        )
        return [asked]


def _can_stream(config: Config) -> bool:
    """Whether the blocks have frozen weights, whole on every rank."""
    return config.model.trains_adapter and not ENGINES[config.train.engine].gathers


def sample_seconds(resolved: ResolvedConfig, cost: Cost, fit: Fit, rates: Rates) -> float:
    """Return the time of a sample's rollout and training, where copies of streamed blocks hide
    behind the computation unless they take longer."""
    config = resolved.config
    sampling = config.sampling
    copy = fit.sizes.forward / rates.copies
    forward = cost.forward / rates.flops
    trained = fit.checkpointing.mean(_training_flops(config, cost)) / rates.flops

    rollout = max(forward, copy / sampling.batch_size)
    # a forward and a backward of the blocks, each of which copies them once
    training = max(forward, copy / config.train.batch_size)
    training += max(trained - forward, copy / config.train.batch_size)
    seconds = sampling.steps * rollout + len(resolved.longest_window) * training
    return sampling.passes * seconds


def _training_flops(config: Config, cost: Cost) -> dict[str, float]:
    """Return mode of recomputation -> FLOPs of a trained step."""
    found = {}
    for mode in MODES:
        found[mode] = training_flops(
            cost.forward,
            cost.attention,
            cost.block_ends,
            checkpointing=mode,
            trains_adapter=config.model.trains_adapter,
        )
    return found


def graph_bytes(cost: Cost, resolved: ResolvedConfig, streamed: int = 0) -> float:
    """Return the most bytes that the graphs of a run keep; 0 if its steps run without.

    They do if weights are gathered and released (ZeRO-3) or blocks are streamed, and if ranks share
    samples, whose exchanges are not recorded.
    """
    config = resolved.config
    stays = not ENGINES[config.train.engine].gathers and streamed == 0
    alone = config.model.sequence_parallel == 1
    if not (config.sampling.cuda_graphs and stays and alone):
        return 0.0
    return cost.step + MAX_GRAPHS * cost.context
