"""What settings name, with a digest: prompts, weights and code.

A resume and `compare` tell what has changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sage_fast.config.reward_names import reward_import_path
from sage_fast.config.schema import Config, RewardEntry
from sage_fast.data.prompts import Prompt
from sage_fast.models.policy import Policy
from sage_fast.rewards.objects import digest
from sage_fast.util.files import fingerprint
from sage_fast.util.plugins import file_of


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
            code = _code_of(reward_import_path(entry.name, key), key)
            named = []  # files that arguments name
            for value in entry.args.values():
                if isinstance(value, str) and os.path.isfile(value):
                    named.append(value)
            found[key] = f"code ({fingerprint(b'', *code, *named)})"

    for key, place in (plugins or {}).items():
        found[key] = f"code ({fingerprint(b'', *_code_of(place, key))})"
    return found


def contents_of_run(
    config: Config,
    prompts: Mapping[str, Sequence[Prompt]],
    policy: Policy,
    objects: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return `contents_of` all that a run reads, its checkpoint included."""
    weights = config.model.weights
    found = contents_of(prompts, weights, config.named_rewards, config.plugins, objects)
    deepspeed = config.train.deepspeed_config
    if isinstance(deepspeed, str):  # a mapping is compared as a setting
        found["train.deepspeed_config"] = f"settings ({fingerprint(b'', deepspeed)})"
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
            if ".lora_" in name:
                continue
            bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
            total = int(bits.sum(dtype=torch.int64))
            plain_name = name.replace(".base_layer", "")
            sums.append((part, plain_name, list(tensor.shape), str(tensor.dtype), total))
    return f"weights ({fingerprint(repr(sorted(sums)).encode())})"


def _code_of(place: str, key: str) -> list[Path]:
    """Return the files of a plug-in's code, in order; none if its file is not known."""
    file = file_of(place, key)
    return [] if file is None else sorted(_with_files_beside(file))


def _with_files_beside(file: Path) -> set[Path]:
    """Return a Python file and the files beside it that it names, directly or through one of
    them."""
    found = {file}
    waiting = [file]
    while waiting:
        read = waiting.pop()
        if not read.is_file():
            continue
        for word in set(re.findall(rb"\w+", read.read_bytes())):
            beside = file.with_name(f"{word.decode()}.py")
            if beside not in found and beside.is_file():
                found.add(beside)
                waiting.append(beside)
    return found
