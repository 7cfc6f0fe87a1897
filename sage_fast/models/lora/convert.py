"""A saved LoRA in other layouts of its checkpoint, for programs with other layers than
diffusers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from torch import Tensor

from sage_fast.models.lora.export_target import ExportTarget
from sage_fast.models.lora.reader import LoraFormatError, open_adapter
from sage_fast.util.errors import UserError, first_line


def read_lora(file: Path) -> tuple[dict[str, Tensor], LoraConfig]:
    """Read the factors of an adapter, `<layer>.lora_A.weight` and `.lora_B.weight`, and its
    configuration.

    Raises:
        UserError: it is damaged, or holds no configuration.
    """
    try:
        tensors, header = open_adapter(file)
        return tensors, LoraConfig(**json.loads(header[LORA_ADAPTER_METADATA_KEY]))
    except (LoraFormatError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{file}: not a LoRA as a run saves it: {first_line(error)}") from error


def converted(
    tensors: Mapping[str, Tensor], config: LoraConfig, target_of: Callable[[str], ExportTarget]
) -> dict[str, Tensor]:
    """Return the adapter in another layout of the checkpoint, with its scale in B, so that no
    reader needs alpha.

    A layer that fuses several gets an adapter of the sum of their ranks: A is stacked, B is
    block-diagonal. The rows of B for a fused layer without an adapter are 0.

    Args:
        tensors, config: as `read_lora` returns them.
        target_of: where a layer is in the other layout.
    """
    fused: dict[str, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for key, a in tensors.items():
        layer = key.removesuffix(".lora_A.weight")
        if layer == key:
            continue
        target = target_of(layer)
        alpha = config.alpha_pattern.get(
            get_pattern_key(list(config.alpha_pattern), layer), config.lora_alpha
        )
        b = tensors[f"{layer}.lora_B.weight"].float() * (
            alpha / (math.sqrt(len(a)) if config.use_rslora else len(a))
        )
        fused[target.layer][target.position] = (
            a.float(),
            torch.cat(b.chunk(2)[::-1]) if target.swaps_halves else b,
        )
        counts[target.layer] = target.fused
    factors: dict[str, Tensor] = {}
    for layer, own in fused.items():
        a, b = next(iter(own.values()))
        if counts[layer] > 1:
            a = torch.cat([own[index][0] for index in sorted(own)])
            empty = b[:, :0]
            b = torch.block_diag(
                *(own[index][1] if index in own else empty for index in range(counts[layer]))
            )
        factors |= {
            f"{layer}.lora_A.weight": a.contiguous(),
            f"{layer}.lora_B.weight": b.contiguous(),
        }
    return factors
