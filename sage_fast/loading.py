"""Loading that all commands share: the prompts, rewards and model of their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.resolved import Resolved
from sage_fast.config.rank_checks import check_sequence_parallel
from sage_fast.config.schema import AttentionBackend, Config
from sage_fast.data.embeddings import cache_key, encode_cached
from sage_fast.data.prompt_checks import check_captions, check_prompt_sets
from sage_fast.data.prompts import Prompt, captions_of, configured_prompts, metadata_of, negatives_of
from sage_fast.models.interface import Condition
from sage_fast.models.load import find_spec, load_model
from sage_fast.models.model import Model
from sage_fast.parallel.fit import choose_checkpointing
from sage_fast.rewards import CompositeReward, Judge, load_rewards
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.recorder import step_graphs
from sage_fast.util.captions import Caption, prompt_key, split_key
from sage_fast.util.ranks import initialize, join_sequence_group, local_device, world_size


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
    model = load_model(settings, config.sampling, local_device(), config.seed, needs_agreement=limits, spec=spec)
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
