"""The fused operators. Each is declared once with `torch.library`; implementations register behind the declaration.

They run on whatever device their inputs are on; callers never ask which implementation serves them. The plain PyTorch
reference in each file is the specification. The transitions of the algorithm are here by name; a model imports the
files of those that it runs.
"""

from sage_fast.ops._common import Row
from sage_fast.ops._dispatch import implementation
from sage_fast.ops.transition_score import transition_score
from sage_fast.ops.transition_step import transition_step

__all__ = [
    "Row",
    "implementation",
    "transition_score",
    "transition_step",
]
