"""FlashAttention 4 from compiled kernels, without its compiler: the module `flash_attn.cute` of
`scripts.flash4_kit`.

It has the two functions that sage_fast/models/attention/flash4.py calls, for the one case that
HunyuanVideo 1.5 and Wan need: bfloat16, heads of 128, as many key heads as query heads, no mask,
Hopper. Batch, heads and both lengths are free: that of the keys may be another than that of the
queries, as in attention to a text.
"""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

FOLDER = Path(__file__).parent
WIDTH = 128


@functools.cache
def facts() -> dict[str, Any]:
    """Return what the kit's builder wrote: architecture, the rows of a tile in the backward, the
    shortest length."""
    found: dict[str, Any] = json.loads((FOLDER / "kit.json").read_text(encoding="utf-8"))
    return found


@functools.cache
def kernel(name: str) -> Any:
    """Load the launcher of `fwd`, `bwd_pre`, `bwd` or `bwd_post`."""
    # the kernels' undefined symbols
    ctypes.CDLL(str(FOLDER / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(FOLDER / f"{name}.so")).func


def check(*tensors: Tensor) -> None:
    """Refuse what the kernels were not compiled for.

    Raises:
        RuntimeError: the GPU, a dtype or a width is another, or they are too short.
        ValueError: keys have another batch, number of heads or width than the queries, or values
            another shape than the keys.
    """
    query, key, value = tensors
    expected = [query.shape[0], key.shape[1], *query.shape[2:]]
    if list(key.shape) != expected:
        raise ValueError(f"k has shape {list(key.shape)}; expected {expected}, as q but its length")
    if value.shape != key.shape:
        raise ValueError(f"v has shape {list(value.shape)}; expected {list(key.shape)} as k")
    capability = torch.cuda.get_device_capability(tensors[0].device)
    if "sm_{}{}".format(*capability) != facts()["arch"]:
        raise RuntimeError(
            f"the FlashAttention kit is for {facts()['arch']}, and this GPU is {capability}"
        )
    for tensor in tensors:
        shape = list(tensor.shape)
        if tensor.dtype != torch.bfloat16 or shape[3:] != [WIDTH] or shape[1] < facts()["shortest"]:
            raise RuntimeError(
                f"the FlashAttention kit is for bfloat16 [B, S, H, {WIDTH}] with S of "
                f"{facts()['shortest']} or more, got {tensor.dtype} {shape}"
            )


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend; return the output `[B, S, H, D]` and the log-sum-exp, float32 `[B, H, S]`."""
    check(q, k, v)
    batch, tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    launch_forward(q.detach(), k.detach(), v.detach(), out, lse, width**-0.5)
    return out, lse


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in q, k and v. Not deterministic: dq is summed by atomics."""
    check(q, k, v)
    if deterministic:
        raise RuntimeError(
            "the FlashAttention kit has no deterministic backward; install flash-attn-4 itself"
        )
    batch, tokens, heads, width = q.shape
    tile = facts()["backward_tile"]
    rows = -(-tokens // tile) * tile
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dpsum, lse_log2 = (
        torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    dq_sum = torch.empty(batch, heads, rows * width, dtype=torch.float32, device=q.device)
    launch_preprocess(out, dout, lse, dpsum, lse_log2, dq_sum)
    inputs = q.detach(), k.detach(), v.detach()
    launch_backward(*inputs, dout, lse_log2, dpsum, dq_sum, dk, dv, width**-0.5)
    launch_postprocess(dq_sum, dq, width**-0.5)
    return dq, dk, dv


# The launchers take all arguments of the package's kernels, None for what the case does not have:
# lengths of packed sequences, windows, sinks, sparse blocks, semaphores.


def launch_forward(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
    kernel("fwd")(q, k, v, out, lse, scale, *[None] * 9, (None, None), None, None)


def launch_preprocess(
    out: Any, dout: Any, lse: Any, dpsum: Any, lse_log2: Any, dq_sum: Any
) -> None:
    kernel("bwd_pre")(out, dout, dpsum, lse, lse_log2, dq_sum, *[None] * 5, 1.0, None, None)


def launch_backward(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    lse_log2: Any,
    dpsum: Any,
    dq_sum: Any,
    dk: Any,
    dv: Any,
    scale: float,
) -> None:
    kernel("bwd")(
        q, k, v, dout, lse_log2, dpsum, dq_sum, dk, dv, scale, *[None] * 9, (None, None), None, None
    )


def launch_postprocess(dq_sum: Any, dq: Any, scale: float) -> None:
    kernel("bwd_post")(dq_sum, dq, scale, *[None] * 4)
