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
    state, layout = policy.parts() if state is None else state, ShardLayout(policy)
    with fail_together():
        if rank() == 0:  # before other ranks look for the folders
            for part in ("",) if policy.trains_adapter else policy.networks:
                (folder / part).mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    for part, network in policy.networks.items():
        prefix = f"{part}." if len(policy.networks) > 1 else ""
        held = {
            prefix + name: tensor for name, tensor in network.state_dict(keep_vars=True).items()
        }
        saved = {
            name: tensor
            for name, tensor in held.items()
            if not policy.trains_adapter or ".lora_" in name
        }
        sizes = {name: policy.states.shape(tensor).numel() for name, tensor in saved.items()}
        files = 1 if policy.trains_adapter else min(world_size(), len(saved))
        owners = {
            name: place % files for place, name in enumerate(sorted(saved, key=lambda n: -sizes[n]))
        }
        mine = layout.whole(state, {name: owner for name, owner in owners.items() if name in state})
        for name, owner in owners.items():
            if name not in state:
                whole = policy.states.whole(saved[name])
                mine |= {name: whole.detach().cpu()} if owner == rank() else {}
        tensors = {name.removeprefix(prefix): tensor.contiguous() for name, tensor in mine.items()}
        with fail_together():
            if not policy.trains_adapter:
                places = {name.removeprefix(prefix): owner for name, owner in owners.items()}
                written += _write_network(folder / part, network, tensors, places)
            elif rank() == 0:
                # "auto" would ask the hub, for each checkpoint, whether the base's embeddings have
                # been resized.
                named = get_peft_model_state_dict(
                    network, tensors, ADAPTER, save_embedding_layers=False
                )
                written.append(folder / lora_files(policy.networks)[part])
                write_adapter(written[-1], named, network.peft_config[ADAPTER])
    return written


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
    count, written = max(owners.values()) + 1, list[Path]()
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
