"""The seam for models: how one is found, and what importing the trainer loads."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from diffusers import AutoencoderKLWan

from sage_fast.commands.card import model_card
from sage_fast.config.schema import Config
from sage_fast.models.find import find_spec
from sage_fast.models.registry import SHIPPED, family
from sage_fast.models.spec import Spec
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError
from sage_fast.util.plugins import registered

REPOSITORY = Path(__file__).parent.parent
MODELS = ("models.hunyuan15.", "testbed")
ENGINES = ("parallel.plain", "parallel.zero", "parallel.fsdp", "parallel.gradients")
BACKENDS = ("rewards.http", "rewards.server", "rewards.shipped.")
OTHERS = ("benchmarks.", "tools", "cli", "commands")
RUN = ("run", "callbacks", "report")


def test_importing_the_trainer_or_a_run_imports_no_implementation() -> None:
    code = (
        "import sys, sage_fast.trainer; print(*sys.modules); import sage_fast.run.train; "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    both = (*MODELS, *ENGINES, *BACKENDS, *OTHERS)
    with_trainer, with_run = (line.split() for line in done.stdout.splitlines())
    for loaded, absent, packages in (
        (with_trainer, (*both, *RUN, "models.load"), ("deepspeed", "matplotlib")),
        (with_run, both, ("deepspeed",)),
    ):
        assert "sage_fast.models.interface" in loaded
        heavy = (*packages, *(f"sage_fast.{part}" for part in absent))
        assert not [name for name in loaded if name.startswith(heavy)]


def test_families_are_found_by_the_class_of_their_transformer() -> None:
    for class_name, name in SHIPPED.items():
        assert {cls.__name__ for cls in family(name).networks.values()} == {class_name}
    spec = find_spec("testbed")
    assert spec.configs["transformer"]["_class_name"] == "TestbedTransformer"
    assert type(find_spec(f"sage_fast.testbed.tiny_model:Testbed:{spec.path}")) is type(spec)


def test_a_card_names_the_model_that_was_trained(tmp_path: Path) -> None:
    card = model_card(
        RunFolder(tmp_path), Config(), find_spec("testbed"), iteration=1, base=None, files=[]
    )
    assert "A LoRA for the testbed, aligned" in card
    assert "hunyuan" not in card.lower()


class Other(Spec):
    """A family whose network has a name of its own."""

    title = "Other"
    networks: ClassVar = {"denoiser": object}
    autoencoder = AutoencoderKLWan


def test_a_family_is_found_whatever_its_network_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHIPPED, "Net", f"{__name__}:Other")
    for part, name in (("denoiser", "Net"), ("vae", "AutoencoderKLWan")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(f'{{"_class_name": "{name}"}}')
    assert type(find_spec(str(tmp_path))) is Other
    (tmp_path / "denoiser" / "config.json").write_text('{"_class_name": "Nothing"}')
    with pytest.raises(UserError, match=r"holds a Nothing; expected one of \['Hunyuan"):
        find_spec(str(tmp_path))
    assert type(find_spec(f"{__name__}:Other:{tmp_path}")) is Other


def test_an_installed_package_adds_names_and_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, "package.module:Mine", "sage_fast.rewards")
        for name in ("Net", "TestbedTransformer")
    ]
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [p for p in points if p.group == group]
    )
    assert registered("sage_fast.rewards", SHIPPED) == {**SHIPPED, "Net": "package.module:Mine"}
    assert registered("sage_fast.judges", {}) == {}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Wan:folder", "no module 'no_such_module' is installed or in"),
        (
            "sage_fast.models.interface:Wan:folder",
            "expected a subclass of sage_fast.models.spec.Spec, found None",
        ),
        (
            "sage_fast.models.cost:Cost:folder",
            "expected a subclass of sage_fast.models.spec.Spec, found <class",
        ),
        (
            "sage_fast.testbed.tiny_model:Testbed:folder",
            "no such folder; expected one of testbed, testbed-i2v; or a local folder",
        ),
        (
            "testbedd",
            "no such folder; expected one of testbed, testbed-i2v; did you mean 'testbed'?; or",
        ),
        ("random:testbad", "did you mean 'random:testbed'"),
    ],
)
def test_a_family_that_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        find_spec(path)
