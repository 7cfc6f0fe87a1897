"""Attention backends.

All are exact. There is no sparse, quantised or cached attention: the rollout policy must be the
policy in training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_fast.util.errors import UserError
from sage_fast.util.profiling import annotate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value `[B, S, H, D]`) -> `[B, S, H, D]`."""


SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels that `sdpa` may use on a GPU in half precision. Without this list, torch prefers cuDNN's
kernel on Hopper. That is a separate backend here, and `auto` needs a different one to fall back
to."""


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    with sdpa_kernel(SDPA_KERNELS) if half else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(query, key, value)
    return out.transpose(1, 2)


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call cuDNN's operator on our layout, by its strides; diffusers' wrapper copies all four
    tensors.

    The operator always computes the softmax statistics that a backward needs. SDPA leaves them out
    under `no_grad`, where cuDNN then runs another plan, which may round differently.
    """
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[
        0
    ].transpose(1, 2)


# The packages are called directly: diffusers' dispatcher has no backward for flash-attn 3, and
# reports a package that is installed but fails to import as missing.


def _from_package(name: str) -> Attention:
    """Return the kernel `package.module:function`, imported when it is first called."""
    load = functools.cache(pkgutil.resolve_name)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = load(name)(query, key, value)
        return out[0] if isinstance(out, tuple) else out  # flash-attn 3 may add the log-sum-exp

    return kernel


CUDNN_CUDA = (12, 9)
"""Oldest CUDA version for `cudnn`. Below it, cuDNN's attention reads out of bounds on strided
operands, such as our values, and PyTorch disables it (pull request 171627). `_cudnn` calls it all
the same."""


def _cudnn_lacks(device: torch.device) -> str:
    built_for = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)
    if built_for < CUDNN_CUDA:
        newest = ".".join(map(str, CUDNN_CUDA))
        return (
            f"needs a PyTorch for CUDA {newest} or newer, below which it can read out of bounds, "
            f"and this is for {torch.version.cuda}"
        )
    return "" if torch.backends.cudnn.is_available() else _does_not_run(device)


FLASH3_MAJORS = (9,)
"""Major compute capabilities that FlashAttention 3 is built for.

A build may hold kernels for sm_80, which sm_86 and sm_89 run too, with less shared memory than they
were written for (vllm issue 12429). On sm_100 and sm_120 an import succeeds and the first call
fails (flash-attention pull request 2593).
"""
FLASH4_MAJORS = (9, 10, 11)
"""Those that FlashAttention 4 is for: Hopper, and Blackwell's data-centre cards.

4.0.0b36 has no backward for sm_8x, and on sm_12x none that adds in a fixed order; reports of
crashes and wrong values there are open (flash-attention pull requests 2404 and 2553).
"""


def _flash3_lacks(device: torch.device) -> str:
    return _is_for_others(device, FLASH3_MAJORS, "Hopper (sm_90)")


def _flash4_lacks(device: torch.device) -> str:
    return _is_for_others(device, FLASH4_MAJORS, "Hopper (sm_90) and B200 (sm_100)")


def _is_for_others(device: torch.device, majors: tuple[int, ...], cards: str) -> str:
    """Return which cards a kernel is for and the nearest for this one; empty if it is for this."""
    major, minor = torch.cuda.get_device_capability(device)
    if major in majors:
        return ""
    name = torch.cuda.get_device_name(device)
    nearest = "'flash4'" if major in FLASH4_MAJORS else "'flash' (FlashAttention 2)"
    return f"runs on {cards}, and {name} is sm_{major}{minor}, where {nearest} is the nearest"


def _does_not_run(device: torch.device) -> str:
    return f"does not run on {torch.cuda.get_device_name(device)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """An attention kernel; callable as an `Attention`.

    Attributes:
        attend: the kernel.
        operators: substrings of its forward operators' names. Selective checkpointing keeps the
            outputs of these.
        cuda: whether it needs a CUDA device.
        half: whether it needs a 16-bit dtype.
        package: module it imports.
        install: command or hint to install the package.
        lacks: (CUDA device) -> why it cannot run there; empty if it can.
        is_reference: whether the others are compared with it, so that it needs no trial. One row
            is.
        sums_dq_in_float32: whether its backward holds the gradient in the queries in float32, which
            the plan counts.
    """

    attend: Attention
    operators: tuple[str, ...]
    cuda: bool = True
    half: bool = True
    package: str | None = None
    install: str = ""
    lacks: Callable[[torch.device], str] = lambda device: ""
    is_reference: bool = False
    sums_dq_in_float32: bool = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with annotate("attention"):
            return self.attend(query, key, value)


ATTENTION = {
    "sdpa": AttentionRow(
        attend=sdpa, operators=("scaled_dot_product",), cuda=False, half=False, is_reference=True
    ),
    "cudnn": AttentionRow(attend=_cudnn, operators=("scaled_dot_product",), lacks=_cudnn_lacks),
    "flash": AttentionRow(
        attend=_from_package("flash_attn:flash_attn_func"),
        operators=("flash_attn::",),
        package="flash_attn",
        install="pip install 'sage-fast[flash-attn]' --no-build-isolation",
    ),
    "flash3": AttentionRow(
        attend=_from_package("flash_attn_interface:flash_attn_func"),
        operators=("flash_attn_3::", "flash_attn3::"),
        package="flash_attn_interface",
        install="build it from the folder hopper/ of github.com/Dao-AILab/flash-attention",
        lacks=_flash3_lacks,
    ),
    "flash4": AttentionRow(
        attend=_from_package("sage_fast.models.attention.flash4:attention"),
        operators=("sage_fast_flash4::",),
        sums_dq_in_float32=True,
        package="flash_attn.cute",
        install="pip install 'sage-fast[flash-attn-4]'",
        lacks=_flash4_lacks,
    ),
    "xformers": AttentionRow(
        attend=_from_package("xformers.ops:memory_efficient_attention"),
        operators=("efficient_attention", "xformers_flash::", "xformers_flash3::"),
        half=False,
        package="xformers",
        install="pip install 'sage-fast[xformers]'",
    ),
}


(REFERENCE,) = (name for name, backend in ATTENTION.items() if backend.is_reference)


def is_attention(operator: Any) -> bool:
    """Whether an operator, or its name `namespace::operator`, is the forward of an attention
    kernel."""
    # str() would say namespace.operator
    name = operator if isinstance(operator, str) else operator.name()
    return _is_of_a_kernel(name) and not _is_backward(name)


def is_attention_backward(name: str) -> bool:
    """Whether an operator of this name is the backward of an attention kernel."""
    return _is_of_a_kernel(name) and _is_backward(name)


def _is_of_a_kernel(name: str) -> bool:
    return any(part in name for backend in ATTENTION.values() for part in backend.operators)


def _is_backward(name: str) -> bool:
    return "backward" in name or "bwd" in name


def _is_installed(package: str) -> bool:
    """Whether a package is there.

    Nothing is imported: a broken one gets an error of its own when it is used.
    """
    parent, _, child = package.partition(".")
    if (spec := importlib.util.find_spec(parent)) is None:
        return False
    if child:
        return any(
            (Path(folder) / child).is_dir() for folder in spec.submodule_search_locations or ()
        )
    # flash-attn-4 alone leaves a bare namespace `flash_attn`, with `cute` in it
    return spec.origin is not None


def _lack(backend: AttentionRow, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a backend cannot serve activations of `dtype` here; empty if it can."""
    if not backend.cuda and device.type != "cuda":
        return ""
    if device.type != "cuda":
        return f"needs a CUDA device, and this is the {device.type}"
    # First what an installation would not change.
    if why := backend.lacks(device):
        return why
    if backend.package is not None and not _is_installed(backend.package):
        return f"is not installed: {backend.install}"
    return (
        "needs model.dtype = bfloat16"
        if backend.half and dtype not in (torch.bfloat16, torch.float16)
        else ""
    )


def usable(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the names of the backends that can serve activations of `dtype` here."""
    return [name for name, backend in ATTENTION.items() if not _lack(backend, device, dtype)]


def check_attention(asked: str, device: torch.device, dtype: torch.dtype) -> None:
    """Check that the requested backend can run here.

    Raises:
        UserError: it cannot; says why, and how to install it if it is missing.
    """
    if asked != "auto" and (why := _lack(ATTENTION[asked], device, dtype)):
        expected = ", ".join(usable(device, dtype))
        raise UserError(f"model.attention = {asked!r} {why}; expected one of auto, {expected}")
