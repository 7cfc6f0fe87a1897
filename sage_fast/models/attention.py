"""Attention backends, and the choice of one: by name, or the fastest correct one as measured on this machine.

All are exact. There is no sparse, quantised or cached attention: the rollout policy must be the policy in training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_fast.config.schema import AttentionBackend
from sage_fast.util.environment import synchronize
from sage_fast.util.errors import UserError, in_one_line

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query, key, value `[B, S, H, D]`, bool key mask `[B, S]` or None) -> `[B, S, H, D]`."""


SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels that `sdpa` may use on a GPU in half precision. Without this list, torch prefers cuDNN's kernel on Hopper.
That is a separate backend here, and `auto` needs a different one to fall back to."""


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    with sdpa_kernel(SDPA_KERNELS) if half else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=None if mask is None else mask[:, None, None])
    return out.transpose(1, 2)


def _without_mask(kernel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attention:
    """Add masks to a kernel that has none: masked batches, which are rare (mixed prompt lengths), go to SDPA."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return kernel(query, key, value) if mask is None else _sdpa(query, key, value, mask)

    return attend


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call cuDNN's operator on our layout, by its strides; diffusers' wrapper copies all four tensors.

    The operator always computes the softmax statistics that a backward needs. SDPA leaves them out under `no_grad`,
    where cuDNN then runs another plan, which may round differently.
    """
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[0].transpose(1, 2)


# The packages are called directly: diffusers' dispatcher has no backward for flash-attn 3, and reports a package that
# is installed but fails to import as missing.


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(query, key, value)


def _flash3(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(query, key, value)
    return out[0] if isinstance(out, tuple) else out


def _xformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention(query, key, value)


CUDNN_CUDA = (12, 9)
"""Oldest CUDA version for `cudnn`. Below it, cuDNN's attention reads out of bounds on strided operands, such as our
values, and PyTorch disables it (pull request 171627). `_cudnn` calls it all the same."""


def _cudnn_lacks(device: torch.device) -> str:
    built_for = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)
    if built_for < CUDNN_CUDA:
        newest = ".".join(map(str, CUDNN_CUDA))
        return (
            f"needs a PyTorch for CUDA {newest} or newer, below which it can read out of bounds, and this is for "
            f"{torch.version.cuda}"
        )
    return "" if torch.backends.cudnn.is_available() else _does_not_run(device)


def _flash3_lacks(device: torch.device) -> str:
    return "" if torch.cuda.get_device_capability(device) >= (9, 0) else _does_not_run(device)


def _does_not_run(device: torch.device) -> str:
    return f"does not run on {torch.cuda.get_device_name(device)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """An attention kernel; callable as an `Attention`.

    Attributes:
        attend: the kernel.
        operators: substrings of its forward operators' names. Selective checkpointing keeps the outputs of these.
        cuda: whether it needs a CUDA device.
        half: whether it needs a 16-bit dtype.
        package: module it imports.
        install: command or hint to install the package.
        lacks: (CUDA device) -> why it cannot run there; empty if it can.
        is_reference: whether the others are compared with it, so that it needs no trial. One row is.
    """

    attend: Attention
    operators: tuple[str, ...]
    cuda: bool = True
    half: bool = True
    package: str | None = None
    install: str = ""
    lacks: Callable[[torch.device], str] = lambda device: ""
    is_reference: bool = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(query, key, value, mask)


ATTENTION = {
    "sdpa": Backend(attend=_sdpa, operators=("scaled_dot_product",), cuda=False, half=False, is_reference=True),
    "cudnn": Backend(attend=_without_mask(_cudnn), operators=("scaled_dot_product",), lacks=_cudnn_lacks),
    "flash": Backend(
        attend=_without_mask(_flash),
        operators=("flash_attn::",),
        package="flash_attn",
        install="pip install 'sage-fast[flash-attn]' --no-build-isolation",
    ),
    "flash3": Backend(
        attend=_without_mask(_flash3),
        operators=("flash_attn_3::", "flash_attn3::"),
        package="flash_attn_interface",
        install="build it from the folder hopper/ of github.com/Dao-AILab/flash-attention",
        lacks=_flash3_lacks,
    ),
    "xformers": Backend(
        attend=_without_mask(_xformers),
        operators=("efficient_attention", "xformers_flash::", "xformers_flash3::"),
        half=False,
        package="xformers",
        install="pip install 'sage-fast[xformers]'",
    ),
}
assert {"auto", *ATTENTION} == set(get_args(AttentionBackend)), (
    "an attention backend is named in config.AttentionBackend and has its row in ATTENTION"
)


(REFERENCE,) = (name for name, backend in ATTENTION.items() if backend.is_reference)


def is_attention(operator: Any) -> bool:
    """Whether an operator is the forward of an attention kernel."""
    name = str(operator)
    forward = "backward" not in name and "bwd" not in name
    return forward and any(part in name for backend in ATTENTION.values() for part in backend.operators)


def _lack(backend: Backend, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a backend cannot serve activations of `dtype` here; empty if it can."""
    if not backend.cuda and device.type != "cuda":
        return ""
    if device.type != "cuda":
        return f"needs a CUDA device, and this is the {device.type}"
    if backend.package is not None and importlib.util.find_spec(backend.package) is None:
        return f"is not installed: {backend.install}"
    if why := backend.lacks(device):
        return why
    return "needs model.dtype = bfloat16" if backend.half and dtype not in (torch.bfloat16, torch.float16) else ""


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


# -- the choice -------------------------------------------------------------------------------------------------------

LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Tolerance: relative error, in norm, of the output and of each gradient against SDPA in float32 on the same inputs.
Rounding to the dtype alone gives a quarter of it; dropping the last tile of keys at 480p gives twice as much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of trying a backend.

    Attributes:
        milliseconds: time of a forward and a backward; NaN if it does not run or is wrong.
        error: largest relative error of output and gradients; NaN if it does not run.
        agrees: whether its output under `no_grad`, as in a rollout, is that with gradients to the bit.
        problem: why it cannot be used; empty if it can.
    """

    milliseconds: float = float("nan")
    error: float = float("nan")
    agrees: bool = True
    problem: str = ""

    def why_skipped(self, needs_agreement: bool) -> str:
        """Return why `auto` skips it; empty if it does not."""
        differs = "its output under no_grad is not that with gradients to the bit: rollouts and training would disagree"
        return self.problem or differs * (needs_agreement and not self.agrees)


def fastest(trials: Mapping[str, Trial]) -> str:
    """Return the fastest backend without a problem; `REFERENCE` if there is none."""
    times = {name: trial.milliseconds for name, trial in trials.items() if not trial.problem}
    return min(times, key=times.__getitem__, default=REFERENCE)


def measure_attention(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> dict[str, Trial]:
    """Try every usable backend at `shape` (B, S, H, D), for correctness and then speed; return name -> trial.

    Empty if only one backend is usable.
    """
    names = usable(device, dtype)
    if len(names) == 1:
        return {}
    return {name: try_attention(ATTENTION[name], shape, device, dtype) for name in names}


def try_attention(
    attention: Attention, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> Trial:
    """Check a backend against SDPA in float32, then time it. Failures are reported in `Trial.problem`, not raised."""
    query, key = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    value = torch.randn(*shape[:2], 3, *shape[2:], device=device, dtype=dtype)[:, :, 2]  # strided, as in the blocks
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    upstream = torch.randn(shape, device=device, dtype=dtype)

    def forward_and_backward() -> tuple[Tensor, ...]:
        out = attention(query, key, value, None)
        return out, *torch.autograd.grad(out, inputs, upstream)

    times = []
    try:
        results = forward_and_backward()
        with torch.no_grad():
            agrees = torch.equal(attention(query.detach(), key.detach(), value.detach(), None), results[0])
        errors = dict(zip(("values", "dq", "dk", "dv"), _errors(results, inputs, upstream)))
        del results
        for _ in range(3):
            synchronize(device)
            start = time.perf_counter()
            forward_and_backward()
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - start))
    except Exception as error:  # whatever a broken package raises, from ImportError to a compiler's own
        return Trial(problem=f"it does not run: {in_one_line(error)}")
    limit, largest = LARGEST_ERROR[dtype], max(errors.values())
    if wrong := [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limit]:
        why = f"it is wrong: relative error against SDPA in float32 of {', '.join(wrong)}, expected at most {limit:.0e}"
        return Trial(error=largest, problem=why)
    return Trial(milliseconds=statistics.median(times), error=largest, agrees=agrees)


def _errors(results: tuple[Tensor, ...], inputs: list[Tensor], upstream: Tensor) -> list[float]:
    """Return the relative errors of `[out, dq, dk, dv]`: for each, the larger of the first and the last head's.

    Heads are independent. Two of them in float32 cover the whole sequence and both ends of the layout at a fraction of
    the cost.
    """
    largest = [0.0] * len(results)
    for batch, head in ((0, 0), (-1, -1)):
        q, k, v, up = (t.detach()[batch, :, head].float()[None, :, None] for t in (*inputs, upstream))
        out = _sdpa(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), None)
        expected = (out, *torch.autograd.grad(out, (q, k, v), up))
        for i, (result, reference) in enumerate(zip(results, expected)):
            if result.shape != inputs[0].shape:
                largest[i] = float("inf")
                continue
            difference = result.detach()[batch, :, head].float() - reference.detach()[0, :, 0]
            error = float(difference.norm() / reference.detach().norm())
            largest[i] = max(largest[i], error) if error == error else float("inf")
    return largest
