"""The seam for models: who names one, and what importing the trainer loads."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from sage_fast.config.schema import Config
from sage_fast.models import load
from sage_fast.models.load import find_spec
from sage_fast.models.protocol import Spec
from sage_fast.models.registry import SHIPPED, families, family
from sage_fast.run.card import model_card
from sage_fast.util.errors import UserError

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "sage_fast"
ITS_OWN = ("models/hunyuan15/", "models/testbed/", "tools/selftest.py")
"""The model, a tiny instance of it, and the check that it works here."""


def names(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every name in the code of a file: identifiers, modules, and strings of one word."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        if isinstance(node, ast.alias | ast.ClassDef | ast.FunctionDef):
            yield node.lineno, node.name
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value.strip()):
            yield node.lineno, node.value


def test_only_its_folder_its_benchmarks_and_a_line_of_the_registry_name_a_model() -> None:
    configs = {path.stem for path in (REPOSITORY / "configs").glob("*.yaml")}
    found = {
        (str(file.relative_to(PACKAGE)), line)
        for file in PACKAGE.rglob("*.py")
        if not str(file.relative_to(PACKAGE)).startswith(ITS_OWN)
        for line, name in names(file)
        if "hunyuan" in name.lower() and name not in configs
    }
    assert {file for file, _ in found} == {"models/registry.py"}
    assert len(found) == 1


MODELS = ("models.hunyuan15.", "models.testbed.model", "models.testbed.text", "testbed")
ENGINES = ("parallel.plain", "parallel.zero", "parallel.settings")
CARRIERS = ("rewards.inline", "rewards.process", "rewards.http", "rewards.server")
REPORT = ("report.page", "report.charts", "report.html", "report.comparison", "report.playback")
OTHERS = ("benchmarks", "tools", "cli", "run.trackers", "run.eval_command", "run.grid")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("trainer", (*MODELS, *ENGINES, *CARRIERS, *REPORT, *OTHERS, "models.load", "run", "report")),
        ("run.train", (*MODELS, *ENGINES, *CARRIERS, *REPORT, *OTHERS)),
    ],
)
def test_importing_the_trainer_or_a_run_imports_no_implementation_and_no_report(
    module: str, absent: tuple[str, ...]
) -> None:
    code = f"import sys, sage_fast.{module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    loaded = done.stdout.split()
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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Wan:folder", "expected 'package.module:Name' of a Spec: No module named 'no_such_module'"),
        ("sage_fast.models.protocol:Wan:folder", "has no attribute 'Wan'"),
        ("sage_fast.models.protocol:Cost:folder", "Cost is no subclass of sage_fast.models.protocol.Spec"),
        ("sage_fast.models.testbed.model:Testbed:folder", "no such folder; expected 'testbed', a local folder"),
        ("random:testbad", "did you mean 'random:testbed'"),
    ],
)
def test_a_family_that_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        find_spec(path)
