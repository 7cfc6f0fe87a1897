"""The fused operators. Each is declared once with `torch.library`; implementations register behind the declaration.

`transition_step` and `transition_score` run on whatever device their inputs are on; callers never ask which
implementation serves them. The plain PyTorch reference in each file is the specification.
"""

from sage_fast.ops._dispatch import implementation, register
from sage_fast.ops.transition_score import (
    transition_score,
    transition_score_backward_reference,
    transition_score_reference,
)
from sage_fast.ops.transition_step import transition_step, transition_step_reference

__all__ = ["implementation", "transition_score", "transition_step"]

register(
    {
        "transition_step": transition_step_reference,
        "transition_score": transition_score_reference,
        "transition_score_backward": transition_score_backward_reference,
    }
)
