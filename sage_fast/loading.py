"""Loading that all commands share: prompts, rewards and the model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.iteration_plan import share_of
from sage_fast.algorithm.resolved import Resolved
from sage_fast.config.rank_checks import check_sequence_parallel
from sage_fast.config.schema import (
    AttentionBackend,
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from sage_fast.data.embeddings import cache_key, encode_cached
from sage_fast.data.prompts import FORMATS, SETS, Prompt, captions_of, metadata_of, negatives_of, read_prompts
from sage_fast.models.checkpointing import MODES, CheckpointPlan, fastest_that_fits
from sage_fast.models.interface import Condition
from sage_fast.models.load import find_spec, load_model
from sage_fast.models.model import Model
from sage_fast.models.policy import Policy
from sage_fast.models.random_weights import is_random
from sage_fast.models.spec import Cost, Spec
from sage_fast.parallel.engine_memory import engine_memory
from sage_fast.rewards import CompositeReward, Judge
from sage_fast.rewards.interface import Metadata
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.recorder import graph_bytes, step_graphs
from sage_fast.util.captions import Caption, prompt_key, split_key
from sage_fast.util.environment import format_bytes, free_bytes
from sage_fast.util.errors import UserError
from sage_fast.util.images import read_image
from sage_fast.util.metrics import JUDGE_PART
from sage_fast.util.ranks import (
    all_gather_object,
    data_size,
    fail_together,
    initialize,
    join_sequence_group,
    local_device,
    rank,
    world_size,
)


@dataclasses.dataclass(kw_only=True)
class Setup:
    """Everything a command needs before it samples or trains; `encode` fills `embeddings`.

    Attributes:
        judge: reward that evaluations alone use.
        graphs: CUDA graphs of the model's steps, for training and evaluation; None if they run without.
        prompts, eval_prompts: keys (`Prompt.key`).
        captions: key -> what to encode, for these, the empty and the negative prompts.
        negatives: key -> negative prompt, where it is not empty.
        eval_seeds: index in `eval_prompts` -> seed, for prompts with a seed of their own.
    """

    resolved: Resolved
    model: Model
    reward: CompositeReward
    prompts: list[str]
    eval_prompts: list[str]
    judge: Judge | None = None
    graphs: StepGraphs | None = None
    captions: dict[str, Caption] = dataclasses.field(default_factory=dict)
    negatives: dict[str, str] = dataclasses.field(default_factory=dict)
    eval_seeds: dict[int, int] = dataclasses.field(default_factory=dict)
    embeddings: dict[Any, Condition] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.resolved.config

    def encode(self, cache: Path | None = None) -> None:
        """Embed all prompts, each on one rank; see `encode_cached`. Collective.

        Args:
            cache: the folder to use unless `data.embedding_cache` is set; None keeps nothing on disk.
        """
        configured = self.config.data.embedding_cache
        folder = Path(configured) if configured else cache
        spec, sampling = self.model.spec, self.config.sampling
        found = encode_cached(
            self.captions,
            lambda: self.model.load_encoder(sampling),
            folder,
            cache_key(spec, self.config.model.dtype, folder, sampling),
            spec.condition,
        )
        self.embeddings = {
            key: dataclasses.replace(
                embedding, negative=prompt_key(self.negatives.get(key, ""), image=split_key(key)[1])
            )
            for key, embedding in found.items()
        }


def load_setup(
    config: Config | Resolved,
    prompts: Sequence[Prompt | str] | None = None,
    attention: AttentionBackend | None = None,
    *,
    rewards: bool = True,
) -> Setup:
    """Load prompts, rewards and the model, in this order: errors that are cheap to find come first.

    Each reward scores a dummy video before the model is loaded.

    Args:
        config: the settings; those of a run are resolved already, and its ranks have joined.
        prompts: replace the configured prompt files, for training and evaluation.
        attention: replaces `model.attention`.
        rewards: False for commands that only sample; `Setup.reward` is then empty.

    Raises:
        UserError: something that the settings name is missing or does not fit.
    """
    if isinstance(config, Config):
        initialize(config.timeout_minutes)
        check_sequence_parallel(config.model.sequence_parallel, world_size())
        resolved = Resolved.of(config)
    else:
        resolved, config = config, config.config
    spec = find_spec(config.model.path, fetch=True)
    check_distilled(spec.distillation, resolved.objective)
    if prompts is None:
        train_prompts, eval_prompts = configured_prompts(config.data)
        check_prompt_sets(config.data, config.model.path, spec, train_prompts, eval_prompts)
    else:
        given = (p if isinstance(p, Prompt) else Prompt(text=p, where=f"prompt {p!r}") for p in prompts)
        train_prompts = eval_prompts = [*given]
    negatives = negatives_of([*train_prompts, *eval_prompts])
    check_captions([*train_prompts, *eval_prompts], spec)
    reward, judge = CompositeReward([], config.reward), None
    if rewards:
        keys, eval_keys = ([prompt.key for prompt in group] for group in (train_prompts, eval_prompts))
        metadata = metadata_of([*train_prompts, *eval_prompts])
        reward, judge = load_rewards(config.reward, config.eval.judge, config.sampling, keys, eval_keys, metadata)
    settings = dataclasses.replace(config.model, attention=attention or config.model.attention)
    join_sequence_group(config.model.sequence_parallel, config.timeout_minutes)
    row = resolved.objective.surrogate
    # A limit on the rollout's own steps would act on a rounding difference between rollout and training.
    limits = row.uses_ratio or row.uses_kl
    model = load_model(settings, config.sampling, local_device(), config.seed, needs_agreement=limits)
    recomputation, left = choose_checkpointing(resolved, model)
    model.set_checkpointing(recomputation)
    if negatives and not model.policy.uses_guidance and config.eval_guidance_scale == 1:
        model.notes.append("negative prompts have no effect: sampling.guidance_scale = 1 turns guidance off")
    if prompts is None and any(prompt.seed is not None for prompt in train_prompts):
        model.notes.append(
            f"the seeds in {config.data.prompts} are for evaluation and samples; training draws new noise each time"
        )
    return Setup(
        resolved=resolved,
        model=model,
        graphs=step_graphs(model.policy, model.spec.cost(config), left),
        reward=reward,
        judge=judge,
        prompts=[prompt.key for prompt in train_prompts],
        eval_prompts=[prompt.key for prompt in eval_prompts],
        captions=captions_of([*train_prompts, *eval_prompts]),
        negatives=negatives,
        eval_seeds={i: prompt.seed for i, prompt in enumerate(eval_prompts) if prompt.seed is not None},
    )


def configured_prompts(data: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Read `data.prompts` and `data.eval_prompts`."""
    return read_prompts(data.prompts), read_prompts(data.eval_prompts)


def check_prompt_sets(
    data: DataConfig, model_path: str, spec: Spec, train: Sequence[Prompt], heldout: Sequence[Prompt]
) -> None:
    """Check that prompts of a shipped set, by its name or in a file, suit the model; random weights take any.

    Raises:
        UserError: the set was made for another model.
    """
    unsuited = [] if is_random(spec.path) else SETS.keys() - {*spec.prompt_sets}
    captions = {prompt.text for name in unsuited for prompt in read_prompts(name)}
    for key, prompts in (("prompts", train), ("eval_prompts", heldout)):
        if captions.issuperset(prompt.text for prompt in prompts):
            raise UserError(
                f"data.{key} = {getattr(data, key)!r}: captions of the testbed's moving shapes, not for "
                f"model.path = {model_path!r}; expected a file of other prompts: {FORMATS}"
            )


def check_task(prompts: Sequence[Prompt], spec: Spec) -> None:
    """Check that every prompt has an image if the model takes images, and that none has one otherwise.

    Raises:
        UserError: one is not as expected.
    """
    for prompt in prompts:
        if spec.takes_images and not prompt.image:
            raise UserError(
                f"{prompt.where}: model.path = {spec.path!r} is image-to-video; expected an image for each prompt, in "
                'the key "image" of a .jsonl file, or sample --image'
            )
        if prompt.image and not spec.takes_images:
            raise UserError(
                f"{prompt.where}: image = {prompt.image!r}, and model.path = {spec.path!r} is text-to-video; expected "
                "a prompt without an image (one that is for a reward needs another key)"
            )


def check_captions(prompts: Sequence[Prompt], spec: Spec) -> None:
    """Check that a model can encode the prompts: `check_task`, their words, and that images are whole. Collective.

    Raises:
        UserError: it cannot.
    """
    check_task(prompts, spec)
    spec.check_prompts(caption.text for caption in captions_of(prompts).values())
    first = {prompt.caption.image: prompt for prompt in reversed(prompts) if prompt.image}
    with fail_together():
        for prompt in [*first.values()][rank() :: world_size()]:
            prompt.check(functools.partial(read_image, reduced=True))


def load_rewards(
    settings: RewardConfig,
    judge_name: str | None,
    sampling: SamplingConfig,
    prompts: Sequence[str],
    eval_prompts: Sequence[str],
    metadata: Mapping[str, Metadata],
) -> tuple[CompositeReward, Judge | None]:
    """Load the reward and, if named, the judge; check each on one or two dummy videos of these prompts.

    Raises:
        UserError: one is missing or does not fit.
    """
    device = str(local_device())
    reward, judge = CompositeReward.of(settings, device, metadata), None
    reward.check(sampling, prompts, device)
    for part in reward.parts:
        if part in ("reward", "overall") or part.startswith(JUDGE_PART):
            raise UserError(
                f"reward {' and '.join(map(repr, reward.names))}: returns a part {part!r}, a name that tables "
                "reserve for the composite and eval.judge; give it another name, or a reward.prefix such as my_"
            )
    if judge_name is not None:
        judge = Judge(judge_name, settings, device, metadata=metadata)
        judge.check(sampling, eval_prompts, device)
    return reward, judge


MEMORY_SHARE = 0.85
"""Share of the free memory that a run may plan with; the rest is for decoding, workspaces and fragmentation. In four
iterations on an H100, training allocated 93 to 98 % of the plan: `benchmarks/results/2026-11-25-h100-iteration.json`,
`-full`, `-nft` and `-nft-zero3`. What was reserved, and ranks that hold NCCL's buffers, were not measured."""


def choose_checkpointing(resolved: Resolved, model: Model) -> tuple[CheckpointPlan, float]:
    """Resolve `model.gradient_checkpointing`. Collective.

    Return what is recomputed, and the bytes that are left for CUDA graphs: 0 if steps run without.

    Called while every rank holds all weights: the bytes that they take now count as usable. All ranks recompute as much
    as the rank with the least memory: they would wait for it anyway. The gradients are the same.
    """
    config, policy, cost = resolved.config, model.policy, model.spec.cost(resolved.config)
    usable = free_bytes(policy.device) + sum(p.nbytes for _, p in policy.named_parameters())
    room = training_room(resolved, model.spec, policy, usable, ranks=world_size())
    fits, graphs = fit_training(config.model, config.train, config.sampling, policy, cost, room)
    chosen = max(all_gather_object(fits), key=lambda of_rank: (MODES.index(of_rank.mode), of_rank.count))
    return chosen, room - chosen.mean(cost.activations) if graphs else 0.0


def fit_training(
    model: ModelConfig,
    train: TrainConfig,
    sampling: SamplingConfig,
    policy: Policy,
    cost: Cost,
    room: float,
    chosen: CheckpointPlan | None = None,
) -> tuple[CheckpointPlan, float]:
    """Fit activations and CUDA graphs into `room` bytes, for a run and for its plan.

    Return what is recomputed, `chosen` or for `auto` as little as fits, and the most bytes that CUDA graphs keep.
    """
    asked, on_gpu = model.gradient_checkpointing, policy.device.type != "cpu"  # a plan's policy is on `meta`
    graphs = graph_bytes(cost, sampling, model, train) if on_gpu else 0.0
    least = cost.activations[MODES[-1] if asked == "auto" else asked]
    room -= cost.graphs_within(room - least, graphs)  # nothing if none fits: recomputing for none would be in vain
    if chosen or asked != "auto":
        return chosen or CheckpointPlan(asked), graphs
    return fastest_that_fits(cost.activations, room, len(policy.block_list())), graphs


def training_room(resolved: Resolved, spec: Spec, policy: Policy, usable: float, *, ranks: int) -> float:
    """Return the bytes for activations and CUDA graphs, for a run and for its plan.

    It is what is left beside everything else that the engine and the stored rollouts will take on a rank.

    Args:
        policy: with whole weights, on any device (including meta).
        usable: bytes of the device for weights and training.
        ranks: number of ranks.
    """
    config = resolved.config
    groups = ranks // config.model.sequence_parallel
    stored = {} if config.sampling.offload_trajectories else stored_rollouts(resolved, spec, groups)[1]
    device, _ = engine_memory(config.model, config.train, resolved.objective.strategy, policy, ranks)
    taken = device.total - device.weights + sum(stored.values())
    return MEMORY_SHARE * (usable - device.weights) - taken


def samples_of_rank(train: TrainConfig, groups: int) -> int:
    """Return the number of samples per iteration on a rank of the first of `groups`, which has the most."""
    return len(share_of(train.samples, groups, 0))


def stored_rollouts(resolved: Resolved, spec: Spec, groups: int) -> tuple[int, dict[str, float]]:
    """Return `samples_of_rank`, and part -> bytes of their stored rollouts."""
    samples = samples_of_rank(resolved.config.train, groups)
    return samples, trajectory_bytes(resolved, math.prod(spec.latent_shape(resolved.config.sampling)), samples)


def trajectory_bytes(resolved: Resolved, numel: int, samples: int) -> dict[str, float]:
    """Return part -> bytes of what `samples` rollouts store for training, with `numel` elements per latent."""
    config, objective, trained = resolved.config, resolved.objective, len(resolved.longest_window)
    # With untrained steps in between, a trained transition stores up to two states of its own.
    shared = config.train.timestep_fraction == 1 or not objective.surrogate.scores_rollout
    states = trained + 1 if shared else min(2 * trained, config.sampling.steps + 1)
    velocities = int(objective.strategy.anchor is not None) + int(objective.stores_velocities)
    width = config.model.element_bytes if config.sampling.guidance_scale == 1 else 4
    return {
        "trajectories (fp32 latents)": 4.0 * numel * samples * states,
        "stored velocities": float(width * numel * samples * trained * velocities),
    }


def check_trajectories(resolved: Resolved, model: Model) -> str:
    """Describe the size of an iteration's stored rollouts on this rank.

    Raises:
        UserError: they exceed the free memory.
    """
    samples, parts = stored_rollouts(resolved, model.spec, data_size())
    size = sum(parts.values())
    device = model.policy.device
    on_gpu = device.type == "cuda" and not resolved.config.sampling.offload_trajectories
    free, where = (free_bytes(device), "GPU memory") if on_gpu else (free_bytes(torch.device("cpu")), "host memory")
    if size > free:
        way = "set sampling.offload_trajectories = true, or " if on_gpu else ""
        raise UserError(
            f"the rollouts of an iteration take {format_bytes(size)} of {where}; {format_bytes(free)} are free; "
            f"{way}lower train.group_size, train.prompts_per_iteration or train.timestep_fraction"
        )
    return f"stored rollouts: {samples} of {format_bytes(size / samples)}, {format_bytes(size)} of {where}"
