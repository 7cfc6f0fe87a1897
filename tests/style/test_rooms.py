"""The layout: imports point one way, and every choice of the settings has its row.

The order of the rooms is the list in CONTRIBUTING.md. import-linter cannot check it: it reads the
folder of the package, and `benchmarks` lies beside it.
"""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import get_args

import pytest

from sage_fast.algorithm import kl_weight, objective, transitions
from sage_fast.config import engines, schema
from sage_fast.models import checkpointing
from sage_fast.models.attention import backends
from sage_fast.parallel import optimizers

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "sage_fast"


def imports_of(file: Path) -> Iterator[str]:
    """Modules that a file imports at any depth, `sage_fast.x.y`.

    A callback names the run that calls it, for type checkers alone: nothing is imported then.
    """
    tree = ast.parse(file.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code() -> dict[str, Path]:
    """Module -> its file; `benchmarks` ships as `sage_fast.benchmarks`."""
    found = {}
    for root, prefix in (
        (PACKAGE, "sage_fast"),
        (REPOSITORY / "benchmarks", "sage_fast.benchmarks"),
    ):
        for file in root.rglob("*.py"):
            parts = [prefix, *file.relative_to(root).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def rooms() -> dict[str, set[str]]:
    """Room -> the rooms that it imports; a room is a folder, or a file directly in the package."""
    arrows: dict[str, set[str]] = {name.split(".")[1]: set() for name in code() if name.count(".")}
    del arrows["__main__"]
    for name, file in code().items():
        own = name.split(".")[1] if name.count(".") else ""
        for module in imports_of(file):
            room = [*module.split("."), ""][1]
            if own in arrows and module.startswith("sage_fast.") and room in arrows and room != own:
                arrows[own].add(room)
    return arrows


def test_contributing_lists_the_rooms_in_the_order_of_their_imports() -> None:
    """So there is no circle, and a reader goes down the list."""
    listed = re.findall(r"^(\d+)\. (`.*)$", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.M)
    floor = {
        room: int(number) for number, names in listed for room in re.findall(r"`(\w+)`", names)
    }
    arrows = rooms()
    assert floor.keys() == arrows.keys()
    up = [(room, below) for room in floor for below in arrows[room] if floor[below] <= floor[room]]
    assert not up, "(room, what it imports from its own line or above)"


@pytest.mark.parametrize(
    ("choice", "table"),
    [
        (schema.Sampler, transitions.SAMPLERS),
        (schema.Reduction, transitions.REDUCTIONS),
        (schema.Surrogate, objective.SURROGATES),
        (schema.Ratio, objective.RATIOS),
        (schema.KLStrategyName, objective.KL_STRATEGIES),
        (schema.Feedback, kl_weight.FEEDBACKS),
        (schema.AttentionBackend, {"auto", *backends.ATTENTION}),
        (schema.Checkpointing, {"auto", *checkpointing.MODES}),
        (schema.LearningRateSchedule, optimizers.SCHEDULES),
        (schema.Optimizer, engines.OPTIMIZERS),
        (schema.EngineName, engines.ENGINES),
        (schema.Tuning, engines.ADAPTERS),
        (schema.DType, engines.BYTES),
    ],
)
def test_every_choice_of_the_settings_has_its_row(choice: object, table: Collection[str]) -> None:
    assert set(get_args(choice)) == set(table)
