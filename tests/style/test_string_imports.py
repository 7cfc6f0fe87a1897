"""A module of ours is imported, not named in a string, which no type checker or reader follows.

Tables of plug-ins are apart: their rows are imported only when a setting names them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.style.test_rooms import PACKAGE, REPOSITORY, code

FOLDERS = (PACKAGE, *(REPOSITORY / name for name in ("benchmarks", "studies", "scripts")))

TABLES = {
    "sage_fast/__init__.py _MODULES": "public names, each imported when it is first used",
    "sage_fast/cli.py load": "a command is imported when it is called",
    "sage_fast/config/engines.py ENGINES": "one engine of those that there are",
    "sage_fast/config/engines.py _zero": "a row of ENGINES",
    "sage_fast/config/reward_names.py GROUP": "an entry-point group, not the module of that name",
    "sage_fast/config/reward_names.py SHIPPED": "rewards",
    "sage_fast/data/prompts.py SETS": "sets of prompts",
    "sage_fast/models/attention/backends.py ATTENTION": "attention backends",
    "sage_fast/models/registry.py SHIPPED": "families of models",
    "sage_fast/ops/_dispatch.py _triton": "one kernel for each operator, never loaded by CPU users",
    "sage_fast/tools/doctor.py tools": "asks whether the kernels are installed",
}
"""File and definition -> what its strings are, which begin with the path of a module of ours."""


def modules() -> set[str]:
    """Every module of ours, as `sage_fast.x.y`."""
    kernels = {f"sage_fast.kernels.{file.stem}" for file in (REPOSITORY / "kernels").glob("*.py")}
    folders = {"sage_fast.kernels", "sage_fast.benchmarks"}
    return (code().keys() | kernels | folders) - {"sage_fast"}


def string_imports(file: Path, known: set[str]) -> Iterator[tuple[str, str]]:
    """(definition, string) for each string that is the path of a module, or begins to be made
    one."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        definition = getattr(statement, "name", "") or getattr(targets[0], "id", "")

        for node in ast.walk(statement):
            if isinstance(node, ast.JoinedStr):
                text = ast.unparse(node)
                is_module = text[2:].startswith("sage_fast.")  # after f"
            else:
                text = getattr(node, "value", None)
                is_module = isinstance(text, str) and text.partition(":")[0] in known
            if is_module:
                yield definition, text


def test_no_string_names_a_module_outside_the_tables() -> None:
    """Every table is found, so the search sees each kind of string that stands in them."""
    known = modules()
    found = {
        f"{file.relative_to(REPOSITORY)} {definition}": text
        for folder in FOLDERS
        for file in sorted(folder.rglob("*.py"))
        for definition, text in string_imports(file, known)
    }
    assert {place: text for place, text in found.items() if place not in TABLES} == {}
    assert found.keys() == TABLES.keys()
