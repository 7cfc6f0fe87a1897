"""Cost of an iteration before it runs: `sage-fast train CONFIG --dry-run`.

The real architecture is built on the meta device (no memory, no weights). The rest are formulas;
the model's own are in its `Spec`. tests/test_plan.py checks each against PyTorch's counts. A
multiply-add is two FLOPs.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.flops import flops
from sage_fast.algorithm.iteration_plan import plan_iteration, share_of
from sage_fast.algorithm.objective import KLStrategy
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.callbacks.load import check_callbacks
from sage_fast.config.engines import ENGINES
from sage_fast.config.rank_checks import check_heads
from sage_fast.config.schema import Config, EvalConfig, ModelConfig, RewardEntry, TrainConfig
from sage_fast.data.prompt_checks import (
    check_captions,
    check_prompt_sets,
    notes_on_prompts,
    shared_prompts,
)
from sage_fast.data.prompts import Prompt, configured_prompts
from sage_fast.models.checkpointing import MODES, CheckpointPlan
from sage_fast.models.find import find_spec
from sage_fast.models.headers import check_weights
from sage_fast.models.load import meta_policy
from sage_fast.models.policy import Policy
from sage_fast.models.registry import default_family
from sage_fast.models.spec import Cost, Spec
from sage_fast.parallel.engine_memory import engine_memory
from sage_fast.parallel.fit import Fit, fit_beside
from sage_fast.parallel.stored_rollouts import stored_rollouts
from sage_fast.rewards.load import check_prompts, dry_run_reward, reward_bytes
from sage_fast.run.messages import config_warnings, method_of
from sage_fast.run.train import check_here
from sage_fast.run_folder import RunFolder
from sage_fast.tools.harness import BURST_FLOPS
from sage_fast.util.captions import PromptKey
from sage_fast.util.cards import planned_rates
from sage_fast.util.console import wrapped
from sage_fast.util.environment import format_bytes
from sage_fast.util.errors import UserError
from sage_fast.util.text import counted
from sage_fast.util.videos import check_encoder

PLANNED_ITERATIONS = 200
"""Iterations over which the plan averages the work of windows."""
MEASURED_FLOPS = {"rollout": 612e12, "decode": 533e12, "anchor": 609e12, "training": 593e12}
"""Part -> FLOP/s of one H200 with FlashAttention 4, at 480p and 81 frames with a LoRA:
`2026-11-27-h200-iteration.json` in benchmarks/results."""


MEASURED_CPU_FLOPS = {
    "rollout": 4.977e10,
    "decode": 1.919e11,
    "anchor": 5.188e10,
    "training": 7.016e10,
}
"""Part -> FLOP/s of two CPU cores (AMD EPYC) with the testbed:
`2026-11-29-cpu-2-cores-iteration.json` in benchmarks/results."""
MOST_CPU_SECONDS = 7 * 86400
"""A run that would take longer on CPU cores is planned for GPUs."""


DURATIONS = (
    ("days", 86400.0),
    ("h", 3600.0),
    ("min", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
    ("us", 1e-6),
)
"""Units of time and their seconds, the largest first."""


@functools.cache
def _published() -> Spec:
    return default_family()()


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
        in_host_memory: bytes of a rank's shards with `train.offload_shards`.
        loaded: bytes of the model's files in `model.dtype`, which the ranks of a node map together
            while they load.
        checkpoint: bytes of a checkpoint's files.
        disk: part -> bytes of the run folder, at most.
        gpu_memory: bytes of a GPU.
        remedies: what takes less memory and is not set yet, as options of the command line.
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


def plan(
    config: Config,
    spec: Spec | None = None,
    *,
    ranks: int = 1,
    gpu_memory: float = 80e9,
    chosen: CheckpointPlan | None = None,
    rewards: Mapping[str, float | None] | None = None,
) -> Plan:
    """Compute sizes, FLOPs and memory of one iteration.

    Args:
        config: validated settings.
        spec: spec of the model; by default the published sizes of the default family.
        ranks: number of GPUs. Samples are spread over them, or over groups of
            `model.sequence_parallel`; `train.engine` decides which weights and optimizer states are
            sharded.
        gpu_memory: bytes of a GPU, for which `auto` chooses.
        chosen: what a run recomputes; by default what fits.
        rewards: setting and name of a reward -> its bytes on each GPU, or None if it does not say.
    """
    spec = spec or _published()
    rewards = rewards or {}
    model, train, sharing = config.model, config.train, config.model.sequence_parallel
    check_heads(sharing, spec.heads)
    policy = _meta_policy(spec, tuple(vars(model).items()))
    resolved = ResolvedConfig(config)
    cost = spec.cost(config)
    latent = spec.latent_shape(config.sampling)
    base = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)
    fit, memory = _memory(
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
        in_host_memory=fit.engine.in_host_memory,
        loaded=float(model.element_bytes * (base + cost.decoder_weights)),
        checkpoint=checkpoint_bytes(model, train, resolved.objective.strategy, policy),
        disk=_disk(config, resolved.objective.strategy, policy),
        gpu_memory=gpu_memory,
        remedies=_remedies(config, checkpointing),
    )


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
) -> tuple[Fit, dict[str, float]]:
    """Return what is streamed and what a backward recomputes, and part -> bytes on each GPU while
    it trains; arguments as of `plan`."""
    config = resolved.config
    model, sharing = config.model, config.model.sequence_parallel
    cost = spec.cost(config)

    # What is there beside the training, and what training then has room for.
    others = {"autoencoder": float(model.element_bytes * cost.decoder_weights)}
    for name, size in rewards.items():
        if size:
            others[name] = size
    fit, parked = fit_beside(
        resolved,
        spec,
        policy,
        gpu_memory,
        others,
        ranks=ranks,
        rates=planned_rates(gpu_memory),
        chosen=chosen,
    )
    for name in parked:
        del others[name]
    graphs = cost.graphs_within(fit.room - fit.activations, fit.graphs)

    _, stored = stored_rollouts(resolved, spec, ranks // sharing)
    if not config.sampling.offload_trajectories:
        others |= stored
    if graphs:
        others["CUDA graphs"] = graphs
    chooses = "auto chooses" if model.gradient_checkpointing == "auto" else "checkpointing"
    of_activations = {f"activations, {chooses} {fit.checkpointing}": fit.activations}
    return fit, fit.engine.by_label() | others | of_activations


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


def format_cpu_plan(plan: Plan, reward: float = 0.0) -> str:
    """Format the plan of a run on this machine's CPU for a terminal; `reward` as in
    `format_plan`."""
    memory = {part: size for part, size in plan.memory.items() if part != "CUDA graphs"}
    iteration = iteration_flops(plan)
    lines = [
        *_format_model(plan),
        "",
        f"one iteration: {plan.samples:,} samples, {plan.trained_steps} trained steps of each",
        _line("", "forwards", "FLOPs", "on 2 cores", width=29),
    ]
    for part, work in iteration.items():
        seconds = _duration(seconds_on_cpu({part: work}))
        forwards = plan.forwards.get(part)
        count = f"{forwards:,}" if forwards else ""
        lines.append(_line(part, count, f"{work:.3g}", seconds, width=29))
    if reward > 0:
        lines.append(_line("rewards, by metrics.jsonl", "", "", _duration(reward), width=29))
    together = sum(iteration.values())
    seconds = _duration(reward + seconds_on_cpu(iteration))
    lines.append(_line("together", "", f"{together:.3g}", seconds, width=29))

    e = plan.evaluations
    whole_run = run_flops(plan)
    run_seconds = plan.iterations * reward + seconds_on_cpu(whole_run)
    evaluation = _duration(seconds_on_cpu(evaluation_flops(plan)))
    not_counted = "" if reward else " Rewards are not counted."
    lines += [
        "",
        f"the run: {plan.iterations:,} iterations, {e.count:,} evaluations of {e.videos:,} videos",
        _line("one evaluation", "", f"{e.flops:.3g}", evaluation, width=29),
        _line(
            "all of the run", "", f"{sum(whole_run.values()):.3g}", _duration(run_seconds), width=29
        ),
        wrapped(
            "'on 2 cores' is at the rates that two quiet cores of an AMD EPYC reached with the "
            "testbed; on busy cores the same run has taken three times as long."
            f"{not_counted} --gpus 1 plans for a GPU.",
            first="  ",
        ),
        "",
        f"memory while it trains, engine {plan.engine}",
        *(_line(part, format_bytes(size)) for part, size in memory.items()),
        _line("together", format_bytes(sum(memory.values()))),
        "  Not counted: Python and PyTorch themselves.",
        "",
        *_format_disk(plan),
    ]
    return "\n".join(text.rstrip() for text in lines)


def format_plan(plan: Plan, price: float = 0.0, reward: float = 0.0) -> str:
    """Format a plan for a terminal, first of all what to do if it does not fit.

    Args:
        price: of an hour of a GPU, in any currency; 0 if unknown.
        reward: seconds that an iteration waits for its rewards; 0 if unknown.
    """
    gpus = counted(plan.ranks, "GPU")
    together = sum(plan.memory.values())
    fits = together <= plan.gpu_memory
    in_host_memory = []
    if plan.in_host_memory:
        size = format_bytes(plan.in_host_memory)
        in_host_memory.append(_line("host memory of each rank, for shards", size))
    lines = []
    if not fits:
        sizes = f"{format_bytes(together)} on GPUs of {format_bytes(plan.gpu_memory)}"
        remedies = ", or ".join(plan.remedies)
        lines.append(wrapped(f"This does not fit: {sizes}. Try {remedies}.", rest=""))
        lines.append("")
    lines += [
        *_format_model(plan),
        "",
        *_format_work(plan, gpus, price, reward),
        "",
        f"memory on each of {gpus} while it trains, engine {plan.engine}",
        *(_line(part, format_bytes(count)) for part, count in plan.memory.items()),
        _line("together", format_bytes(together)),
        f"  {'fits' if fits else 'does not fit'}: {together / 2**30:.2f} of the "
        f"{plan.gpu_memory / 2**30:.2f} GiB of a card of {plan.gpu_memory / 1e9:g} GB",
        wrapped(f"Not counted: {', '.join(plan.uncounted)}.", first="  ", rest="    "),
        *in_host_memory,
        "",
        *_format_disk(plan),
    ]
    return "\n".join(text.rstrip() for text in lines)


def _format_model(plan: Plan) -> list[str]:
    return [
        "model",
        _line("parameters", _count(plan.parameters)),
        _line("trained parameters", _count(plan.trainable)),
        _line("latents C x T x H x W", " x ".join(map(str, plan.latent_shape))),
        _line("tokens of a video", f"{plan.tokens:,}"),
    ]


def _format_disk(plan: Plan) -> list[str]:
    return [
        "start and disk",
        _line("host memory of a node while it loads", format_bytes(plan.loaded)),
        _line("a checkpoint, to which each rank writes", format_bytes(plan.checkpoint)),
        *(_line(part, format_bytes(count)) for part, count in plan.disk.items()),
        _line("disk, without videos and embeddings", format_bytes(sum(plan.disk.values()))),
    ]


def _line(label: str, *cells: str, width: int = 41) -> str:
    return f"  {label:<{width}}{''.join(f'{cell:>12}' for cell in cells)}"


def _format_work(plan: Plan, gpus: str, price: float, reward: float) -> list[str]:
    """Format FLOPs, times and GPU-hours of an iteration and of the run."""

    def work(
        label: str, count: int, flops: float, of_busiest: Mapping[str, float], waited: float = 0.0
    ) -> str:
        times = (_duration(waited + seconds) for seconds in seconds_on_a_gpu(of_busiest))
        return _line(label, f"{count:,}" if count else "", f"{flops:.3g}", *times, width=29)

    forward = plan.flops["forward"]
    parts = {part: flops for part, flops in plan.flops.items() if part != "forward"}
    together = sum(parts.values())
    e = plan.evaluations

    # FLOPs of the GPU with the most work
    longest = iteration_flops(plan)
    evaluation = evaluation_flops(plan)
    whole_run = run_flops(plan)

    waited = plan.iterations * reward
    hours = [plan.ranks * (waited + seconds) / 3600 for seconds in seconds_on_a_gpu(whole_run)]
    rates = ", ".join(f"{part} {rate / 1e12:.0f}" for part, rate in MEASURED_FLOPS.items())
    not_counted = "Communication is" if reward else "Rewards and communication are"

    lines = [
        f"one iteration on {gpus}: {counted(plan.samples, 'sample')}, "
        f"{counted(plan.trained_steps, 'trained step')} of each",
        _line("", "forwards", "FLOPs", "at least", "on H200s", width=29),
        work("one forward of one sample", 0, forward, {"rollout": forward}),
    ]
    for part, total in parts.items():
        lines.append(work(part, plan.forwards.get(part, 0), total, {part: longest[part]}))
    if reward > 0:
        seconds = _duration(reward)
        lines.append(_line("rewards, by metrics.jsonl", "", "", seconds, seconds, width=29))
    lines += [
        work("together", sum(plan.forwards.values()), together, longest, reward),
        "",
        f"the run: {counted(plan.iterations, 'iteration')}, {counted(e.count, 'evaluation')} of "
        f"{counted(e.videos, 'video')}",
        work("one evaluation", 0, e.flops, evaluation),
        work(
            "all of the run", 0, plan.iterations * together + e.count * e.flops, whole_run, waited
        ),
        _line("GPU-hours", "", "", *(_number(h) for h in hours), width=29),
    ]
    if price > 0:
        prices = [_number(price * h) for h in hours]
        lines.append(_line(f"at {price:g} an hour", "", "", *prices, width=29))
    lines.append(
        wrapped(
            f"'at least' is a lower bound: every FLOP at {BURST_FLOPS / 1e12:.0f} TFLOP/s (a "
            f"matrix product in bf16, a burst on one H200), with {plan.prompt_tokens} tokens a "
            "prompt. 'on H200s' is at the TFLOP/s that one H200 reached by FlashAttention 4 "
            f"with 480p videos of 81 frames: {rates}; several GPUs also wait for each other. "
            "Training holds the backward and the recomputation with checkpointing. The anchor is "
            "free in the iteration after its refresh. Times are those of the GPU with the most "
            f"work. {not_counted} not counted.",
            first="  ",
        )
    )
    return lines


def seconds_on_a_gpu(flops: Mapping[str, float]) -> tuple[float, float]:
    """Return the times of the parts' FLOPs on one GPU: the lower bound, and at measured rates."""
    least = sum(flops.values()) / BURST_FLOPS
    measured = sum(work / MEASURED_FLOPS[part] for part, work in flops.items())
    return least, measured


def _count(count: int) -> str:
    """Return a count with its short form, such as `8.33 B = 8,326,608,160`."""
    if count >= 1e9:
        unit, scale = "B", 1e9
    elif count >= 1e6:
        unit, scale = "M", 1e6
    else:
        unit, scale = "k", 1e3
    return f"{count / scale:.3g} {unit} = {count:,}"


def _duration(seconds: float) -> str:
    for unit, scale in DURATIONS:
        least = 2 * scale if scale > 1 else scale  # 90 s rather than 1.5 min
        if seconds >= least:
            return f"{_number(seconds / scale)} {unit}"
    smallest, scale = DURATIONS[-1]
    return f"{_number(seconds / scale)} {smallest}"


def _number(value: float) -> str:
    """Return three digits, and all of a number from 1000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


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
    return plan(config, spec, ranks=ranks, gpu_memory=gpu_memory, rewards=sizes)


def dry_run(
    config: Config,
    ranks: int,
    gpu_memory: float,
    price: float = 0.0,
    *,
    resume: bool = False,
    may_be_cpu: bool = False,
) -> str:
    """Return the method of a run, what it trains on, and its plan on `ranks` ranks, as text. Loads
    no weights.

    The first line says why the run would not start on this machine, if it would not: a plan may be
        for another one.

    If a run is in the output folder, what its iterations waited for rewards enters the times.

    Args:
        may_be_cpu: plan for CPU cores if this machine has no GPU and the run is small enough.

    Raises:
        UserError: the settings are impossible, `model.path` is not a checkpoint, prompts, a reward
            or a callback are missing or are none, or ffmpeg cannot write videos.
    """
    check_encoder()
    obstacle = ""
    try:
        check_here(config, resume=resume)
    except UserError as error:
        obstacle = wrapped(f"This run does not start here: {error}") + "\n\n"
    spec = find_spec(config.model.path)
    check_weights(spec)
    resolved = check_trainable(config, ranks)
    check_distilled(spec.distillation, resolved.objective)
    check_callbacks(config)
    train, heldout = configured_prompts(config.data)
    check_prompt_sets(config.data, config.model.path, spec, train, heldout)
    check_captions([*train, *heldout], spec)
    warnings = config_warnings(resolved, spec.distillation)
    data = _format_data(config, train, heldout, warnings)  # before the plan, which takes a second
    waits = []  # of the iterations of a run that is there
    for row in RunFolder(config.output).rows:
        if isinstance(row.get("time/reward"), float):
            waits.append(row["time/reward"])
    planned = plan_of_run(config, spec, ranks=ranks, gpu_memory=gpu_memory)
    reward = statistics.median(waits) if waits else 0.0
    is_small = seconds_on_cpu(run_flops(planned)) <= MOST_CPU_SECONDS
    if may_be_cpu and is_small and not torch.cuda.is_available():
        costs = format_cpu_plan(planned, reward)
    else:
        costs = format_plan(planned, price, reward)
    method = wrapped(method_of(resolved.objective, config.sampling))
    return f"{obstacle}{method}\n\n{data}\n\n{costs}"


def reward_sizes(rewards: Mapping[str, RewardEntry]) -> dict[str, float | None]:
    """Return name -> bytes on a rank's GPU, or None if the reward does not say, of the rewards with
    these settings."""
    return {f"reward {entry.name}": reward_bytes(entry, key) for key, entry in rewards.items()}


def _format_data(
    config: Config, train: Sequence[Prompt], heldout: Sequence[Prompt], warnings: Sequence[str]
) -> str:
    """Format the prompts, the rewards, and the warnings about the settings."""
    lines = ["prompts and rewards"]
    notes: list[str] = []
    lines.append(f"  {config.data.prompts}: {counted(len(train), 'prompt')}{_keys_of(train)}")
    evaluated = min(config.eval.num_prompts, len(heldout))
    heldout_count = counted(len(heldout), "held-out prompt")
    held = f"{heldout_count}{_keys_of(heldout)}, of which {evaluated} are evaluated"
    lines.append(f"  {config.data.eval_prompts}: {held}")
    for key, entry in config.named_rewards.items():
        weights = " + ".join(f"{weight:g} {part}" for part, weight in entry.weights.items())
        lines.append(f"  {key.removesuffix('.name')} {entry.name}: {weights or 'only observes'}")
        notes += dry_run_reward(entry, key)
        scored = heldout if key == "eval.judge" else [*train, *heldout]
        check_prompts(entry, key, {prompt.key: prompt.metadata for prompt in scored})
    notes += [f"note: {note}" for note in notes_on_prompts(train, heldout)]
    shared = shared_prompts(train, heldout)
    if shared:
        notes.append(f"note: {shared}")
    notes += [f"warning: {warning}" for warning in warnings]
    for note in notes:
        lines.append(wrapped(note, first="  ", rest="    "))
    return "\n".join(lines)


def _keys_of(prompts: Sequence[Prompt]) -> str:
    keys = sorted({key for prompt in prompts for key in prompt.metadata})
    images = ", each with an image" if any(prompt.image for prompt in prompts) else ""
    return f"{images} (metadata: {', '.join(keys)})" if keys else images
