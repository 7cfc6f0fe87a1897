"""What sampling and training need, loaded as the settings say: prompts, rewards and the model."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.resolved import Resolved
from sage_fast.algorithm.trainable import check_same_settings
from sage_fast.config.rank_checks import check_sequence_parallel
from sage_fast.config.reward_names import place_of_reward
from sage_fast.config.schema import AttentionBackend, Config, RewardEntry
from sage_fast.data.embeddings import cache_key, encode_cached
from sage_fast.data.prompt_checks import (
    check_captions,
    check_prompt_sets,
    notes_on_prompts,
    shared_prompts,
)
from sage_fast.data.prompts import (
    Prompt,
    captions_of,
    configured_prompts,
    metadata_of,
    negatives_of,
)
from sage_fast.models.interface import Condition
from sage_fast.models.load import find_spec, load_model
from sage_fast.models.model import Model
from sage_fast.models.policy import Policy
from sage_fast.parallel.fit import choose_checkpointing
from sage_fast.rewards import CompositeReward, load_rewards
from sage_fast.rewards.interface import Scorer
from sage_fast.rewards.objects import digest, name_rewards
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.recorder import step_graphs
from sage_fast.util.captions import Caption, prompt_key, split_key
from sage_fast.util.files import fingerprint
from sage_fast.util.plugins import file_of
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import (
    check_agreement,
    join_sequence_group,
    local_device,
    rank,
    world_size,
)


def resolve(config: Config) -> Resolved:
    """Join the ranks of a command that does not train, and resolve its settings; `check_trainable`
    does for a run.

    Raises:
        UserError: as `Resolved` or `check_same_settings`, or the ranks cannot share samples as
            `model.sequence_parallel` says.
    """
    initialize(config.timeout_minutes)
    check_same_settings(config)
    check_sequence_parallel(config.model.sequence_parallel, world_size())
    return Resolved(config)


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

    resolved: Resolved
    model: Model
    reward: Scorer
    prompts: list[str]
    eval_prompts: list[str]
    judge: Scorer | None = None
    graphs: StepGraphs | None = None
    captions: dict[str, Caption] = dataclasses.field(default_factory=dict)
    negatives: dict[str, str] = dataclasses.field(default_factory=dict)
    contents: dict[str, str] = dataclasses.field(default_factory=dict)
    eval_seeds: dict[int, int] = dataclasses.field(default_factory=dict)
    embeddings: dict[Any, Condition] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.resolved.config

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
        found = encode_cached(
            self.captions,
            lambda: self.model.load_encoder(sampling),
            folder,
            cache_key(spec, self.config.model.dtype, folder, sampling),
            spec.condition,
        )
        self.embeddings = {
            key: dataclasses.replace(
                made, negative=prompt_key(self.negatives.get(key, ""), image=split_key(key)[1])
            )
            for key, made in found.items()
        }

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


def contents_of(
    prompts: Mapping[str, Sequence[Prompt]],
    weights: str | None,
    rewards: Mapping[str, RewardEntry],
    plugins: Mapping[str, str] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return setting -> what its files and code hold, with a digest: a resume and `compare` tell
    what has changed.

    Args:
        prompts: setting -> its prompts.
        weights: `model.weights`.
        rewards: setting that holds the name of a reward -> the reward, which is loaded.
        plugins: setting -> `package.module:name` of a choice of the user's own, such as a sampler.
        objects: setting that holds the name of a reward -> the reward itself, as
            `with_reward_objects` returns them.
    """
    found = {}
    for key, each in prompts.items():
        records = [(prompt.text, prompt.negative, prompt.image, prompt.metadata) for prompt in each]
        images = [prompt.caption.image for prompt in each if prompt.image]
        found[key] = f"{len(each)} prompts ({fingerprint(repr(records).encode(), *images)})"
    if weights is not None:
        found["model.weights"] = f"weights ({fingerprint(b'', weights)})"
    for key, entry in rewards.items():
        if entry.is_object:
            found[key] = digest((objects or {}).get(key))
        elif not entry.is_address:
            file = file_of(place_of_reward(entry.name, key), key)
            named = [
                arg for arg in entry.args.values() if isinstance(arg, str) and os.path.isfile(arg)
            ]
            found[key] = f"code ({fingerprint(b'', *sorted(_code(file) if file else ()), *named)})"
    for key, place in (plugins or {}).items():
        file = file_of(place, key)
        code = sorted(_code(file)) if file is not None else []
        found[key] = f"code ({fingerprint(b'', *code)})"
    return found


def _contents_of_run(
    config: Config,
    prompts: Mapping[str, Sequence[Prompt]],
    policy: Policy,
    objects: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return `contents_of` all that a run reads, its checkpoint included."""
    weights = config.model.weights
    found = contents_of(prompts, weights, config.named_rewards, config.plugins, objects)
    # where all networks are in `model.weights`, nothing of the checkpoint is left
    if config.model.trains_adapter or weights is None:
        found["model.path"] = contents_of_networks(policy)
    return found


def contents_of_networks(policy: Policy) -> str:
    """Return a digest of the weights that a checkpoint holds, in words, as `contents_of` does for
    files.

    A sum of the bits of each tensor, as integers, reads a model on a GPU in milliseconds. It is the
    same on every device, and tells another checkpoint from the same one at another place.

    Args:
        policy: before an engine shards it. An adapter's weights are not the checkpoint's.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for part, network in policy.networks.items():
        for name, tensor in network.state_dict().items():
            if ".lora_" not in name:
                bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
                plain = name.replace(".base_layer", "")
                sums.append(
                    (
                        part,
                        plain,
                        list(tensor.shape),
                        str(tensor.dtype),
                        int(bits.sum(dtype=torch.int64)),
                    )
                )
    return f"weights ({fingerprint(repr(sorted(sums)).encode())})"


def _code(file: Path) -> set[Path]:
    """Return a Python file and the files beside it that it names, directly or through one of
    them."""
    found, new = {file}, {file}
    while new:
        words = {
            word
            for each in new
            if each.is_file()
            for word in re.findall(rb"\w+", each.read_bytes())
        }
        new = {
            path for word in words if (path := file.with_name(f"{word.decode()}.py")).is_file()
        } - found
        found |= new
    return found


def load_setup(
    resolved: Resolved,
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
    spec = find_spec(config.model.path, fetch=True)
    check_distilled(spec.distillation, resolved.objective)
    if prompts is None:
        train_prompts, eval_prompts = configured_prompts(config.data)
        check_prompt_sets(config.data, config.model.path, spec, train_prompts, eval_prompts)
    else:
        given = (
            p if isinstance(p, Prompt) else Prompt(text=p, where=f"prompt {p!r}") for p in prompts
        )
        train_prompts = eval_prompts = [*given]
    negatives = negatives_of([*train_prompts, *eval_prompts])
    check_captions([*train_prompts, *eval_prompts], spec)
    reward, judge = CompositeReward([], config.reward), None
    if rewards:
        keys, eval_keys = (
            [prompt.key for prompt in group] for group in (train_prompts, eval_prompts)
        )
        metadata = metadata_of([*train_prompts, *eval_prompts])
        reward, judge = load_rewards(config, keys, eval_keys, metadata, spec.fps, reward_objects)
    settings = dataclasses.replace(config.model, attention=attention or config.model.attention)
    join_sequence_group(config.model.sequence_parallel, config.timeout_minutes)
    row = resolved.objective.surrogate
    # A limit on the rollout's own steps would act on a rounding difference between rollout and
    # training.
    limits = row.uses_ratio or row.uses_kl
    model = load_model(
        settings, config.sampling, local_device(), config.seed, needs_agreement=limits, spec=spec
    )
    recomputation, left = choose_checkpointing(resolved, model)
    model.set_checkpointing(recomputation)
    if negatives and not model.policy.uses_guidance and config.eval_guidance_scale == 1:
        model.notes.append(
            "negative prompts have no effect: sampling.guidance_scale = 1 turns guidance off"
        )
    model.notes += notes_on_prompts(train_prompts, eval_prompts)
    if prompts is None and (note := shared_prompts(train_prompts, eval_prompts)):
        model.notes.append(note)
    if prompts is None and any(prompt.seed is not None for prompt in train_prompts):
        model.notes.append(
            f"the seeds in {config.data.prompts} are for evaluation and samples; training draws "
            "new noise each time"
        )
    sets = {"data.prompts": train_prompts, "data.eval_prompts": eval_prompts}
    contents = {}
    if rewards and rank() == 0:  # which writes run.json; weights may have many gigabytes to read
        contents = _contents_of_run(config, sets, model.policy, reward_objects)
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
        contents=contents,
        eval_seeds={
            i: prompt.seed for i, prompt in enumerate(eval_prompts) if prompt.seed is not None
        },
    )
