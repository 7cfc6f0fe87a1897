"""Cost of an iteration before it runs: `sage-fast train CONFIG --dry-run`.

The real architecture is built on the meta device (no memory, no weights), where activations are
counted too (models/cost.py). The rest are formulas. tests/test_plan.py checks each against
PyTorch's counts. A multiply-add is two FLOPs.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sage_fast.algorithm.flops import flops
from sage_fast.algorithm.iteration_plan import assign_groups, plan_iteration, share_of
from sage_fast.algorithm.objective import KLStrategy
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.engines import ENGINES
from sage_fast.config.loader import leaves, replaced
from sage_fast.config.rank_checks import check_heads
from sage_fast.config.schema import Config, EvalConfig, ModelConfig, RewardEntry, TrainConfig
from sage_fast.data.prompts import configured_prompts
from sage_fast.models.checkpointing import MODES, CheckpointPlan
from sage_fast.models.cost import Cost
from sage_fast.models.find import find_spec
from sage_fast.models.policy import Policy
from sage_fast.models.spec import Spec
from sage_fast.models.trainable import meta_policy
from sage_fast.parallel.engine_memory import engine_memory
from sage_fast.parallel.fit import Fit, Fitting
from sage_fast.parallel.stored_rollouts import stored_rollouts
from sage_fast.rewards.comparing import comparing_keys
from sage_fast.rewards.load import reward_bytes
from sage_fast.tools.harness import BURST_FLOPS
from sage_fast.util.captions import PromptKey
from sage_fast.util.cards import COPY_RATE, MEASURED_CARD, Card, card_of, planned_rates
from sage_fast.util.errors import UserError

PLANNED_ITERATIONS = 200
"""Iterations over which the plan averages the work of windows."""
MEASURED_FLOPS = {"rollout": 612e12, "decode": 533e12, "anchor": 609e12, "training": 593e12}
"""Part -> FLOP/s of one H200 with FlashAttention 4, at 480p and 81 frames with a LoRA:
`2026-11-27-h200-iteration.json` in benchmarks/results."""


MEASURED_CPU_FLOPS = {
    "rollout": 6.250e10,
    "decode": 2.148e11,
    "anchor": 6.484e10,
    "training": 8.197e10,
}
"""Part -> FLOP/s of two CPU cores (AMD EPYC) with the testbed:
`2026-11-29-cpu-2-cores-iteration.json` in benchmarks/results."""
MOST_CPU_SECONDS = 7 * 86400
"""A run that would take longer on CPU cores is planned for GPUs."""


_spec_of = functools.cache(find_spec)


@functools.lru_cache(maxsize=4)  # a study and a grid plan many runs of a model
def _meta_policy(spec: Spec, settings: tuple[tuple[str, Any], ...]) -> Policy:
    return meta_policy(spec, ModelConfig(**dict(settings)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluations:
    """The evaluations of a run: how many, the videos and FLOPs of each over all ranks, and
    `busiest` as in `Plan`.

    `flops` include those of `decode`.
    """

    count: int
    videos: int
    flops: float
    decode: float
    busiest: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathering:
    """What it takes to bring the videos of each group to one rank, where rewards compare them.

    Attributes:
        rewards: names of the rewards.
        groups: groups of an iteration.
        sent: bytes of videos that the ranks send each other in an iteration.
        in_host_memory: bytes of videos on the rank with the most, with a copy of the group that is
            being scored.
    """

    rewards: list[str]
    groups: int
    sent: float
    in_host_memory: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers that `format_plan` prints.

    Attributes:
        parameters: parameters of the model without its adapter.
        trainable: trained parameters, of the model or of the adapter.
        latent_shape: (C, T, H, W).
        tokens: tokens of one video.
        prompt_tokens: assumed tokens of a prompt, text and image.
        ranks: GPUs that share the iteration.
        iterations: iterations of the run.
        samples: trained samples per iteration, over all ranks.
        trained_steps: trained transitions per sample; in the longest window, if windows differ.
        forwards: part -> single-sample forwards per iteration, over all ranks; guidance counts
            twice. Without the decode.
        busiest: part -> fraction of its FLOPs that the GPU with the most has.
        flops: part -> FLOPs per iteration, over all ranks; `forward` is one forward of one sample.
        evaluations: those of the run.
        memory: part -> bytes on each GPU while it trains.
        uncounted: what also takes memory on a GPU, in words.
        engine: `train.engine`.
        in_host_memory: bytes of a rank's host memory: shards with `train.offload_shards`, streamed
            blocks, and what is parked.
        loaded: bytes of the model's files in `model.dtype`, which the ranks of a node map together
            while they load.
        checkpoint: bytes of a checkpoint's files.
        disk: part -> bytes of the run folder, at most.
        gpu_memory: bytes of a GPU.
        remedies: what takes less memory and is not set yet, as options of the command line.
        blocks: blocks of the model.
        checkpointing: what a backward recomputes.
        streamed: blocks whose frozen weights are in host memory.
        copies: part -> bytes of streamed blocks that an iteration copies to the GPU with the most
            work.
        parked: what is on a GPU only while it is used.
        gathering: of videos that rewards compare; None if none does.
    """

    parameters: int
    trainable: int
    latent_shape: tuple[int, int, int, int]
    tokens: int
    prompt_tokens: int
    ranks: int
    iterations: int
    samples: int
    trained_steps: int
    forwards: dict[str, int]
    busiest: dict[str, float]
    flops: dict[str, float]
    evaluations: Evaluations
    memory: dict[str, float]
    uncounted: list[str]
    engine: str
    in_host_memory: float
    loaded: float
    checkpoint: float
    disk: dict[str, float]
    gpu_memory: float
    remedies: list[str]
    blocks: int
    checkpointing: CheckpointPlan
    streamed: int
    copies: dict[str, float]
    parked: list[str]
    gathering: Gathering | None

    @property
    def together(self) -> float:
        """Bytes on each GPU while it trains."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.together <= self.gpu_memory

    @property
    def card(self) -> Card:
        """The card that is assumed."""
        return card_of(self.gpu_memory)


def plan(
    config: Config,
    spec: Spec | None = None,
    *,
    ranks: int = 1,
    gpu_memory: float = 80e9,
    chosen: CheckpointPlan | None = None,
    rewards: Mapping[str, float | None] | None = None,
    comparing: Sequence[str] = (),
) -> Plan:
    """Compute sizes, FLOPs and memory of one iteration.

    Args:
        config: validated settings.
        spec: spec of the model; by default that of `config.model.path`, from what is here.
        ranks: number of GPUs. Samples are spread over them, or over groups of
            `model.sequence_parallel`; `train.engine` decides which weights and optimizer states are
            sharded.
        gpu_memory: bytes of a GPU, for which `auto` chooses.
        chosen: what a run recomputes; by default what fits.
        rewards: setting and name of a reward -> its bytes on each GPU, or None if it does not say.
        comparing: names of the rewards that compare the videos of a group.
    """
    spec = spec or _spec_of(config.model.path)
    rewards = rewards or {}
    model, train, sharing = config.model, config.train, config.model.sequence_parallel
    check_heads(sharing, spec.heads)
    policy = _meta_policy(spec, tuple(vars(model).items()))
    resolved = ResolvedConfig(config)
    cost = spec.cost(config)
    latent = spec.latent_shape(config.sampling)
    base = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)
    fit, memory, parked = _memory(
        resolved, spec, policy, ranks=ranks, gpu_memory=gpu_memory, chosen=chosen, rewards=rewards
    )
    checkpointing = fit.checkpointing
    forwards, busiest_rollout = _forwards(resolved, ranks // sharing)
    work = flops(
        cost,
        forwards,
        train.samples,
        checkpointing=checkpointing,
        trains_adapter=model.trains_adapter,
    )
    local_samples, _ = stored_rollouts(resolved, spec, ranks // sharing)
    busiest = dict.fromkeys(work, local_samples / train.samples / sharing)
    busiest["rollout"] = busiest_rollout / sharing
    return Plan(
        parameters=base,
        trainable=sum(p.numel() for p in policy.parameters().values()),
        latent_shape=latent,
        tokens=spec.tokens(latent),
        prompt_tokens=spec.prompt_tokens,
        ranks=ranks,
        iterations=train.iterations,
        samples=train.samples,
        trained_steps=len(resolved.longest_window),
        forwards=forwards,
        busiest=busiest,
        flops={"forward": cost.forward, **work},
        evaluations=_evaluations(
            config.eval, config.eval_guidance_scale, train.iterations, cost, ranks, sharing
        ),
        memory=memory,
        uncounted=[*(name for name, size in rewards.items() if size is None), "fragmentation"],
        engine=train.engine,
        in_host_memory=fit.engine.in_host_memory + sum(parked.values()),
        loaded=float(model.element_bytes * (base + cost.decoder_weights)),
        checkpoint=checkpoint_bytes(model, train, resolved.objective.strategy, policy),
        disk=_disk(config, resolved.objective.strategy, policy),
        gpu_memory=gpu_memory,
        remedies=_remedies(config, checkpointing),
        blocks=len(policy.block_list()),
        checkpointing=checkpointing,
        streamed=fit.streamed,
        copies=_copies(config, forwards, busiest, fit.sizes.forward),
        parked=[*parked],
        gathering=_gathering(resolved, comparing, ranks),
    )


def _copies(
    config: Config, forwards: Mapping[str, int], busiest: Mapping[str, float], size: int
) -> dict[str, float]:
    """Return part -> bytes of streamed blocks that an iteration copies to the GPU with the most
    work.

    Args:
        size: bytes that a forward copies.
    """
    together = {"rollout": config.sampling.batch_size}  # samples of a forward
    found = {}
    for part, count in forwards.items():
        passes = 2 if part == "training" else 1  # a backward reads the weights again
        batch = together.get(part, config.train.batch_size)
        found[part] = passes * count * busiest[part] * size / batch
    return found


def _remedies(config: Config, checkpointing: CheckpointPlan) -> list[str]:
    """Return what takes less memory than these settings, the least costly first."""
    model, train = config.model, config.train
    found = []
    recomputes_all = checkpointing.mode == MODES[-1] and checkpointing.count == checkpointing.blocks
    if not recomputes_all:
        found.append("--model.gradient_checkpointing full")
    if train.batch_size > 1:
        found.append("--train.batch_size 1")
    if not model.trains_adapter:
        found.append("--model.tuning lora")
    if "weights" not in ENGINES[train.engine].shards:
        found.append("--train.engine zero3 on more GPUs")
    if not train.offload_shards:
        found.append("--train.engine zero3 --train.offload_shards true (weights in host memory)")
    return [*found, "fewer frames or a smaller size"]


def _memory(
    resolved: ResolvedConfig,
    spec: Spec,
    policy: Policy,
    *,
    ranks: int,
    gpu_memory: float,
    chosen: CheckpointPlan | None,
    rewards: Mapping[str, float | None],
) -> tuple[Fit, dict[str, float], dict[str, float]]:
    """Return what is streamed and what a backward recomputes, part -> bytes on each GPU while it
    trains, and part -> bytes of what is parked; arguments as of `plan`."""
    config = resolved.config
    model, sharing = config.model, config.model.sequence_parallel
    cost = spec.cost(config)

    # What is there beside the training, and what training then has room for.
    others = {"autoencoder": float(model.element_bytes * cost.decoder_weights)}
    for name, size in rewards.items():
        if size:
            others[name] = size
    fitting = Fitting(resolved, spec, policy, ranks)
    fit, leaving = fitting.beside(others, gpu_memory, planned_rates(gpu_memory), chosen=chosen)
    parked = {name: others.pop(name) for name in leaving}
    graphs = cost.graphs_within(fit.room - fit.activations, fit.graphs)

    _, stored = stored_rollouts(resolved, spec, ranks // sharing)
    if not config.sampling.offload_trajectories:
        others |= stored
    if graphs:
        others["CUDA graphs"] = graphs
    chooses = "auto chooses" if model.gradient_checkpointing == "auto" else "checkpointing"
    of_activations = {f"activations, {chooses} {fit.checkpointing}": fit.activations}
    return fit, fit.engine.by_label() | others | of_activations, parked


def _disk(config: Config, strategy: KLStrategy, policy: Policy) -> dict[str, float]:
    """Return part -> bytes of the run folder, at most."""
    train = config.train
    count = train.keep_checkpoints + 1  # with the one that is being written
    label = f"checkpoints: {train.keep_checkpoints}, and one being written"
    if train.keep_best:
        count += 1
        label = f"checkpoints: {train.keep_checkpoints}, the best, and one being written"
    return {
        label: count * checkpoint_bytes(config.model, train, strategy, policy),
        "weights: final": _exported_bytes(config.model, policy),
    }


def _forwards(resolved: ResolvedConfig, ranks: int) -> tuple[dict[str, int], float]:
    """Return part -> forwards of an iteration, and the share of the rollout's that the rank with
    the most has.

    Both are means over the first iterations, with prompts of one length and an anchor that is never
    free.
    """
    config = resolved.config
    count = 1  # all iterations have equal work, unless their windows differ
    if config.sampling.sde_window:
        count = min(PLANNED_ITERATIONS, config.train.iterations)
    plans = [
        plan_iteration(resolved, [PromptKey("")], lambda prompt: 1, index, ranks=ranks)
        for index in range(count)
    ]
    counts = [each.forwards() for each in plans]
    means = {part: round(statistics.fmean(of[part] for of in counts)) for part in counts[0]}

    longest = 0  # forwards of the busiest rank, over all iterations
    for each in plans:
        longest += config.sampling.passes * max(each.rollouts.count(share) for share in each.shares)
    total = sum(of["rollout"] for of in counts)
    return means, longest / total


def _gathering(resolved: ResolvedConfig, rewards: Sequence[str], ranks: int) -> Gathering | None:
    """Count the videos of the first iteration that rewards compare."""
    if not rewards:
        return None
    config = resolved.config
    size, sharing = config.train.group_size, config.model.sequence_parallel
    planned = plan_iteration(resolved, [PromptKey("")], lambda prompt: 1, 0, ranks=ranks // sharing)
    rank_of = {}
    for data_rank, share in enumerate(planned.shares):
        for row, number in enumerate(share):
            # the ranks of a sequence group decode chunks in turn
            turn = row // config.sampling.batch_size % sharing
            rank_of[number] = data_rank * sharing + turn

    holders = []
    for first in range(0, config.train.samples, size):
        holders.append([rank_of[number] for number in range(first, first + size)])
    targets = assign_groups(holders)
    sent = sum(size - of_group.count(target) for of_group, target in zip(holders, targets))
    held, compared = Counter(rank_of.values()), Counter(targets)
    most = max(max(held[rank], size * compared[rank]) for rank in held)

    sampling = config.sampling
    video = 3.0 * sampling.num_frames * sampling.height * sampling.width
    return Gathering(
        rewards=list(rewards),
        groups=len(targets),
        sent=sent * video,
        in_host_memory=(most + size) * video,
    )


def _evaluations(
    settings: EvalConfig, guidance: float, iterations: int, cost: Cost, ranks: int, sharing: int
) -> Evaluations:
    """Count the evaluations: before and after training, and every `eval.interval` iterations in
    between."""
    videos = settings.num_prompts * settings.seeds_per_prompt
    passes = 1 if guidance == 1 else 2
    return Evaluations(
        count=2 + (iterations - 1) // (settings.interval or iterations),
        videos=videos,
        flops=videos * (settings.steps * passes * cost.forward + cost.decode),
        decode=videos * cost.decode,
        busiest=len(share_of(videos, ranks // sharing, 0)) / videos / sharing,
    )


def checkpoint_bytes(
    model: ModelConfig, train: TrainConfig, strategy: KLStrategy, policy: Policy
) -> float:
    """Return the bytes of a checkpoint: float32 tensors, whole and the same for every engine and
    number of ranks.

    The trained weights are in it twice, once as sampling and export read them.
    """
    train = dataclasses.replace(train, engine="plain")
    held = engine_memory(model, train, strategy, policy)
    state = held.trained_weights + held.anchor_and_averages + held.optimizer_state
    return state + _exported_bytes(model, policy)


def _exported_bytes(model: ModelConfig, policy: Policy) -> float:
    """Return the bytes of the weights that sampling and export read; after full tuning, frozen ones
    are among them."""
    exported = policy.parameters() if model.trains_adapter else dict(policy.named_parameters())
    return 4.0 * sum(p.numel() for p in exported.values())


def iteration_flops(plan: Plan) -> dict[str, float]:
    """Return part -> FLOPs of an iteration on the GPU with the most of them."""
    parts = [part for part in plan.flops if part != "forward"]
    return {part: plan.flops[part] * plan.busiest[part] for part in parts}


def run_flops(plan: Plan) -> dict[str, float]:
    """Return part -> FLOPs of the whole run, with its evaluations, on the GPU with the most."""
    evaluation = evaluation_flops(plan)
    count = plan.evaluations.count
    whole_run = {}
    for part, of_iteration in iteration_flops(plan).items():
        whole_run[part] = plan.iterations * of_iteration + count * evaluation.get(part, 0)
    return whole_run


def evaluation_flops(plan: Plan) -> dict[str, float]:
    """Return part -> FLOPs of an evaluation on the GPU with the most of them."""
    e = plan.evaluations
    return {"rollout": e.busiest * (e.flops - e.decode), "decode": e.busiest * e.decode}


def seconds_on_cpu(flops: Mapping[str, float]) -> float:
    """Return the time of the parts' FLOPs on two CPU cores, at measured rates."""
    return sum(work / MEASURED_CPU_FLOPS[part] for part, work in flops.items())


def run_copies(plan: Plan) -> dict[str, float]:
    """Return part -> bytes of streamed blocks that the whole run copies, without its
    evaluations."""
    return {part: plan.iterations * size for part, size in plan.copies.items()}


def seconds_on_a_gpu(
    flops: Mapping[str, float],
    copies: Mapping[str, float] | None = None,
    card: Card = MEASURED_CARD,
) -> tuple[float, float]:
    """Return the times of the parts' FLOPs on one GPU: the lower bound, and at measured rates.

    Another card than the measured one is taken at its data sheet for the bound, and at the shares
    of it that the measured one reached.

    Args:
        copies: part -> bytes of streamed blocks, which hide behind the FLOPs unless they take
            longer.
    """
    burst = BURST_FLOPS if card.flops == MEASURED_CARD.flops else card.flops
    least, measured = 0.0, 0.0
    for part, work in flops.items():
        copying = (copies or {}).get(part, 0.0) / COPY_RATE
        least += max(work / burst, copying)
        rate = MEASURED_FLOPS[part] * card.flops / MEASURED_CARD.flops
        measured += max(work / rate, copying)
    return least, measured


CHANGES: tuple[dict[str, Any], ...] = (
    {"train.batch_size": 1},
    {"model.gradient_checkpointing": "auto"},
    {"train.engine": "plain", "train.offload_shards": False, "train.hybrid_shard": False},
    {"model.stream_blocks": "auto"},
    {"sampling.offload_trajectories": True},
    {"model.tuning": "lora", "train.optimizer": "adamw"},
    {"model.lora_rank": 16},
    {"sampling.num_frames": 49},
    {"sampling.num_frames": 33},
    {"sampling.num_frames": 17},
)
"""Changes of the settings that take less memory on one GPU, the least costly first."""


def changes_that_fit(config: Config, spec: Spec, gpu_memory: float) -> dict[str, Any] | None:
    """Return the changes of the settings, of `CHANGES`, that make a run fit on one GPU, as few as
    do; None if all of them together do not."""
    made: list[dict[str, Any]] = []
    for change in CHANGES:
        if "sampling.num_frames" in change:
            if change["sampling.num_frames"] >= config.sampling.num_frames:
                continue
            made = [other for other in made if "sampling.num_frames" not in other]
        made.append(change)
        if _fits_with(config, spec, gpu_memory, made):
            break
    else:
        return None
    for change in list(made):
        others = [other for other in made if other is not change]
        if _fits_with(config, spec, gpu_memory, others):
            made = others

    present = leaves(dataclasses.asdict(config))
    joined: dict[str, Any] = {}
    for change in made:
        joined |= {key: value for key, value in change.items() if present[key] != value}
    return joined


def _fits_with(
    config: Config, spec: Spec, gpu_memory: float, changes: Sequence[Mapping[str, Any]]
) -> bool:
    joined: dict[str, Any] = {}
    for change in changes:
        joined |= change
    try:
        changed = replaced(config, joined)
        return plan_of_run(changed, spec, ranks=1, gpu_memory=gpu_memory).fits
    except UserError:
        return False


def plan_of_run(config: Config, spec: Spec, *, ranks: int, gpu_memory: float) -> Plan:
    """Return the plan of a run with its rewards, and with as many prompts in an evaluation as there
    are.

    Raises:
        UserError: prompts or a reward are missing.
    """
    _, heldout = configured_prompts(config.data)
    evaluated = min(config.eval.num_prompts, len(heldout))
    config = dataclasses.replace(
        config, eval=dataclasses.replace(config.eval, num_prompts=evaluated)
    )
    sizes = reward_sizes(config.named_rewards)
    entries = config.reward.keyed_entries
    comparing = [entries[key].name for key in comparing_keys(config.reward)]
    return plan(
        config, spec, ranks=ranks, gpu_memory=gpu_memory, rewards=sizes, comparing=comparing
    )


def reward_sizes(rewards: Mapping[str, RewardEntry]) -> dict[str, float | None]:
    """Return name -> bytes on a rank's GPU, or None if the reward does not say, of the rewards with
    these settings."""
    return {f"reward {entry.name}": reward_bytes(entry, key) for key, entry in rewards.items()}
