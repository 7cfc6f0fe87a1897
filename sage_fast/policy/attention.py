"""Which kernel computes attention: one asked for by name, or the fastest that is installed, by a measurement.

All are exact. Sparse, quantised or cached attention is not offered: the rollout policy must be the trained policy.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor

from sage_fast.config import AttentionBackend
from sage_fast.errors import UserError

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query, key, value `[B, S, H, D]`, bool key mask `[B, S]` or None) -> `[B, S, H, D]`."""


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=None if mask is None else mask[:, None, None])
    return out.transpose(1, 2)


def _without_mask(kernel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attention:
    """A kernel that knows no key mask leaves the rare batches of mixed lengths to SDPA."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return kernel(query, key, value) if mask is None else _sdpa(query, key, value, mask)

    return attend


def _dispatched(backend: AttentionBackendName) -> Attention:
    return _without_mask(functools.partial(dispatch_attention_fn, backend=backend))


def _flash3(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Called directly: diffusers' dispatcher has no backward for it."""
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(query, key, value)
    return out[0] if isinstance(out, tuple) else out


ATTENTION: dict[str, Attention] = {
    "sdpa": _sdpa,
    "cudnn": _dispatched(AttentionBackendName._NATIVE_CUDNN),
    "flash": _dispatched(AttentionBackendName.FLASH),
    "flash3": _without_mask(_flash3),
    "xformers": _dispatched(AttentionBackendName.XFORMERS),
}
assert {"auto", *ATTENTION} == set(get_args(AttentionBackend)), (
    "an attention backend is named in config.AttentionBackend and has its kernel in ATTENTION"
)
_PACKAGE = {"flash": "flash_attn", "flash3": "flash_attn_interface", "xformers": "xformers"}
_INSTALL = {
    "flash": "pip install 'sage-fast[flash-attn]' --no-build-isolation",
    "flash3": "build it from the folder hopper/ of github.com/Dao-AILab/flash-attention",
    "xformers": "pip install 'sage-fast[xformers]'",
}


def usable(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Backends that this machine has for activations of `dtype`."""
    if device.type != "cuda":
        return ["sdpa"]
    half = dtype in (torch.bfloat16, torch.float16)
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    has = {name: importlib.util.find_spec(package) is not None for name, package in _PACKAGE.items()}
    fits = {
        "sdpa": True,
        "cudnn": half and torch.backends.cudnn.is_available(),
        "flash": half and has["flash"],
        "flash3": half and has["flash3"] and hopper,
        "xformers": has["xformers"],
    }
    return [name for name in ATTENTION if fits[name]]


def check_attention(asked: str, device: torch.device, dtype: torch.dtype) -> None:
    """
    Raises:
        UserError: the backend asked for is not there; says how to install it.
    """
    names = usable(device, dtype)
    if asked == "auto" or asked in names:
        return
    if device.type != "cuda":
        why = f"needs a CUDA device, and this is the {device.type}"
    elif asked in _PACKAGE and importlib.util.find_spec(_PACKAGE[asked]) is None:
        why = f"is not installed: {_INSTALL[asked]}"
    elif dtype == torch.float32:
        why = "needs model.dtype = bfloat16"
    else:
        why = f"does not run on {torch.cuda.get_device_name(device)}"
    raise UserError(f"model.attention = {asked!r} {why}; expected one of auto, {', '.join(names)}")


def measure_attention(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Usable backend -> milliseconds of a forward and a backward at `shape` (B, S, H, D); empty without a choice."""
    names = usable(device, dtype)
    if len(names) == 1:
        return {}
    return {name: _milliseconds(ATTENTION[name], shape, device, dtype) for name in names}


def _milliseconds(
    attention: Attention, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> float:
    """Forward and backward; the median of three after a warm-up."""
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=device, dtype=dtype)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(attention(query, key, value, None), (query, key, value), upstream)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])
