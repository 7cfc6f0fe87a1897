"""The layout: imports point one way, files stay readable, and a name added in one of its two places fails loudly."""

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "sage_fast"


def imports_of(file: Path) -> Iterator[str]:
    """Modules that a file imports at any depth, `sage_fast.x.y`; those only for type checkers do not count."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms() -> dict[str, set[str]]:
    """Room -> the rooms that it imports; a room is a folder of the package, or a file on its ground floor."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__init__"}
    arrows: dict[str, set[str]] = {name: set() for name in names}
    for file in PACKAGE.rglob("*.py"):
        own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imports_of(file):
            parts = module.split(".")
            if own in names and parts[0] == "sage_fast" and len(parts) > 1 and parts[1] in names - {own}:
                arrows[own].add(parts[1])
    return arrows


def test_there_is_no_circle_among_rooms() -> None:
    left = rooms()
    assert {"models", "rollout", "trainer", "run", "measure", "report"} <= left.keys()
    while free := [name for name, below in left.items() if not below & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: { {name: sorted(below & left.keys()) for name, below in left.items()} }"


def test_contributing_lists_the_rooms_in_the_order_of_their_imports() -> None:
    listed = re.findall(r"^(\d+)\. (`.*)$", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.M)
    floor = {room: int(number) for number, names in listed for room in re.findall(r"`(\w+)`", names)}
    arrows = rooms()
    assert floor.keys() == arrows.keys() - {"__main__"}
    up = [(room, below) for room in floor for below in arrows[room] if floor[below] <= floor[room]]
    assert not up, "(room, what it imports from its own line or above)"


@pytest.mark.parametrize("folder", ["sage_fast", "kernels", "csrc", "benchmarks", "studies"])
def test_files_can_be_read_in_one_go(folder: str) -> None:
    files = [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h", ".j2")]
    assert len(files) > 3
    files = [path for path in files if path != PACKAGE / "cli.py"]  # one table
    long = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in files}
    long.pop("sage_fast/config/schema.py", None)  # one tree of settings
    assert {name: lines for name, lines in long.items() if lines > 400} == {}


@pytest.mark.parametrize(
    ("file", "old", "new", "module", "message"),
    [
        ("config/schema.py", '"dual"]', '"dual", "triple"]', "objective", "KL_STRATEGIES"),
        ("objective.py", '    "none": KLStrategy(', '    "triple": KLStrategy(anchor="moving", velocity=True),\n'
         '    "none": KLStrategy(', "objective", "config.KLStrategyName"),
        ("config/schema.py", '"nft"]', '"nft", "linear"]', "objective", "SURROGATES"),
        ("config/schema.py", '"share", "none"]', '"share", "mine", "none"]', "objective", "FEEDBACKS"),
        ("config/schema.py", '"exact", "ode"]', '"exact", "ode", "heun"]', "transitions", "SAMPLERS"),
        ("transitions.py", 'SAMPLERS = {', 'SAMPLERS = {"heun": _ode, ', "transitions", "config.Sampler"),
        ("config/schema.py", '"xformers"]', '"xformers", "sage"]', "models.attention", "ATTENTION"),
        ("models/attention.py", '    "sdpa": _sdpa,', '    "sdpa": _sdpa,\n    "sage": _sdpa,', "models.attention",
         "config.AttentionBackend"),
        ("config/schema.py", '"adamw8bit"]', '"adamw8bit", "sgd"]', "optimizers", "OPTIMIZERS"),
        ("optimizers.py", '    "linear"', '    "root": lambda progress: 1 - progress**0.5,\n    "linear"', "optimizers",
         "config.Schedule"),
    ],
    ids=["strategy named", "strategy written", "surrogate named", "feedback named", "sampler named", "sampler written",
         "backend named", "backend written", "optimizer named", "schedule written"],
)  # fmt: skip
def test_a_name_added_in_one_place_only_fails_at_import(
    file: str, old: str, new: str, module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (PACKAGE / file).read_text().count(old) == 1, f"{file} no longer holds {old!r} once"

    def import_again(*files: str) -> None:
        for path in files:
            text = (PACKAGE / path).read_text()
            fresh = types.ModuleType(f"sage_fast.{path.removesuffix('.py').replace('/', '.')}")
            monkeypatch.setitem(sys.modules, fresh.__name__, fresh)
            exec(compile(text.replace(old, new) if path == file else text, path, "exec"), vars(fresh))

    with pytest.raises(AssertionError, match=message):
        import_again(file, f"{module.replace('.', '/')}.py")
