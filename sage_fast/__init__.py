"""sage-fast: SAGE-GRPO alignment of HunyuanVideo 1.5 with reward models.

    import sage_fast as sf

    config = sf.load("config.yaml", {"train.iterations": 50})
    run = sf.train(config)
    comparison = sf.evaluate(["base", run.folder])
    files = sf.sample(run.folder, prompts=["a small red ball moves left quickly"])

`__all__` is the public interface; docs/reference/python.md describes it. Importing the package
takes no time: each name is imported when it is first used.
"""

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Type checkers and editors read the same names here; tests/test_api.py compares the two lists.
if TYPE_CHECKING:
    from sage_fast.algorithm.transitions import TransitionTable as TransitionTable
    from sage_fast.algorithm.transitions import sigma_schedule as sigma_schedule
    from sage_fast.algorithm.transitions import transition_table as transition_table
    from sage_fast.callbacks.interface import Callback as Callback
    from sage_fast.callbacks.interface import Histogram as Histogram
    from sage_fast.callbacks.interface import Rollouts as Rollouts
    from sage_fast.callbacks.profiler import Profiler as Profiler
    from sage_fast.commands.eval import evaluate as evaluate
    from sage_fast.commands.sample import sample as sample
    from sage_fast.config.loader import build as build
    from sage_fast.config.loader import load as load
    from sage_fast.config.schema import Config as Config
    from sage_fast.eval.comparison import Comparison as Comparison
    from sage_fast.models.cost import Cost as Cost
    from sage_fast.models.decoder import Decoder as Decoder
    from sage_fast.models.interface import BatchConditions as BatchConditions
    from sage_fast.models.interface import Condition as Condition
    from sage_fast.models.interface import ConditionTable as ConditionTable
    from sage_fast.models.interface import Encoder as Encoder
    from sage_fast.models.interface import Inputs as Inputs
    from sage_fast.models.lora.export_target import ExportTarget as ExportTarget
    from sage_fast.models.policy import Policy as Policy
    from sage_fast.models.spec import Distillation as Distillation
    from sage_fast.models.spec import Spec as Spec
    from sage_fast.ops.transition_score import transition_score as transition_score
    from sage_fast.ops.transition_step import transition_step as transition_step
    from sage_fast.rewards.interface import Reward as Reward
    from sage_fast.run import read_metrics as read_metrics
    from sage_fast.run.train import Run as Run
    from sage_fast.run.train import train as train
    from sage_fast.trainer import Trainer as Trainer
    from sage_fast.util.captions import Caption as Caption
    from sage_fast.util.console import log_to_screen as log_to_screen
    from sage_fast.util.errors import RunError as RunError
    from sage_fast.util.errors import Stopped as Stopped
    from sage_fast.util.errors import UserError as UserError

# The only strings that name our own modules: an import of all of them would load PyTorch, which
# takes seconds, with every `import sage_fast`.
_MODULES = {
    # a run, from its settings to its videos
    "load": "sage_fast.config.loader",
    "build": "sage_fast.config.loader",
    "Config": "sage_fast.config.schema",
    "train": "sage_fast.run.train",
    "Run": "sage_fast.run.train",
    "read_metrics": "sage_fast.run",
    "evaluate": "sage_fast.commands.eval",
    "Comparison": "sage_fast.eval.comparison",
    "sample": "sage_fast.commands.sample",
    "log_to_screen": "sage_fast.util.console",
    # what a run calls
    "Callback": "sage_fast.callbacks.interface",
    "Rollouts": "sage_fast.callbacks.interface",
    "Histogram": "sage_fast.callbacks.interface",
    "Profiler": "sage_fast.callbacks.profiler",
    "Trainer": "sage_fast.trainer",
    # the algorithm and its operators
    "sigma_schedule": "sage_fast.algorithm.transitions",
    "transition_table": "sage_fast.algorithm.transitions",
    "TransitionTable": "sage_fast.algorithm.transitions",
    "transition_step": "sage_fast.ops.transition_step",
    "transition_score": "sage_fast.ops.transition_score",
    # what a reward or a model of your own implements
    "Reward": "sage_fast.rewards.interface",
    "Spec": "sage_fast.models.spec",
    "Cost": "sage_fast.models.cost",
    "Distillation": "sage_fast.models.spec",
    "ExportTarget": "sage_fast.models.lora.export_target",
    "Policy": "sage_fast.models.policy",
    "Decoder": "sage_fast.models.decoder",
    "Caption": "sage_fast.util.captions",
    "Encoder": "sage_fast.models.interface",
    "Condition": "sage_fast.models.interface",
    "ConditionTable": "sage_fast.models.interface",
    "BatchConditions": "sage_fast.models.interface",
    "Inputs": "sage_fast.models.interface",
    # errors
    "UserError": "sage_fast.util.errors",
    "RunError": "sage_fast.util.errors",
    "Stopped": "sage_fast.util.errors",
}
"""Public name -> the module that defines it."""

__all__ = list(_MODULES)

if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(_unknown(name))
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, for completion in an interpreter or a notebook."""
    return sorted([*__all__, "__version__"])


def _unknown(name: str) -> str:
    """Say what is wrong with a name that the package does not have."""
    import difflib

    close = difflib.get_close_matches(name, _MODULES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "dir(sage_fast) lists the names"
    return f"module 'sage_fast' has no attribute {name!r}; {hint}"


def _find_folders_beside() -> None:
    """Make three folders next to the package importable as parts of it, as they are once installed.

    They have no __init__.py, so that `import kernels` still finds the Hugging Face package in a
    checkout.
    """
    checkout = Path(__file__).parent.parent
    if not (checkout / "kernels" / "transition_step.py").is_file():
        return  # installed
    for name in ("benchmarks", "configs", "kernels"):
        spec = PathFinder.find_spec(f"{__name__}.{name}", [str(checkout)])
        if spec is not None:
            module = module_from_spec(spec)
            sys.modules[spec.name] = module
            globals()[name] = module


_find_folders_beside()
