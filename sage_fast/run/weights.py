"""Save a policy's weights in diffusers format, as sampling, export and other programs read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from peft import get_peft_model_state_dict
from torch import Tensor

from sage_fast.models.lora.adapter import ADAPTER, lora_files, write_adapter
from sage_fast.models.policy import Policy, State
from sage_fast.run.shards import ShardLayout
from sage_fast.util.files import save_tensors, write_json
from sage_fast.util.ranks import fail_together, rank, world_size


def save_weights(policy: Policy, folder: Path, state: State | None = None) -> list[Path]:
    """Save LoRA files on rank 0 or, after full fine-tuning, whole networks, one file a rank.
    Collective.

    No rank holds more of a network than its file.

    Args:
        folder: created if missing.
        state: a `snapshot` of the trainable weights; by default the present ones.

    Returns:
        The files that this rank has written.
    """
    if state is None:
        state = policy.parts()
    layout = ShardLayout(policy)
    with fail_together():
        if rank() == 0:  # before other ranks look for the folders
            folder.mkdir(parents=True, exist_ok=True)
            if not policy.trains_adapter:
                for part in policy.networks:
                    (folder / part).mkdir(exist_ok=True)

    written: list[Path] = []
    for part, network in policy.networks.items():
        prefix = f"{part}." if len(policy.networks) > 1 else ""
        saved = {}
        for name, tensor in network.state_dict(keep_vars=True).items():
            if not policy.trains_adapter or ".lora_" in name:
                saved[prefix + name] = tensor
        owners = _owners(policy, saved)
        mine = _owned(policy, layout, state, saved, owners)
        tensors = {name.removeprefix(prefix): tensor.contiguous() for name, tensor in mine.items()}

        with fail_together():
            if not policy.trains_adapter:
                own_names = {name.removeprefix(prefix): owner for name, owner in owners.items()}
                written += _write_network(folder / part, network, tensors, own_names)
            elif rank() == 0:
                # "auto" would ask the hub, for each checkpoint, whether the base's embeddings have
                # been resized.
                named = get_peft_model_state_dict(
                    network, tensors, ADAPTER, save_embedding_layers=False
                )
                written.append(folder / lora_files(policy.networks)[part])
                write_adapter(written[-1], named, network.peft_config[ADAPTER])
    return written


def _owners(policy: Policy, saved: Mapping[str, Tensor]) -> dict[str, int]:
    """Return name of a tensor -> the rank that writes it: rank 0 an adapter, else the ranks in
    turn, the largest tensors first."""
    files = 1 if policy.trains_adapter else min(world_size(), len(saved))

    sizes = {name: policy.states.shape(tensor).numel() for name, tensor in saved.items()}
    largest_first = sorted(saved, key=lambda name: -sizes[name])
    return {name: number % files for number, name in enumerate(largest_first)}


def _owned(
    policy: Policy,
    layout: ShardLayout,
    state: State,
    saved: Mapping[str, Tensor],
    owners: Mapping[str, int],
) -> dict[str, Tensor]:
    """Return the whole tensors that this rank writes. Collective."""
    # the trained weights, of which each rank has a part, and then the others
    trained = {name: owner for name, owner in owners.items() if name in state}
    found = layout.whole(state, trained)
    for name, owner in owners.items():
        if name in state:
            continue
        whole = policy.states.whole(saved[name])
        if owner == rank():
            found[name] = whole.detach().cpu()
    return found


def _write_network(
    folder: Path, network: Any, tensors: Mapping[str, Tensor], owners: Mapping[str, int]
) -> list[Path]:
    """Write the tensors that this rank owns; rank 0 also writes config.json and, of several files,
    the index.

    Args:
        owners: tensor of the network -> the rank that writes it.

    Returns:
        The files.
    """
    count = max(owners.values()) + 1
    written: list[Path] = []
    stem, suffix = SAFETENSORS_WEIGHTS_NAME.rsplit(".", 1)
    names = [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]
    names = names if count > 1 else [SAFETENSORS_WEIGHTS_NAME]
    if tensors:
        written.append(folder / names[rank()])
        save_tensors(written[0], tensors, {"format": "pt"})
    if rank() == 0:
        network.save_config(folder)
        written.append(folder / network.config_name)
        if count > 1:
            index = {
                "metadata": {},
                "weight_map": {name: names[owner] for name, owner in sorted(owners.items())},
            }
            write_json(index, folder / SAFE_WEIGHTS_INDEX_NAME)
            written.append(folder / SAFE_WEIGHTS_INDEX_NAME)
    return written
