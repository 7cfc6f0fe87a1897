"""Where the GPU implementations register. Without Triton the PyTorch reference serves CUDA tensors too."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import LIBRARY
from sage_fast.ops.transition_score import transition_score_backward_reference, transition_score_reference
from sage_fast.ops.transition_step import transition_step_reference

HAS_TRITON = importlib.util.find_spec("triton") is not None


def _triton(module: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher `sage_fast.kernels.<module>.<name>`, imported when first called: CPU users never load Triton."""

    def launch(*args: Tensor | None) -> Any:
        if any(arg is not None and arg.dtype == torch.float64 for arg in args):
            return reference(*args)  # the kernels compute in fp32
        return getattr(importlib.import_module(f"sage_fast.kernels.{module}"), name)(*args)

    return launch


if HAS_TRITON:
    for _module, _name, _reference in (
        ("transition_step", "transition_step", transition_step_reference),
        ("transition_score", "transition_score", transition_score_reference),
        ("transition_score", "transition_score_backward", transition_score_backward_reference),
    ):
        LIBRARY.impl(_name, _triton(_module, _name, _reference), "CUDA")
