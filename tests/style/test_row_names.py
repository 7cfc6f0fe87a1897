"""No code compares the name of a table's row: what a row can do stands in the row."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from sage_fast.algorithm.kl_weight import FEEDBACKS
from sage_fast.algorithm.objective import KL_STRATEGIES, RATIOS, SURROGATES
from sage_fast.algorithm.transitions import REDUCTIONS, SAMPLERS
from sage_fast.callbacks.trackers import TRACKERS
from sage_fast.config.engines import ADAPTERS, BYTES, ENGINES, OPTIMIZERS
from sage_fast.config.reward_names import SHIPPED as REWARDS
from sage_fast.data.prompts import SETS
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.models.checkpointing import MODES
from sage_fast.models.registry import CHECKPOINTS
from sage_fast.models.registry import SHIPPED as FAMILIES
from sage_fast.parallel.optimizers import SCHEDULES

REPOSITORY = Path(__file__).parents[2]

TABLES: dict[str, tuple[Iterable[str], ...]] = {
    "sage_fast/algorithm/objective.py": (SURROGATES, RATIOS, KL_STRATEGIES),
    "sage_fast/algorithm/kl_weight.py": (FEEDBACKS,),
    "sage_fast/algorithm/transitions.py": (SAMPLERS, REDUCTIONS),
    "sage_fast/config/engines.py": (ENGINES, OPTIMIZERS, ADAPTERS, BYTES),
    "sage_fast/config/reward_names.py": (REWARDS,),
    "sage_fast/data/prompts.py": (SETS,),
    "sage_fast/models/attention/backends.py": (ATTENTION,),
    "sage_fast/models/checkpointing.py": (MODES,),
    "sage_fast/models/registry.py": (FAMILIES, CHECKPOINTS),
    "sage_fast/parallel/optimizers.py": (SCHEDULES,),
    "sage_fast/callbacks/trackers.py": (TRACKERS,),
}
"""File -> the tables in it. A table's own file may name its rows."""
ALLOWED = {
    "'linear' in recomputed": "a part of a block's FLOPs",
    "'attention' in recomputed": "a part of a block's FLOPs",
    "op == 'mean'": "an operation over the ranks",
    "'attention' in row": "a column of a benchmark's rows",
    "name == DEFAULT": "the name of a study's variant",
    "name != DEFAULT": "the name of a study's variant",
    "label.startswith('sage')": "a study's own label of a curve",
    "name == 'sage'": "a claim about this sampler",
}
"""Expression -> what its word is, where it is no row's name or a study is about the row."""


def row_names(own: str = "") -> set[str]:
    """Names of all rows, except for those in the file `own`."""
    return {
        name for file, tables in TABLES.items() if file != own for table in tables for name in table
    }


def comparisons(source: str, rows: set[str]) -> Iterator[str]:
    """Expressions that compare something with the name of a row, spelled out or kept in a
    variable."""
    tree = ast.parse(source)
    fields = {
        id(statement)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
    }
    kept = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and id(node) not in fields
        for target in getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }

    def texts(side: ast.AST) -> Iterator[str]:
        side = kept.get(side.id, side) if isinstance(side, ast.Name) else side
        for part in getattr(side, "elts", [side]):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value

    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                named = any(text in rows for side in (left, *others) for text in texts(side))
            case ast.match_case(pattern=pattern):
                values = (
                    part.value for part in ast.walk(pattern) if isinstance(part, ast.MatchValue)
                )
                named = any(text in rows for value in values for text in texts(value))
            case ast.Call(
                func=ast.Attribute(attr="startswith" | "endswith" as how), args=[given, *_]
            ):
                named = any(
                    text and getattr(row, how)(text) for text in texts(given) for row in rows
                )
            case _:
                continue
        if named:
            yield ast.unparse(node)


def test_no_code_compares_the_name_of_a_row() -> None:
    found = {}
    for room in ("sage_fast", "kernels", "benchmarks", "studies", "scripts"):
        for file in sorted((REPOSITORY / room).rglob("*.py")):
            name = str(file.relative_to(REPOSITORY))
            found |= dict.fromkeys(comparisons(file.read_text(), row_names(name)), name)
    assert {text: name for text, name in found.items() if text not in ALLOWED} == {}
    assert found.keys() >= ALLOWED.keys()
