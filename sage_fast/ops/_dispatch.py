"""Which implementation serves the operators on each device; the only place that looks for one.

The PyTorch reference is registered for every device by the operators themselves. Here the fused ones take its place
where they are there: the C++ extension on the CPU. `SAGE_FAST_OPS=reference` in the environment leaves them out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sage_fast.ops._common import LIBRARY

OPERATORS = ("transition_step", "transition_score", "transition_score_backward")

_serving: dict[str, str] = {}


def implementation(device: torch.device) -> str:
    """What serves the operators on `device`: `C++` or `PyTorch reference`."""
    return _serving.get(device.type, "PyTorch reference")


def register(references: dict[str, Callable[..., Any]]) -> None:
    """Register the fused implementations that are there.

    Args:
        references: operator -> its PyTorch reference, which keeps serving float64 (tests) on the CPU.
    """
    if os.environ.get("SAGE_FAST_OPS") == "reference":
        return
    extension = next(Path(__file__).parents[1].glob("_C.*so"), None)
    if extension is None:
        logging.getLogger("sage_fast").warning(
            "the C++ operators are not built; the CPU runs the slower PyTorch reference (pip install again where torch "
            "and a C++ compiler are there)"
        )
        return
    torch.ops.load_library(extension)
    for name in OPERATORS:
        LIBRARY.impl(name, _single_precision(name, references[name]), "CPU")
    _serving["cpu"] = "C++"


def _single_precision(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    fused = getattr(torch.ops.sage_fast_cpu, name).default

    def serve(*args: Any) -> Any:
        in_double = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args)
        return reference(*args) if in_double else fused(*args)

    return serve
