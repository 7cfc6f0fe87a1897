"""DeepSpeed's internals: an untested version warns once and names the tested one."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import sage_fast

REPOSITORY = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def engine() -> Any:
    """The engine's module; DeepSpeed takes seconds to import."""
    return importlib.import_module("sage_fast.parallel.zero")


@pytest.mark.parametrize("version", ["0.20.0", "1.19.8", "0.18.9"])
def test_another_minor_version_warns_once(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = warnings_of(version, monkeypatch)
    assert len(warnings) == 1
    assert re.search(
        rf"DeepSpeed {version} is not\s+tested.*pip\s+install\s+'deepspeed=={engine().TESTED}\.\*'",
        warnings[0],
        re.S,
    )


def test_the_tested_version_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not warnings_of(f"{engine().TESTED}.99", monkeypatch)


def warnings_of(version: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of two engines in one process."""
    found: list[str] = []
    zero = engine()
    zero.check_version.cache_clear()
    monkeypatch.setattr("deepspeed.__version__", version)
    monkeypatch.setattr(zero.log, "warning", found.append)
    zero.check_version()
    zero.check_version()
    zero.check_version.cache_clear()
    return found


def test_the_extra_pins_the_tested_minor_version() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    tested = engine().TESTED
    major, minor = map(int, tested.split("."))
    (extra,) = extras["deepspeed"]
    assert extra.startswith(f"deepspeed>={tested}.")
    assert extra.endswith(f",<{major}.{minor + 1}")
    assert f"deepspeed=={tested}." in (REPOSITORY / "constraints.txt").read_text()


def test_no_other_file_reaches_into_deepspeed() -> None:
    """Search for names that DeepSpeed gives weights (`ds_...`) and for undocumented names of its
    optimizers."""
    inside = re.compile(
        r"\.ds_\w+|\"ds_\w+\"|_hp_mapping|bit16_|_WORLD_GROUP|fp32_partitioned|_opt_state_partition|parameter_offload"
        r"|persistent_parameters|empty_partition_cache|refresh_fp32|\.all_gather\(self|deepspeed\.optimizer\.\w"
    )
    package = Path(sage_fast.__file__).parent
    found = {
        f"{file.relative_to(package)}: {match[0]}"
        for file in package.rglob("*.py")
        if file.name != "zero.py"
        for match in inside.finditer(file.read_text())
    }
    assert not found
