"""Random weights for `model.path = random:NAME`: the published sizes without a checkpoint, to
measure time and memory.

Such a model generates noise, at the cost of the published one: classes, shapes and dtypes are the
same, and a whole iteration runs, from the prompt to the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor

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
    """Return a part with random weights, which are allocated once, in the dtypes of a checkpoint
    that is loaded in `dtype`.

    Gates are small, as in a trained model, to keep rounding from growing from block to block.

    Args:
        spec: the model.
        part: one of its networks, or `vae`.
        dtype: dtype of the weights, but for modules that diffusers keeps in float32.
        device: device they are drawn on, with a fixed seed: the same kind of device gives the same
            model.
        place: device that holds them, and receives one after the other; None: the same.
    """
    module = _without_weights(spec, part, dtype, place or device)
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


def _without_weights(spec: Spec, part: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a part on a device with uninitialised weights, and buffers as its class computes them.

    As in diffusers' `from_pretrained`, buffers have the dtype that they get while `dtype` is the
    default one, and `_keep_in_fp32_modules` stay in float32.
    """
    with default_dtype(dtype), init_empty_weights(include_buffers=False):
        module = spec.build(part)

    kept = module._keep_in_fp32_modules or []
    for name, p in module.named_parameters():
        is_kept = any(module_name in kept for module_name in name.split("."))
        p.data = p.data.to(torch.float32 if is_kept else dtype)

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor.to(device)

    return module._apply(place)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have `dtype` as PyTorch's default within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
