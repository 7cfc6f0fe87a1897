"""The examples run, and compute what they say."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FILE = Path(__file__).parent.parent / "examples" / "minimal.py"


def test_minimal_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The ratio is 1 until the first update and then is not; every stochastic step is trained once an iteration."""
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec is not None
    assert spec.loader is not None
    minimal = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "minimal", minimal)
    spec.loader.exec_module(minimal)
    loss_of, seen = minimal.policy_loss, []

    def noting(setup: Any, prompts: Any, stored: Any, coefs: Tensor, equalizer: Tensor, advantages: Tensor) -> Tensor:
        loss = loss_of(setup, prompts, stored, coefs, equalizer, advantages)
        plain = -float((equalizer[stored.step] * advantages).mean())
        with torch.no_grad():  # without a clip, and with an advantage of 1, it is the mean ratio
            ratio = -loss_of(setup, prompts, stored, coefs, equalizer, torch.full_like(advantages, -1.0))
        seen.append((int(stored.step), float(loss.detach()), plain, float(ratio / equalizer[stored.step])))
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
