"""FlashAttention 4 as an operator of PyTorch.

The package flash-attn-4 (kernels in CuTe DSL for Hopper and Blackwell) launches its kernels past
PyTorch's dispatcher. As an operator, checkpointing can keep its output. The package compiles at the
first call of a kernel: into a folder, so that it does so once for all processes. Written against
4.0.0b36; its kernels have run as scripts/flash4_kit.py compiles them alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.util.files import one_at_a_time

log = logging.getLogger(__name__)
_called: set[tuple[object, ...]] = set()


def _cache(given: str) -> Path | None:
    """Return the folder of compiled kernels, the first that can be written of: given, the user's, a
    temporary one.

    Their code runs here: no one else may write the latter two.
    """
    folders = [Path(given)] if given else []
    with contextlib.suppress(RuntimeError):  # no home
        folders.append(
            Path(
                os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache",
                "sage-fast",
                "flash-attn-4",
            )
        )
    with contextlib.suppress(OSError):  # no temporary folder
        folders.append(Path(tempfile.gettempdir(), f"sage-fast-flash-attn-4-{os.getuid()}"))
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            if folder == Path(given) or (
                folder.lstat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022
            ):
                return folder
    return None


@functools.cache
def _package() -> tuple[Callable[..., Any], Callable[..., Any], Path | None]:
    """Import the package, with its cache on; return its forward, its backward and the folder of the
    cache, if any."""
    switch, variable, folder = (
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
        None,
    )
    if os.environ.setdefault(switch, "1") == "1":  # both are read at the import
        given = os.path.expanduser(os.environ.get(variable, ""))
        folder = _cache(given)
        os.environ |= {variable: str(folder)} if folder else {switch: "0"}
        if given and folder != Path(given):
            log.warning(
                "%s: cannot write %s; FlashAttention 4 uses %s",
                variable,
                given,
                folder or "no folder",
            )
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.interface import _flash_attn_bwd

    return flash_attn_func, _flash_attn_bwd, folder


@contextlib.contextmanager
def compile_lock(*kernel: object) -> Iterator[None]:
    """Run the first call of a kernel alone on this machine: the first process compiles, the others
    read its cache."""
    folder = None if kernel in _called else _package()[2]
    with contextlib.ExitStack() as held:
        if folder is not None:
            held.enter_context(one_at_a_time(folder / "lock"))
        yield
    _called.add(kernel)


@torch.library.custom_op("sage_fast_flash4::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `[B, S, H, D]` and the log-sum-exp, float32 `[B, H, S]`, computed without
    gradients too."""
    with torch.no_grad(), compile_lock("forward", query.dtype, query.shape[3]):
        out, log_sum_exp = _package()[0](query, key, value, return_lse=True)
    return out, log_sum_exp


@torch.library.custom_op("sage_fast_flash4::attention_backward", mutates_args=())
def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, gradient: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.get_deterministic_debug_mode() == 2  # 1 is `warn_only`
    if torch.get_deterministic_debug_mode() == 1:
        warnings.warn(
            "with warn_only the backward of FlashAttention 4 is not deterministic", stacklevel=2
        )
    with compile_lock("backward", query.dtype, query.shape[3], deterministic):
        dq, dk, dv = _package()[1](
            query, key, value, out, gradient, log_sum_exp, deterministic=deterministic
        )
    return dq, dk, dv


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(batch, heads, tokens, dtype=torch.float32)


@_backward.register_fake
def _(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:3])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, log_sum_exp = ctx.saved_tensors
    return _backward(query, key, value, out, gradient.contiguous(), log_sum_exp)


_attention.register_autograd(_differentiate, setup_context=_save)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend; all `[B, S, H, D]` in bfloat16 or float16 on a GPU."""
    return _attention(query, key, value)[0]
