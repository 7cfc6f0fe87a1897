"""LoRA adapters in diffusers format: create one, load one, write one, and explain what is wrong with a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sage_fast.util.errors import UserError, first_line
from sage_fast.util.files import save_tensors

ADAPTER = "default"
LORA_FILE = "pytorch_lora_weights.safetensors"


def lora_files(networks: Iterable[str]) -> dict[str, str]:
    """Return network -> file name of its adapter; the first one's is that which diffusers looks for."""
    first, *others = networks
    return {first: LORA_FILE, **{part: f"{part}_{LORA_FILE}" for part in others}}


def write_adapter(file: Path, tensors: Mapping[str, Tensor], config: LoraConfig) -> None:
    """Write a LoRA in diffusers format, with its configuration in the metadata."""
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(settings, sort_keys=True)}
    save_tensors(file, tensors, metadata)


def add_lora(network: Any, *, rank: int, alpha: int, targets: str, seed: int) -> None:
    """Freeze the network and add a LoRA adapter in float32; its up-projections start at zero.

    Raises:
        UserError: `targets` (a regular expression over whole module names) matches no layer, or a module that peft
            cannot adapt.
    """
    network.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.default_generator.manual_seed(seed)
        try:
            for name, layer in network.named_modules():
                if name and re.fullmatch(targets, name) and not isinstance(layer, nn.Linear | nn.Conv3d):
                    raise ValueError(f"{name} is of type {type(layer).__name__}; expected linear layers")
            network.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets), adapter_name=ADAPTER)
        except (ValueError, re.error) as error:
            raise UserError(f"model.lora_targets = {targets!r}: {error}") from error
    _train_adapter(network)


def load_lora(network: Any, path: Path, part: str) -> None:
    """Freeze the network and add the LoRA adapter at `path`, a file or folder in diffusers format, trainable.

    Args:
        part: name of the network, which a pipeline puts before each layer's; a network writes bare layer names.

    Raises:
        UserError: no such file, or an adapter made for another model.
    """
    file = path / LORA_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"model.weights = {str(path)!r}: no such file; expected {LORA_FILE} or a folder that holds it")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise UserError(f"model.weights = {str(path)!r}: not a safetensors file: {error}") from error
    layers = {n: m.weight.shape for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv3d)}
    prefix = part if any(key.startswith(f"{part}.") for key in tensors) else None
    tensors = {key.removeprefix(f"{part}."): tensor for key, tensor in tensors.items()}
    problem = _problem_of_factors(tensors, layers)
    if problem is not None:
        raise UserError(f"model.weights = {str(path)!r}{problem}")
    network.requires_grad_(False)
    try:
        network.load_lora_adapter(str(file), prefix=prefix, adapter_name=ADAPTER, use_safetensors=True)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # metadata that does not fit
        raise UserError(
            f"model.weights = {str(path)!r}: diffusers cannot load it as a LoRA: {first_line(error)}"
        ) from error
    _train_adapter(network)
    # load_lora_adapter rounded the adapter to the base's dtype; set it again, now in float32.
    set_peft_model_state_dict(network, tensors, ADAPTER)


def _problem_of_factors(tensors: Mapping[str, Tensor], layers: Mapping[str, torch.Size]) -> str | None:
    """Return why these tensors are not an adapter for layers with weights of these shapes; None if they are.

    An adapter has two finite factors per layer, `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, all of one rank.
    """
    named = re.compile(r"(.+)\.lora_([AB])\.weight")
    if not any(map(named.fullmatch, tensors)):
        return ": holds no LoRA in diffusers format (`<layer>.lora_A.weight`)"
    ranks = set()
    for key, tensor in tensors.items():
        if (match := named.fullmatch(key)) is None:
            return f": holds {key!r}; expected nothing but `<layer>.lora_A.weight` and `<layer>.lora_B.weight`"
        layer, factor = match.groups()
        other = f"{layer}.lora_{'B' if factor == 'A' else 'A'}.weight"
        weight, axis = layers.get(layer), 1 if factor == "A" else 0
        if weight is None or tensor.ndim != len(weight) or tensor.shape[axis] != weight[axis]:
            expected = "no such layer here" if weight is None else f"expected width {weight[axis]}"
            return f" was made for another model: {key} has shape {list(tensor.shape)}, {expected}"
        if other not in tensors:
            return f": {key} is there and {other} is missing"
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            return f": {key} is {tensor.dtype}; expected float32, bfloat16 or float16"
        if not tensor.isfinite().all():
            return f": {key} is not finite"
        ranks.add(tensor.shape[1 - axis])
    if len(ranks) > 1 or 0 in ranks:
        return f": its factors have the ranks {sorted(ranks)}; expected one above 0 for all layers"
    return None


def _train_adapter(network: Any) -> None:
    for name, p in network.named_parameters():
        if ".lora_" in name:
            p.data = p.data.float()
            p.requires_grad_(True)
