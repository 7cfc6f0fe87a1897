"""The benchmark runs end to end at a tiny size, refuses to time wrong results, and says what it has no rows for."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sage_fast.cli import main
from sage_fast.measure import operators as bench
from sage_fast.measure import rollout as rollout_bench
from sage_fast.settings import dump
from tests.tiny import settings


def test_bench_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--size", "tiny", "--repetitions", "2", "--json", str(tmp_path / "out" / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "transition_step" in out
    assert "transition_score" in out
    assert "There is no GPU row yet" in out
    result = json.loads((tmp_path / "out" / "b.json").read_text())
    assert {"commit", "date", "device", "threads", "operators", "torch"} <= result["environment"].keys()
    for row in result["rows"]:
        assert set(row["seconds"]) == {"fused", "eager", "compiled", "copy"}
        assert all(times["p20"] <= times["p50"] <= times["p80"] for times in row["seconds"].values())


def test_bench_runs_the_triton_kernels_in_the_interpreter() -> None:
    """Gate and timing of the GPU path, end to end, without a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "sage_fast", "bench", "--size", "tiny", "--repetitions", "1"],
        env=os.environ | {"TRITON_INTERPRET": "1", "SAGE_FAST_OPS": "triton"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Triton interpreter" in done.stdout
    assert "There is no GPU row yet" in done.stdout


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.transition_step
    monkeypatch.setattr(bench, "transition_step", lambda *a: (right(*a)[0], right(*a)[1] + 0.01))
    with pytest.raises(AssertionError):
        bench.measure("transition_step", bench.SIZES["tiny"], torch.device("cpu"), 1)


def test_unknown_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--size", "480p batch 40"]) == 2
    assert "did you mean '480p batch 4'" in capsys.readouterr().err


@pytest.mark.parametrize("operator", ["transition_step", "transition_score"])
def test_copy_moves_the_bytes_of_the_operator(operator: str) -> None:
    case = bench.Case.make(bench.SIZES["tiny"], torch.device("cpu"))
    copies = bench.contenders(operator, compiled=False)["copy"](case)
    assert sum(2 * t.numel() * t.element_size() for t in copies) == bench.bytes_moved(operator, case.x.numel())


def test_rollout_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every path at a tiny size, gate included."""
    file = tmp_path / "rollout.json"
    assert main(["bench", "rollout", "--size", "tiny", "--repetitions", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["part"] for row in rows] == ["forward", "step", "rollout", "train"]
    for row in rows:
        assert {"stock", "eager", "compiled"} <= set(row["seconds"])
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert row["flops"] > 0
        assert row["part"] in out


def test_wrong_velocities_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = rollout_bench.SIZES["tiny"]
    device = torch.device("cpu")
    rung = rollout_bench.Rung(rollout_bench.random_transformer(True, device, torch.float32), size, compiled=False)
    rung.check()
    monkeypatch.setattr(rung.ours.forward, "blocks", rung.ours.forward.blocks[:-1])
    with pytest.raises(AssertionError, match="eager is off by"):
        rung.check()


def test_padding_changes_the_stock_time_alone() -> None:
    """The published pipeline's 1985 text tokens, masked, give the velocity of the valid ones."""
    device = torch.device("cpu")
    size = dataclasses.replace(rollout_bench.SIZES["tiny"], testbed=True)
    rung = rollout_bench.Rung(rollout_bench.random_transformer(True, device, torch.float32), size, compiled=False)
    rung.policies["stock padded"] = rung.stock_padded
    rung.check()


def test_iteration_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(dump(settings(reward__name="testbed")))
    file = tmp_path / "iteration.json"
    assert main(["bench", "iteration", "--config", str(config), "--repetitions", "1", "--json", str(file)]) == 0
    assert "decode" in capsys.readouterr().out
    phases = json.loads(file.read_text())["phases"]
    assert {"rollout", "decode", "anchor", "train", "total"} <= phases.keys()
    assert main(["bench", "iteration"]) == 2
    assert "--config FILE go together" in capsys.readouterr().err
