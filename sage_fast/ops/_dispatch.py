"""Which implementation serves the operators on each device; the only place that looks for one.

The PyTorch reference is registered for every device by the operators themselves. Here the fused ones take its place if
they are installed: Triton on CUDA, the C++ extension on the CPU. float64 (tests) stays with the reference.
`SAGE_FAST_OPS=reference` in the environment skips the fused ones; `SAGE_FAST_OPS=triton` with `TRITON_INTERPRET=1`
serves the CPU by Triton's interpreter, which is slow and only for checks; it rounds as a GPU does (kernels/common.py).
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

from sage_fast.errors import UserError, nearest
from sage_fast.ops._common import LIBRARY
from sage_fast.ops.gated_norm import gated_norm_backward_reference, gated_norm_reference
from sage_fast.ops.norm_modulate import norm_modulate_backward_reference, norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_backward_reference, norm_rotate_reference
from sage_fast.ops.transition_score import transition_score_backward_reference, transition_score_reference
from sage_fast.ops.transition_step import transition_step_reference

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
    """What serves the operators on `device`: `C++`, `Triton`, `Triton interpreter` or `PyTorch reference`."""
    return _serving.get(device.type, "PyTorch reference")


def _serve(fused: Callable[[], Callable[..., Any]], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`fused()`, looked up at the call, for everything but float64."""

    def call(*args: Any) -> Any:
        in_double = any(isinstance(arg, Tensor) and arg.dtype == torch.float64 for arg in args)
        return reference(*args) if in_double else fused()(*args)

    return call


def _triton(name: str) -> Callable[[], Callable[..., Any]]:
    """Imported when first called: CPU users never load Triton."""
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
            "the C++ operators are not built; the CPU runs the slower PyTorch reference (install again with torch "
            "and a C++ compiler at hand)"
        )
        return
    torch.ops.load_library(extension)
    for name, reference in _OPERATORS.items():
        LIBRARY.impl(name, _serve(_cpp(name), reference), "CPU")
    _serving["cpu"] = "C++"


_register()
