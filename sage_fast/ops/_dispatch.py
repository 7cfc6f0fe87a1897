"""Choose the implementation of the operators for each device. No other module does.

The operators register their PyTorch reference for every device. This module replaces it with the fused implementations
that are installed: Triton on CUDA, the C++ extension on the CPU. float64 (tests) stays with the reference.

`SAGE_FAST_OPS=reference` in the environment disables the fused implementations. `SAGE_FAST_OPS=triton` with
`TRITON_INTERPRET=1` runs Triton's interpreter on the CPU: slow, for checks only, with the rounding of a GPU
(kernels/common.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import LIBRARY
from sage_fast.ops.gated_norm import gated_norm_backward_reference, gated_norm_reference
from sage_fast.ops.norm_modulate import norm_modulate_backward_reference, norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_backward_reference, norm_rotate_reference
from sage_fast.ops.transition_score import transition_score_backward_reference, transition_score_reference
from sage_fast.ops.transition_step import transition_step_reference
from sage_fast.util.errors import UserError, nearest

_OPERATORS: dict[str, Callable[..., Any]] = {
    "gated_norm": gated_norm_reference,
    "gated_norm_backward": gated_norm_backward_reference,
    "norm_modulate": norm_modulate_reference,
    "norm_modulate_backward": norm_modulate_backward_reference,
    "norm_rotate": norm_rotate_reference,
    "norm_rotate_backward": norm_rotate_backward_reference,
    "transition_step": transition_step_reference,
    "transition_score": transition_score_reference,
    "transition_score_backward": transition_score_backward_reference,
}
_serving: dict[str, str] = {}


def implementation(device: torch.device) -> str:
    """Name of the implementation on `device`: `C++`, `Triton`, `Triton interpreter` or `PyTorch reference`."""
    return _serving.get(device.type, "PyTorch reference")


def _serve(fused: Callable[[], Callable[..., Any]], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `reference` for float64 and `fused()`, resolved at the call, for all else."""

    def call(*args: Any) -> Any:
        in_double = any(isinstance(arg, Tensor) and arg.dtype == torch.float64 for arg in args)
        return reference(*args) if in_double else fused()(*args)

    return call


def _triton(name: str) -> Callable[[], Callable[..., Any]]:
    """Return a loader that imports the kernel at the first call, so that CPU users never load Triton."""
    module = f"sage_fast.kernels.{name.removesuffix('_backward')}"
    return lambda: getattr(importlib.import_module(module), name)


def _cpp(name: str) -> Callable[[], Callable[..., Any]]:
    operator = getattr(torch.ops.sage_fast_cpu, name).default
    return lambda: operator


def _register() -> None:
    choice = os.environ.get("SAGE_FAST_OPS", "")
    if choice not in ("", "reference", "triton"):
        raise UserError(f"SAGE_FAST_OPS = {choice!r}: {nearest(choice, ('reference', 'triton'))}")
    if choice == "reference":
        return
    if importlib.util.find_spec("triton") is not None:
        for name, reference in _OPERATORS.items():
            LIBRARY.impl(name, _serve(_triton(name), reference), "CUDA")
        _serving["cuda"] = "Triton"
    if choice == "triton":
        for name, reference in _OPERATORS.items():
            LIBRARY.impl(name, _serve(_triton(name), reference), "CPU")
        _serving["cpu"] = "Triton interpreter"
        return
    extension = next(Path(__file__).parents[1].glob("_C.*so"), None)
    if extension is None:
        logging.getLogger("sage_fast").warning(
            "the C++ operators are not built; the CPU runs the slower PyTorch reference (reinstall where torch and "
            "a C++ compiler are available)"
        )
        return
    torch.ops.load_library(extension)
    for name, reference in _OPERATORS.items():
        LIBRARY.impl(name, _serve(_cpp(name), reference), "CPU")
    _serving["cpu"] = "C++"


_register()
