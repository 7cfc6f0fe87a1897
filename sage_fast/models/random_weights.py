"""Random weights for `model.path = random:NAME`: the published sizes without a checkpoint, to
measure time and memory.

Such a model generates noise, at the cost of the published one: classes, shapes and dtypes are the
same, and a whole iteration runs, from the prompt to the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sage_fast.config.schema import RANDOM
from sage_fast.models.spec import Spec


def is_random(path: str) -> bool:
    """Whether `path` asks for random weights."""
    return path.startswith(RANDOM)


@torch.no_grad()
def random_module(
    spec: Spec,
    part: str,
    dtype: torch.dtype,
    device: torch.device,
    place: torch.device | None = None,
) -> Any:
    """Return a part with random weights, allocated in `dtype` and nowhere else.

    Gates are small, as in a trained model, to keep rounding from growing from block to block.

    Args:
        spec: the model.
        part: one of its networks, or `vae`.
        dtype: dtype of the weights.
        device: device they are drawn on, with a fixed seed: the same kind of device gives the same
            model.
        place: device that holds them, and receives one after the other; None: the same.
    """
    module = nn.Module.to(spec.meta(part), dtype).to_empty(device=place or device)
    assert not list(module.buffers()), "they would stay uninitialised"
    generator = torch.Generator(device=device).manual_seed(0)
    for name, p in module.named_parameters():
        if name.endswith("gamma") or ("norm" in name and p.ndim == 1 and name.endswith("weight")):
            p.fill_(1)
        elif p.ndim == 1:
            p.fill_(0.1)
        else:
            drawn = p if place is None else torch.empty_like(p, device=device)
            drawn.normal_(std=p[0].numel() ** -0.5, generator=generator)
            if place is not None:
                p.copy_(drawn)
        if spec.is_gate(name):
            p.mul_(0.1)
    return module.eval()
