"""sage-fast: SAGE-GRPO alignment of HunyuanVideo 1.5 with reward models."""

import os

__version__ = "0.1.0"

# In a checkout `sage_fast.kernels` and `sage_fast.configs` are next to the package; once installed they are inside it.
# kernels/ has no __init__.py, so that `import kernels` still finds the Hugging Face package in a checkout.
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_checkout, "kernels", "transition_step.py")):
    __path__.append(_checkout)
