"""The examples run, and compute what they say."""

import ast
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).parent.parent / "examples"
FILE = EXAMPLES / "minimal.py"


def test_minimal_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ratio is 1 until the first update and then is not; every stochastic step is trained once
    an iteration."""
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec is not None
    assert spec.loader is not None
    minimal = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "minimal", minimal)
    spec.loader.exec_module(minimal)
    loss_of, seen = minimal.policy_loss, []

    def noting(
        setup: Any, prompts: Any, stored: Any, coefs: Tensor, equalizer: Tensor, advantages: Tensor
    ) -> Tensor:
        loss = loss_of(setup, prompts, stored, coefs, equalizer, advantages)
        plain = -float((equalizer[stored.step] * advantages).mean())
        with torch.no_grad():  # without a clip, and with an advantage of 1, it is the mean ratio
            ratio = -loss_of(
                setup, prompts, stored, coefs, equalizer, torch.full_like(advantages, -1.0)
            )
        seen.append(
            (int(stored.step), float(loss.detach()), plain, float(ratio / equalizer[stored.step]))
        )
        assert advantages.view(minimal.PROMPTS, minimal.GROUP).mean(1).abs().max() < 1e-4
        return loss

    monkeypatch.setattr(minimal, "policy_loss", noting)
    (reward,) = minimal.main(iterations=1)
    assert 0 < reward < 3
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"iteration 0: reward {reward:.4f}, gradient norm ")
    assert math.isfinite(float(line.rpartition(" ")[2]))
    before = len(seen) - len(seen) // minimal.UPDATES
    assert len({step for step, *_ in seen}) == len(seen) >= minimal.STEPS - 1
    for _, loss, plain, ratio in seen[:before]:
        assert loss == pytest.approx(plain, abs=1e-5)
        assert ratio == pytest.approx(-1, abs=1e-5)
    assert max(abs(ratio + 1) for *_, ratio in seen[before:]) > 1e-6


def imported(code: str) -> set[str]:
    """Modules that a piece of code imports; of the package, only itself may be one."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            found.add(
                node.module if node.module.startswith("sage_fast") else node.module.split(".")[0]
            )
    return found


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its code cells, one after the other in one process, as a kernel runs them; pandas is not
    there."""
    notebook = json.loads((EXAMPLES / "first_look.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len(notebook["cells"]) < 8
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert {module for cell in code for module in imported("".join(cell["source"]))} == {
        "sage_fast", "torch", "importlib", "pathlib", "tempfile", "pandas",
    }  # fmt: skip
    script = tmp_path / "cells.py"
    no_pandas = "import sys\nsys.modules['pandas'] = None\n"
    script.write_text(
        "\n\n".join([no_pandas, *("".join(cell["source"]) for cell in code)]), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["sigma", "a", "b", "c", "S_t"] in lines
    moving, still = lines[lines.index(["red", "motion"]) + 1 :][:2]
    assert float(moving[0]) == pytest.approx(float(still[0]), rel=1e-3)
    assert float(moving[1]) > float(still[1]) == 0
    assert [Path(line[0]).name for line in lines if line[0].startswith("/")] == ["report.html"]
    (heading,) = [place for place, line in enumerate(lines) if line[0] == "iteration"]
    assert [line[0] for line in lines[heading + 1 :]] == ["0", "1", "2", "3"]
    assert all(0 < float(line[1]) < 3 for line in lines[heading + 1 :])
