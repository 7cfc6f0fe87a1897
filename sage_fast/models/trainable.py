"""Make a network trainable: all of its weights, or an adapter over them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sage_fast.config.places import split_family
from sage_fast.config.schema import ModelConfig
from sage_fast.models.lora.adapter import ADAPTER, add_lora, load_lora
from sage_fast.models.policy import Policy

if TYPE_CHECKING:
    from sage_fast.models.spec import Spec


def make_trainable(
    spec: Spec, network: Any, config: ModelConfig, seed: int = 0, weights: str | None = None
) -> None:
    """Make a network trainable: all of it, the adapter in `weights`, or a new adapter; freeze what
    no forward reads."""
    if not config.trains_adapter:
        network.requires_grad_(True)
    elif weights is not None:
        load_lora(network, Path(weights), spec.main_network(), spec.lora_layouts.values())
    else:
        targets = spec.lora_targets if config.lora_targets is None else config.lora_targets
        add_lora(
            network, rank=config.lora_rank, alpha=config.lora_alpha, targets=targets, seed=seed
        )
    if config.trains_adapter:
        # saved with it
        network.peft_config[ADAPTER].base_model_name_or_path = split_family(config.path)[1]
    spec.freeze_idle(network)


def meta_policy(spec: Spec, config: ModelConfig) -> Policy:
    """Return the configured policy on the meta device, with its adapter: no memory, no weights."""
    networks = {part: spec.meta(part) for part in spec.networks}
    with torch.device("meta"):
        for network in networks.values():
            make_trainable(spec, network, config)
        return spec.policy(networks, dtype=getattr(torch, config.dtype), guidance_scale=1.0)
