"""What sampling and training need, loaded as the settings say: prompts, rewards and the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_same_settings
from sage_fast.config.engines import ENGINES
from sage_fast.config.rank_checks import check_sequence_parallel
from sage_fast.config.schema import AttentionBackend, Config
from sage_fast.data.contents import contents_of_run
from sage_fast.data.embeddings import cache_key, encode_cached
from sage_fast.data.prompt_checks import (
    check_captions,
    check_prompt_sets,
    idle_negatives,
    notes_on_prompts,
    shared_prompts,
)
from sage_fast.data.prompts import (
    Prompt,
    captions_of,
    configured_prompts,
    metadata_of,
    negatives_of,
    with_negative,
)
from sage_fast.models.decoder import ParkedDecoder
from sage_fast.models.find import find_spec
from sage_fast.models.interface import Condition
from sage_fast.models.load import load_model
from sage_fast.models.model import Model
from sage_fast.models.spec import Spec
from sage_fast.parallel.deepspeed_config import check_deepspeed_settings
from sage_fast.parallel.fit import (
    AUTOENCODER,
    REWARDS,
    Placement,
    choose_checkpointing,
    choose_placement,
)
from sage_fast.rewards import CompositeReward, load_rewards
from sage_fast.rewards.comparing import check_comparing, notes_on_comparing
from sage_fast.rewards.interface import Scorer
from sage_fast.rewards.objects import name_rewards
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.recorder import step_graphs
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.files import fingerprint
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import (
    check_agreement,
    join_sequence_group,
    local_device,
    rank,
    world_size,
)


def resolve(config: Config) -> ResolvedConfig:
    """Join the ranks of a command that does not train, and resolve its settings; `check_trainable`
    does for a run.

    Raises:
        UserError: as `ResolvedConfig` or `check_same_settings`, or the ranks cannot share samples
            as `model.sequence_parallel` says.
    """
    initialize(config.timeout_minutes)
    check_same_settings(config)
    check_sequence_parallel(config.model.sequence_parallel, world_size())
    return ResolvedConfig(config)


def with_reward_objects(config: Config, reward_funcs: object) -> tuple[Config, dict[str, Any]]:
    """Put rewards that a program gave as objects into the settings, as `name_rewards` does.

    Returns:
        The settings, and setting that holds the name of a reward -> what to call, for `load_setup`.

    Raises:
        UserError: as `name_rewards`, or a prompt file cannot be read.
    """
    train_prompts, _ = configured_prompts(config.data)
    return name_rewards(
        config,
        reward_funcs,
        [prompt.key for prompt in train_prompts],
        metadata_of(train_prompts),
        str(local_device()),
    )


@dataclasses.dataclass(kw_only=True)
class Setup:
    """What sampling and training need, as `load_setup` returns it; `encode` fills `embeddings`.

    Attributes:
        judge: reward that evaluations alone use.
        graphs: CUDA graphs of the model's steps, for training and evaluation; None if they run
            without.
        prompts, eval_prompts: keys (`Prompt.key`).
        captions: key -> what to encode, for these, the empty and the negative prompts.
        negatives: key -> negative prompt, where it is not empty.
        contents: setting -> what its files and code hold, with a digest; on rank 0.
        eval_seeds: index in `eval_prompts` -> seed, for prompts with a seed of their own.
    """

    resolved: ResolvedConfig
    model: Model
    reward: Scorer
    prompts: list[PromptKey]
    eval_prompts: list[PromptKey]
    judge: Scorer | None = None
    graphs: StepGraphs | None = None
    captions: dict[PromptKey, Caption] = dataclasses.field(default_factory=dict)
    negatives: dict[PromptKey, str] = dataclasses.field(default_factory=dict)
    contents: dict[str, str] = dataclasses.field(default_factory=dict)
    eval_seeds: dict[int, int] = dataclasses.field(default_factory=dict)
    embeddings: dict[PromptKey, Condition] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.resolved.config

    def close(self) -> None:
        """End the worker processes of its rewards."""
        self.reward.close()
        if self.judge is not None:
            self.judge.close()

    def encode(self, cache: Path | None = None) -> None:
        """Embed all prompts, each on one rank; see `encode_cached`. Collective.

        Args:
            cache: the folder to use unless `data.embedding_cache` is set; None keeps nothing on
                disk.
        """
        self._check_same_prompts()
        configured = self.config.data.embedding_cache
        folder = Path(configured) if configured else cache
        spec, sampling = self.model.spec, self.config.sampling
        version = cache_key(spec, self.config.model.dtype, folder, sampling)
        with contextlib.ExitStack() as away:
            found = encode_cached(
                self.captions,
                lambda: self.model.load_encoder(sampling, away),
                folder,
                version,
                spec.condition,
            )
        self.embeddings = {}
        for key, made in found.items():
            negative = PromptKey(self.negatives.get(key, ""), key.image)
            self.embeddings[key] = dataclasses.replace(made, negative=negative)

    def _check_same_prompts(self) -> None:
        """Check that all ranks have read the same prompts: each node may have a copy of the file.

        Collective.
        """
        negatives = sorted(self.negatives.items())
        read = {
            "data.prompts": (self.prompts, negatives),
            "data.eval_prompts": (self.eval_prompts, negatives, self.eval_seeds),
        }
        digests = {name: fingerprint(repr(content).encode()) for name, content in read.items()}
        check_agreement(digests, ": copy the prompt file to every node")


def load_setup(
    resolved: ResolvedConfig,
    prompts: Sequence[Prompt | str] | None = None,
    attention: AttentionBackend | None = None,
    *,
    rewards: bool = True,
    reward_objects: Mapping[str, Any] | None = None,
) -> Setup:
    """Load prompts, rewards and the model, in this order: errors that are cheap to find come first.

    Each reward scores a dummy video before the model is loaded.

    Args:
        resolved: the settings; the ranks have joined.
        prompts: replace the configured prompt files, for training and evaluation.
        attention: replaces `model.attention`.
        rewards: False for commands that only sample; `Setup.reward` is then empty.
        reward_objects: as `with_reward_objects` returns them.

    Raises:
        UserError: something that the settings name is missing or does not fit.
    """
    config = resolved.config
    if ENGINES[config.train.engine].is_deepspeed:
        check_deepspeed_settings(config.train)
    spec = find_spec(config.model.path, fetch=True)
    check_distilled(spec.distillation, resolved.objective)

    if prompts is None:
        train_prompts, eval_prompts = configured_prompts(config.data)
        check_prompt_sets(config.data, config.model.path, spec, train_prompts, eval_prompts)
    else:
        given = [_as_prompt(prompt) for prompt in prompts]
        train_prompts = eval_prompts = with_negative(given, config.data)
    all_prompts = [*train_prompts, *eval_prompts]
    keys = [prompt.key for prompt in train_prompts]
    eval_keys = [prompt.key for prompt in eval_prompts]
    check_captions(all_prompts, spec)

    reward: Scorer = CompositeReward([], config.reward)
    judge: Scorer | None = None
    comparing: list[str] = []
    if rewards:
        metadata = metadata_of(all_prompts)
        reward, judge = load_rewards(config, keys, eval_keys, metadata, spec.fps, reward_objects)
        comparing = reward.comparing
        check_comparing(config, comparing)

    join_sequence_group(config.model.sequence_parallel, config.timeout_minutes)
    device = local_device()
    scorers = [reward] if judge is None else [reward, judge]
    in_process = sum(scorer.bytes_on(device) for scorer in scorers)
    placement = choose_placement(resolved, spec, device, in_process)
    if REWARDS in placement.parked:
        for scorer in scorers:
            scorer.park(device)
    model, left = _load_model(resolved, spec, attention, placement)
    model.notes += _notes(config, model, train_prompts, eval_prompts, are_given=prompts is not None)
    model.notes += notes_on_comparing(config, comparing)

    contents: dict[str, str] = {}
    if rewards and rank() == 0:  # which writes run.json; weights may have many gigabytes to read
        sets = {"data.prompts": train_prompts, "data.eval_prompts": eval_prompts}
        contents = contents_of_run(config, sets, model.policy, reward_objects)

    eval_seeds = {}
    for number, prompt in enumerate(eval_prompts):
        if prompt.seed is not None:
            eval_seeds[number] = prompt.seed

    return Setup(
        resolved=resolved,
        model=model,
        graphs=step_graphs(model.policy, model.spec.cost(config), left),
        reward=reward,
        judge=judge,
        prompts=keys,
        eval_prompts=eval_keys,
        captions=captions_of(all_prompts),
        negatives=negatives_of(all_prompts),
        contents=contents,
        eval_seeds=eval_seeds,
    )


def _as_prompt(prompt: Prompt | str) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    return Prompt(text=prompt, where=f"prompt {prompt!r}")


def _load_model(
    resolved: ResolvedConfig,
    spec: Spec,
    attention: AttentionBackend | None,
    placement: Placement,
) -> tuple[Model, Any]:
    """Load the model and choose what its backward recomputes.

    Returns:
        The model, and the memory that is left, for CUDA graphs.
    """
    config = resolved.config
    settings = config.model
    if attention is not None:
        settings = dataclasses.replace(settings, attention=attention)
    # Clipping compares rollout and training log-probs, so both must round the same.
    surrogate = resolved.objective.surrogate
    needs_agreement = surrogate.uses_ratio or surrogate.uses_kl
    model = load_model(
        settings,
        config.sampling,
        local_device(),
        config.seed,
        needs_agreement=needs_agreement,
        spec=spec,
        streamed=placement.streamed,
    )
    model.parked = [*placement.parked]
    if placement.streamed and model.policy.device.type != "cpu":
        rate = placement.copy_rate / 1e9
        model.notes.append(f"copies from page-locked host memory: {rate:.3g} GB/s, measured")
    if AUTOENCODER in placement.parked:
        model.decoder = ParkedDecoder(model.decoder, local_device())
    plan, left = choose_checkpointing(resolved, model)
    model.set_checkpointing(plan)
    return model, left


def _notes(
    config: Config,
    model: Model,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    *,
    are_given: bool,
) -> list[str]:
    """Return what is worth knowing of the prompts before a run.

    Args:
        are_given: whether the prompts are not those of the settings.
    """
    notes = []
    idle = idle_negatives(config, [*train_prompts, *eval_prompts])
    if idle:
        notes.append(idle)
    notes += notes_on_prompts(train_prompts, eval_prompts)
    if are_given:
        return notes

    shared = shared_prompts(train_prompts, eval_prompts)
    if shared:
        notes.append(shared)
    if any(prompt.seed is not None for prompt in train_prompts):
        notes.append(
            f"the seeds in {config.data.prompts} are for evaluation and samples; training draws "
            "new noise each time"
        )
    return notes
