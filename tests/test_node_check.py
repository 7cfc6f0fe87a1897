"""`sage-fast doctor --node`, with two processes on the CPU in place of GPUs."""

import logging
import time
from typing import Any

import pytest
import torch

from sage_fast.cli import main
from sage_fast.tools import node_check
from sage_fast.tools.node_check import Rates, check_node

FAST = {0: Rates(700e12, 350e9), 1: Rates(650e12, 340e9)}
HUNG = "no answer"


@pytest.mark.parametrize(
    ("limits", "status", "verdicts"),
    [
        ([], 0, ["ok", "ok", "ok"]),
        (["--min-matmul", "0.000001", "--min-gather", "0.000001"], 0, ["ok", "ok", "ok"]),
        (["--min-matmul", "1e6"], 1, ["slow", "slow", "ok"]),
        (["--min-gather", "1e6"], 1, ["ok", "ok", "slow"]),
    ],
    ids=["no limits", "low limits", "matrix product", "all-gather"],
)
def test_two_processes_are_measured_and_compared(
    limits: list[str], status: int, verdicts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--node", *limits]) == status
    *rows, _, last = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[-3:]] == verdicts
    assert "TFLOP/s" in rows[-2]
    assert "GB/s" in rows[-1]
    assert last.endswith("2 x CPU: passed") == (status == 0)


@pytest.mark.parametrize(
    ("card", "measured", "refused"),
    [
        ("NVIDIA H200", FAST, ""),
        ("NVIDIA H100 80GB HBM3", FAST | {1: Rates(590e12, 340e9)}, "matrix product, rank 1"),
        ("NVIDIA H200", FAST | {0: Rates(700e12, 20e9)}, "all-gather"),
        ("NVIDIA H200", {0: FAST[0]}, "matrix product, rank 1"),
        ("NVIDIA L40S", FAST | {1: Rates(90e12, 20e9)}, ""),
        ("NVIDIA H200", {}, "matrix product, rank 0, matrix product, rank 1"),
    ],
    ids=["fast", "slow GPU", "slow link", "a GPU hangs", "unknown card", "no answer"],
)
def test_the_cards_that_are_known_have_limits(
    card: str,
    measured: dict[int, Rates],
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: card)
    monkeypatch.setattr(node_check, "_measure", lambda *given: (measured, {}))
    assert check_node(None, None, timeout_s=60) == int(bool(refused))
    last = caplog.messages[-1]
    assert last.endswith(f"refused: {refused}" if refused else "passed")


def test_a_node_that_does_not_answer_is_refused_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even the start of a process takes longer."""
    caplog.set_level(logging.INFO)
    start = time.monotonic()
    assert check_node(None, None, timeout_s=0.01) == 1
    assert time.monotonic() - start < 60
    assert HUNG in caplog.text


def answers(number: int, error: Exception) -> Any:
    found: list[Any] = []

    def fail(*given: Any) -> Rates:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node_check, "_rates", fail)
        queue = type("Queue", (), {"put": lambda self, item: found.append(item)})()
        node_check._answer(number, 2, "cpu", "store", 1.0, queue)
    return found


def test_an_error_of_a_driver_is_a_row() -> None:
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
    expected = "ended in RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert answers(1, error) == [(1, expected)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--min-matmul", "600"], "add --node"),
        (["--node", "--json", "rows.json"], "--json is of the checks without --node"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
