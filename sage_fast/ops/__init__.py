"""The fused operators.

Each is declared once with `torch.library`; its implementations register behind the declaration. An
operator runs on the device of its inputs, and callers never choose the implementation. The plain
PyTorch reference in each file is the specification. This module re-exports the transition
operators; a model imports the files of the others that it runs.
"""

from sage_fast.ops._common import Coefficients as Coefficients
from sage_fast.ops._dispatch import implementation as implementation
from sage_fast.ops.transition_score import transition_score as transition_score
from sage_fast.ops.transition_step import transition_step as transition_step
