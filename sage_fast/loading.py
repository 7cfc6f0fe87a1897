"""Loading that all commands share: the prompts, rewards and model of their settings."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_same_settings
from sage_fast.config.engines import ENGINES
from sage_fast.config.rank_checks import check_sequence_parallel
from sage_fast.config.reward_names import place_of_reward
from sage_fast.config.schema import AttentionBackend, Config, RewardEntry
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
from sage_fast.models.find import find_spec
from sage_fast.models.load import load_model
from sage_fast.models.policy import Policy
from sage_fast.parallel.deepspeed_config import check_deepspeed_settings
from sage_fast.parallel.fit import choose_checkpointing
from sage_fast.rewards import CompositeReward, load_rewards
from sage_fast.rollout.recorder import step_graphs
from sage_fast.rollout.setup import Setup
from sage_fast.util.files import fingerprint
from sage_fast.util.plugins import file_of
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import join_sequence_group, local_device, rank, world_size


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


def contents_of(
    prompts: Mapping[str, Sequence[Prompt]], weights: str | None, rewards: Mapping[str, RewardEntry]
) -> dict[str, str]:
    """Return setting -> what its files and code hold, with a digest: a resume and `compare` tell
    what has changed.

    Args:
        prompts: setting -> its prompts.
        weights: `model.weights`.
        rewards: setting that holds the name of a reward -> the reward, which is loaded.
    """
    found = {}
    for key, each in prompts.items():
        records = [(prompt.text, prompt.negative, prompt.image, prompt.metadata) for prompt in each]
        images = [prompt.caption.image for prompt in each if prompt.image]
        found[key] = f"{len(each)} prompts ({fingerprint(repr(records).encode(), *images)})"
    if weights is not None:
        found["model.weights"] = f"weights ({fingerprint(b'', weights)})"
    for key, entry in rewards.items():
        if not entry.is_address:
            file = file_of(place_of_reward(entry.name, key), key)
            named = [
                arg for arg in entry.args.values() if isinstance(arg, str) and os.path.isfile(arg)
            ]
            found[key] = f"code ({fingerprint(b'', *sorted(_code(file) if file else ()), *named)})"
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
    resolved: ResolvedConfig,
    prompts: Sequence[Prompt | str] | None = None,
    attention: AttentionBackend | None = None,
    *,
    rewards: bool = True,
) -> Setup:
    """Load prompts, rewards and the model, in this order: errors that are cheap to find come first.

    Each reward scores a dummy video before the model is loaded.

    Args:
        resolved: the settings; the ranks have joined.
        prompts: replace the configured prompt files, for training and evaluation.
        attention: replaces `model.attention`.
        rewards: False for commands that only sample; `Setup.reward` is then empty.

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
        reward, judge = load_rewards(config, keys, eval_keys, metadata, spec.fps)
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
        contents = contents_of(sets, config.model.weights, config.named_rewards)
        if isinstance(config.train.deepspeed_config, str):
            digest = fingerprint(b"", config.train.deepspeed_config)
            contents["train.deepspeed_config"] = f"settings ({digest})"
        # else the networks are `model.weights`
        if config.model.trains_adapter or config.model.weights is None:
            contents["model.path"] = contents_of_networks(model.policy)
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
