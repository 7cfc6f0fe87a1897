"""Only its folder, its benchmarks and a line of the registry name a model."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "sage_fast"
ITS_OWN = ("models/hunyuan15/", "models/wan/", "testbed/")
"""The models, and a tiny instance of one."""
KNOWN = re.compile(
    r"[Hh]unyuan|\bwan\b|\bWan[A-Z0-9]|KLWan|sage_fast\.testbed\.(tiny_model|text_encoder)"
)
NEEDED = {
    "cli.py": ["Align video generators with reward models by SAGE-GRPO: HunyuanVideo 1.5, Wan."],
    "models/registry.py": [
        "HunyuanVideo15Transformer3DModel",
        "WanTransformer3DModel",
        "sage_fast.models.hunyuan15.spec:HunyuanVideo15",
        "sage_fast.testbed.tiny_model:Testbed",
        "sage_fast.models.wan.spec:Wan",
    ],
}
"""File -> names of the model that it needs: what users read first, the families that ship."""


def names(source: str) -> Iterator[str]:
    """Every name in code: identifiers, arguments, keywords, modules with what is imported, strings;
    no docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.alias(asname=str(name)):
                yield name
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.arg(arg=name)
                | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text


def models_named(source: str) -> list[str]:
    return [name for name in names(source) if KNOWN.search(name)]


def test_only_its_folder_its_benchmarks_and_a_line_of_the_registry_name_a_model() -> None:
    shipped = [re.escape(path.stem) for path in (REPOSITORY / "configs").glob("*.yaml")]
    configs = re.compile("|".join(shipped))
    found = {
        str(file.relative_to(PACKAGE)): models_named(file.read_text())
        for file in PACKAGE.rglob("*.py")
        if not str(file.relative_to(PACKAGE)).startswith(ITS_OWN)
    }
    found["cli.py"] = [name for name in found["cli.py"] if KNOWN.search(configs.sub("", name))]
    assert {file: told for file, told in found.items() if told} == NEEDED


def test_every_family_has_its_folder_here() -> None:
    """A new folder of a model is one whose names this test has to know."""
    families = {f"models/{path.parent.name}/" for path in (PACKAGE / "models").glob("*/spec.py")}
    assert {*ITS_OWN} == families | {"testbed/"}
