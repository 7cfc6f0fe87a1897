"""`sage-fast doctor` on this machine, and on ones where something is wrong."""

import dataclasses
import importlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch.utils._pytree import tree_leaves

from sage_fast import cli
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.ops._dispatch import REFERENCES
from sage_fast.tools import doctor, selftest
from sage_fast.tools.checks import VERDICTS, Check
from sage_fast.tools.operators import OPERATORS

CPU = torch.device("cpu")


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "doctor.json"
    status = cli.main(["doctor", "--json", str(file)])
    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    checks = {check["name"]: check for check in result["checks"]}
    wrong = [check for check in checks.values() if check["verdict"] == "wrong"]
    assert (status, wrong) == (0, [])
    assert {"torch", "triton", "flash-attn", "deepspeed", "C++ compiler", "attention sdpa"} <= set(
        checks
    )
    for operator in ("transition_step", "transition_score", "norm_modulate", "norm_rotate"):
        for dtype in ("float32", "bfloat16"):
            assert checks[f"{operator}, cpu, {dtype}"]["verdict"] == "ok"
    assert checks["norm_rotate, cpu, bfloat16"]["found"].startswith(
        "norm_rotate, norm_rotate_backward: largest error "
    )
    for check in checks.values():
        assert check["verdict"] in VERDICTS
        assert check["found"] in printed
        assert check["advice"] in printed
    assert checks["matrix product"]["found"].endswith(" TFLOP/s in torch.float32")


def test_a_wrong_kernel_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ATTENTION["sdpa"]
    wrong = dataclasses.replace(right, attend=lambda q, k, v: 1.1 * right(q, k, v))
    monkeypatch.setitem(ATTENTION, "sdpa", wrong)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "wrong    attention sdpa" in printed
    assert "1 wrong" in printed.splitlines()[-1]


def fails(*arguments: Any) -> Any:
    raise RuntimeError("PassManager::run failed\nand more")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_that_are_wrong(
    operator: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a value of their result, of a gradient, and by an error."""
    for name in (operator, f"{operator}_backward") if OPERATORS[operator].trained else (operator,):

        def other(*arguments: Any, right: Callable[..., Any] = REFERENCES[name]) -> Any:
            out = right(*arguments)
            first = arguments[-1] if out is None else tree_leaves(out)[0]
            first.data[(-1,) * first.ndim] += first.abs().max()
            return out

        for kernel, expected in (
            (other, f"{name}.0: error "),
            (fails, "it does not run: RuntimeError: "),
        ):
            with monkeypatch.context() as patch:
                patch.setitem(REFERENCES, name, kernel)
                check = selftest.operator_check(operator, CPU, dtype)
            assert check.verdict == "wrong"
            assert check.found.startswith(expected)


def found(checks: Any, name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_packages_that_are_missing_old_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._required(Requirement("torch>=2.11")).verdict == "ok"
    old = doctor._required(Requirement("torch>=99"))
    assert (old.verdict, old.advice) == ("wrong", "pip install 'torch>=99'")
    assert doctor._required(Requirement("no-such-package")).verdict == "wrong"
    version = importlib.metadata.version
    away = {"imageio-ffmpeg", "flash-attn"}

    def without(name: str) -> str:
        if name in away:
            raise importlib.metadata.PackageNotFoundError(name)
        return "9.9" if name == "xformers" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    monkeypatch.setitem(sys.modules, "xformers", None)  # installed, and its import fails
    checks = list(doctor.packages())
    assert found(checks, "imageio-ffmpeg").verdict == "wrong"
    assert found(checks, "flash-attn").verdict == "missing"
    broken = found(checks, "xformers")
    assert broken.verdict == "wrong"
    assert broken.found.startswith("9.9 is installed and cannot be imported: ModuleNotFoundError")


def test_the_table_comes_whatever_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without diffusers, the rows before it; with a part that ends in an error, the parts after
    it."""
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "sage_fast.tools.selftest")
        without.delattr("sage_fast.tools.selftest")
        without.setitem(sys.modules, "sage_fast.models.attention.trial", None)
        assert cli.main(["doctor"]) == 1
        printed = capsys.readouterr().out
        assert "ok       torch" in printed
        assert re.search(r"^wrong    the package +ended in ModuleNotFoundError: ", printed, re.M)
    monkeypatch.setattr(selftest, "operators", lambda device: fails())
    names = {check.name: check for check in selftest.checks(CPU)}
    assert names["operators"].found == "ended in RuntimeError: PassManager::run failed"
    assert names["attention sdpa"].verdict == "ok"


def test_a_graph_is_recorded_replayed_and_compared() -> None:
    def sound(run: Any) -> Any:
        output = run()[0].clone()
        return (lambda: output.copy_(run()[0])), (output,), 0

    def stale(run: Any) -> Any:
        return (lambda: None), (run()[0].clone(),), 0

    def off(run: Any) -> Any:
        output = run()[0].clone()
        return (lambda: output.copy_(1.001 * run()[0])), (output,), 0

    name = "CUDA graphs"
    assert selftest.check_replay(name, sound, CPU).verdict == "ok"
    wrong = selftest.check_replay(name, stale, CPU)
    assert (wrong.verdict, wrong.found) == ("wrong", "a replay changes nothing")
    assert selftest.check_replay(name, off, CPU).found.startswith("a replay is off by ")
    assert list(selftest.cuda_graphs(CPU)) == [Check(name, "missing", "no GPU")]


@pytest.mark.gpu
def test_a_gpu_records_and_replays_a_graph() -> None:
    (check,) = selftest.cuda_graphs(torch.device("cuda", 0))
    assert check.verdict == "ok", check.found


def test_the_file_has_every_row_before_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hangs, or is killed, leaves the rows before it."""
    file = tmp_path / "doctor.json"

    def hangs(device: torch.device, ceiling: float) -> Check:
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "attention", hangs)
    with pytest.raises(KeyboardInterrupt):
        doctor.doctor(file)
    names = [check["name"] for check in json.loads(file.read_text())["checks"]]
    assert {"torch", "transition_step, cpu, float32"} <= set(names)
    assert "attention sdpa" not in names


def test_a_package_that_runs_from_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert found(doctor.packages(), "sage-fast").verdict == "wrong"


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = found(doctor.tools(CPU), "C++ compiler")
    assert (check.verdict, check.found) == ("missing", "none; the C++ operators need it")
