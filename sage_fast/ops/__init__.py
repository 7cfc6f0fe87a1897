"""The fused operators.

Each is declared once with `torch.library`; its implementations register behind the declaration. An operator runs on the
device of its inputs, and callers never choose the implementation. The plain PyTorch reference in each file is the
specification.
"""

from sage_fast.ops._common import Row
from sage_fast.ops._dispatch import implementation
from sage_fast.ops.gated_norm import gated_norm
from sage_fast.ops.norm_modulate import norm_modulate, residual_norm
from sage_fast.ops.norm_rotate import norm_rotate
from sage_fast.ops.transition_score import transition_score
from sage_fast.ops.transition_step import transition_step

__all__ = [
    "Row",
    "gated_norm",
    "implementation",
    "norm_modulate",
    "norm_rotate",
    "residual_norm",
    "transition_score",
    "transition_step",
]
