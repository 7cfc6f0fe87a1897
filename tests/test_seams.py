"""The seam for models: who names one, and what importing the trainer loads."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from sage_fast.commands.card import model_card
from sage_fast.config.schema import Config
from sage_fast.models import load
from sage_fast.models.load import find_spec
from sage_fast.models.registry import SHIPPED, families, family
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError
from sage_fast.util.plugins import registered

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "sage_fast"
ITS_OWN = ("models/hunyuan15/", "models/testbed/")
"""The model, and a tiny instance of it."""
KNOWN = re.compile(r"hunyuan|models\.testbed\.(model|text)", re.IGNORECASE)
NEEDED = {
    "cli.py": ["Align HunyuanVideo 1.5 with reward models by SAGE-GRPO."],
    "models/registry.py": ["HunyuanVideo15Transformer3DModel", "sage_fast.models.hunyuan15.spec:HunyuanVideo15",
                           "sage_fast.models.testbed.model:Testbed"],
    "tools/replays.py": ["sage_fast.models.testbed.model.LATENT_SHAPE"],
}  # fmt: skip
"""File -> names of the model that it needs: what users read first, the families that ship, the latents of a check."""


def names(source: str) -> Iterator[str]:
    """Every name in code: identifiers, arguments, keywords, modules with what is imported, strings; no docstrings."""
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
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text


def models_named(source: str) -> list[str]:
    return [name for name in names(source) if KNOWN.search(name)]


def test_only_its_folder_its_benchmarks_and_a_line_of_the_registry_name_a_model() -> None:
    configs = re.compile("|".join(path.stem for path in (REPOSITORY / "configs").glob("*hunyuan*.yaml")))
    found = {
        str(file.relative_to(PACKAGE)): models_named(file.read_text())
        for file in PACKAGE.rglob("*.py")
        if not str(file.relative_to(PACKAGE)).startswith(ITS_OWN)
    }
    found["cli.py"] = [name for name in found["cli.py"] if KNOWN.search(configs.sub("", name))]
    assert {file: told for file, told in found.items() if told} == NEEDED


@pytest.mark.parametrize(
    "source",
    [
        "from sage_fast.models.hunyuan15.text import collate",
        "import sage_fast.models.testbed.text",
        "from sage_fast.models.testbed import model",
        "import models as hunyuan",
        "make(hunyuan_blocks=2)",
        "def make(hunyuan): ...",
        "published = 'a folder of HunyuanVideo 1.5'",
        "print(f'{path}: no HunyuanVideo checkpoint')",
        "if spec.title == 'HunyuanVideo 1.5': ...",
    ],
)
def test_whoever_names_a_model_is_found(source: str) -> None:
    assert models_named(source)


def test_a_docstring_may_name_a_model_as_an_example() -> None:
    assert not models_named('"""As for HunyuanVideo 1.5."""\nMOST = 8192\n"""54 blocks of HunyuanVideo 1.5."""')


MODELS = ("models.hunyuan15.", "models.testbed.model", "models.testbed.text", "testbed")
ENGINES = ("parallel.plain", "parallel.zero", "parallel.settings")
CARRIERS = ("rewards.inline", "rewards.process", "rewards.http", "rewards.server")
REPORT = ("report.page", "report.charts", "report.html", "report.finish", "report.playback")
OTHERS = ("benchmarks", "tools", "cli", "run.trackers", "commands")


def test_importing_the_trainer_or_a_run_imports_no_implementation_and_no_report() -> None:
    code = "import sys, sage_fast.trainer; print(*sys.modules); import sage_fast.run.train; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    both = (*MODELS, *ENGINES, *CARRIERS, *REPORT, *OTHERS)
    for line, absent in zip(done.stdout.splitlines(), ((*both, "models.load", "run", "report"), both), strict=True):
        loaded = line.split()
        assert "sage_fast.models.protocol" in loaded
        heavy = ("matplotlib", "deepspeed", *(f"sage_fast.{part}" for part in absent))
        assert not [name for name in loaded if name.startswith(heavy)]


def test_families_are_found_by_the_class_of_their_transformer() -> None:
    assert list(families())[: len(SHIPPED)] == list(SHIPPED)
    for class_name, name in SHIPPED.items():
        assert {cls.__name__ for cls in family(name).networks.values()} == {class_name}
    spec = find_spec("testbed")
    assert spec.layouts["transformer"]["_class_name"] == "TestbedTransformer"
    assert type(find_spec(f"sage_fast.models.testbed.model:Testbed:{spec.path}")) is type(spec)


def test_a_card_names_the_model_that_was_trained(tmp_path: Path) -> None:
    card = model_card(tmp_path, Config(), find_spec("testbed"), iteration=1, base=None, files=[])
    assert "A LoRA for the testbed, aligned" in card
    assert "hunyuan" not in card.lower()


class Other(Spec):
    """A family whose network has a name of its own."""

    title = "Other"
    networks: ClassVar = {"denoiser": object}


def test_a_family_is_found_whatever_its_network_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "families", lambda: {**SHIPPED, "Net": f"{__name__}:Other"})
    for part, name in (("denoiser", "Net"), ("vae", "AutoencoderKLWan")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(f'{{"_class_name": "{name}"}}')
    assert type(find_spec(str(tmp_path))) is Other
    (tmp_path / "denoiser" / "config.json").write_text('{"_class_name": "Nothing"}')
    with pytest.raises(UserError, match=r"holds a Nothing; expected one of \['Hunyuan"):
        find_spec(str(tmp_path))
    assert type(find_spec(f"{__name__}:Other:{tmp_path}")) is Other


def test_an_installed_package_adds_names_and_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, "package.module:Mine", "sage_fast.models") for name in ("Net", "TestbedTransformer")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [p for p in points if p.group == group])
    assert registered("sage_fast.models", SHIPPED) == {**SHIPPED, "Net": "package.module:Mine"}
    assert registered("sage_fast.rewards", {}) == {}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Wan:folder", "no module 'no_such_module' is installed or in"),
        ("sage_fast.models.protocol:Wan:folder", "expected a subclass of sage_fast.models.spec.Spec, found None"),
        ("sage_fast.models.spec:Cost:folder", "expected a subclass of sage_fast.models.spec.Spec, found <class"),
        ("sage_fast.models.testbed.model:Testbed:folder", "no such folder; expected 'testbed', a local folder"),
        ("random:testbad", "did you mean 'random:testbed'"),
    ],
)
def test_a_family_that_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        find_spec(path)
