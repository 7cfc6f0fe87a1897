"""sage-fast: SAGE-GRPO alignment of HunyuanVideo 1.5 with reward models."""

import os

__version__ = "0.1.0"

# `sage_fast.kernels` and `sage_fast.configs` lie beside the package in a checkout (kernels/, without an __init__.py, so
# that `import kernels` finds the Hugging Face package there too) and inside it once installed.
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_checkout, "kernels", "transition_step.py")):
    __path__.append(_checkout)
