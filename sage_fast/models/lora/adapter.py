"""LoRA adapters in diffusers format: create one, load one, write one, and explain what is wrong
with a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig, set_peft_model_state_dict
from torch import Tensor, nn

from sage_fast.models.lora.reader import Fault, Layout, read_adapter
from sage_fast.util.errors import UserError
from sage_fast.util.files import save_tensors, why_no_file

ADAPTER = "default"
LORA_FILE = "pytorch_lora_weights.safetensors"


def lora_files(networks: Iterable[str]) -> dict[str, str]:
    """Return network -> file name of its adapter; the first one's is that which diffusers looks
    for."""
    first, *others = networks
    return {first: LORA_FILE, **{part: f"{part}_{LORA_FILE}" for part in others}}


def write_adapter(file: Path, tensors: Mapping[str, Tensor], config: LoraConfig) -> None:
    """Write a LoRA in diffusers format, with its configuration in the metadata."""
    settings = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(settings, sort_keys=True)}
    save_tensors(file, tensors, metadata)


def add_lora(network: Any, *, rank: int, alpha: int, targets: str, seed: int) -> None:
    """Freeze the network and add a LoRA adapter in float32; its up-projections start at zero.

    Raises:
        UserError: `targets` (a regular expression over whole module names) matches no layer, or a
            module that peft cannot adapt.
    """
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.default_generator.manual_seed(seed)
        try:
            for name, layer in network.named_modules():
                if (
                    name
                    and re.fullmatch(targets, name)
                    and not isinstance(layer, nn.Linear | nn.Conv3d)
                ):
                    raise ValueError(
                        f"{name} is of type {type(layer).__name__}; expected linear layers"
                    )
            _add(network, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
        except (ValueError, re.error) as error:
            raise UserError(f"model.lora_targets = {targets!r}: {error}") from error


def load_lora(network: Any, path: Path, part: str, layouts: Iterable[Layout] = ()) -> None:
    """Freeze the network and add the LoRA adapter at `path`, a file or a folder, in float32 and
    trainable.

    Args:
        part, layouts: as in `read_adapter`.

    Raises:
        UserError: no such file, or not an adapter for this network.
    """
    names = (LORA_FILE, "adapter_model.safetensors") if path.is_dir() else ("",)
    file = next((path / name for name in names if (path / name).is_file()), None)
    if file is None:
        what = f"a folder without {LORA_FILE}" if path.is_dir() else why_no_file(path)
        raise UserError(
            f"model.weights = {str(path)!r}: {what}; expected {LORA_FILE} or a folder that holds it"
        )
    layers = {
        n: m.weight.shape
        for n, m in network.named_modules()
        if isinstance(m, nn.Linear | nn.Conv3d)
    }
    try:
        tensors, config = read_adapter(file, part, layers, layouts)
    except Fault as fault:
        raise UserError(f"model.weights = {str(path)!r}{fault}") from fault
    with torch.random.fork_rng(devices=[]):  # peft draws weights, which are replaced
        _add(network, config)
    set_peft_model_state_dict(network, tensors, ADAPTER)


def _add(network: Any, config: LoraConfig) -> None:
    """Freeze the network and add an adapter in float32, trainable."""
    network.requires_grad_(False)
    network.add_adapter(config, adapter_name=ADAPTER)
    for name, p in network.named_parameters():
        if ".lora_" in name:
            p.data = p.data.float()
            p.requires_grad_(True)
