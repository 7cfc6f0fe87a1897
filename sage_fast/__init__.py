"""sage-fast: SAGE-GRPO alignment of HunyuanVideo 1.5 with reward models."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

__version__ = "0.1.0"

# In a checkout these three folders are next to the package; once installed they are inside it. They
# have no __init__.py, so that `import kernels` still finds the Hugging Face package in a checkout.
_checkout = Path(__file__).parent.parent
for _name in (
    ("benchmarks", "configs", "kernels")
    if (_checkout / "kernels" / "transition_step.py").is_file()
    else ()
):
    if _spec := PathFinder.find_spec(f"{__name__}.{_name}", [str(_checkout)]):
        globals()[_name] = sys.modules[_spec.name] = module_from_spec(_spec)
