"""The callback that profiles chosen iterations of a run."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast import Profiler
from sage_fast.config.loader import build
from sage_fast.util import profiling
from sage_fast.util.errors import UserError
from tests.tiny import settings, tiny_trainer


def iterate(profiler: Profiler, folder: Path, count: int, **overrides: Any) -> None:
    """Run `count` iterations of the tiny trainer with the callback, as a run calls it."""
    trainer = tiny_trainer(settings(train__iterations=count, **overrides))
    run: Any = SimpleNamespace(folder=folder, trainer=trainer, config=trainer.config, iteration=0)
    profiler.on_run_start(run)
    for index in range(count):
        profiler.on_iteration_start(run, index)
        row: dict[str, Any] = trainer.iteration(index)
        run.iteration = index + 1
        profiler.on_iteration_end(run, row)


def events_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_chosen_iteration_leaves_its_trace_and_no_other_does(tmp_path: Path) -> None:
    iterate(Profiler(iterations=[2]), tmp_path, 3)
    trace = "profiles/iteration-000002/rank-000.json.gz"
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.*")}
    assert files == {trace, "profiles/iteration-000002/rates.txt"}

    events = events_of(tmp_path / trace)
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"iteration 2", "rollout", "transition", "reward", "train", "backward"} <= ranges
    assert any(event["name"] == "aten::mm" for event in events), "operators too"
    assert not any("memory" in event["name"] for event in events), "only on request"
    assert not profiling._tools, "ranges are off again"


def test_the_rates_of_a_profiled_iteration_are_logged_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.util.console.PACKAGE.propagate", True)
    caplog.set_level("INFO", "sage_fast")
    iterate(Profiler(iterations=[2]), tmp_path, 2)
    file = tmp_path / "profiles/iteration-000002/rates.txt"
    titles, *rows = file.read_text().splitlines()
    assert titles.split()[:4] == ["seconds", "calls", "TFLOP/s", "GB/s"]
    cells = {row[46:]: row[:44].split() for row in rows}
    # seconds, calls and a rate; a small matmul has two
    counts = {name: len(numbers) for name, numbers in cells.items()}
    assert counts["attention forward"] == counts["attention backward"] == 3
    assert counts["matmuls, a side below 256"] == 4
    assert counts["norm_rotate"] == counts["transition_step"] == 3
    assert all(float(numbers[-1]) > 0 for numbers in cells.values())
    logged = [record.getMessage() for record in caplog.records]
    assert logged[logged.index(titles) :][: 1 + len(rows)] == [titles, *rows]


def test_only_a_profiled_iteration_runs_its_backward_in_the_calling_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the range of the backward is, so that its kernels belong to it."""
    multithreaded: list[bool] = []
    backward = Tensor.backward

    def noted(*arguments: Any, **options: Any) -> None:
        multithreaded.append(torch._C._is_multithreading_enabled())
        backward(*arguments, **options)

    monkeypatch.setattr(Tensor, "backward", noted)
    iterate(Profiler(iterations=[2]), tmp_path, 3)
    count = len(multithreaded) // 3
    assert multithreaded == [True] * count + [False] * count + [True] * count


def test_allocations_are_in_the_trace_on_request(tmp_path: Path) -> None:
    iterate(Profiler(iterations=[1], memory=True), tmp_path, 1)
    events = events_of(tmp_path / "profiles/iteration-000001/rank-000.json.gz")
    assert any(event["name"] == "[memory]" for event in events)


def test_an_iteration_that_fails_leaves_nothing_on(tmp_path: Path) -> None:
    profiler = Profiler(iterations=[1])
    run: Any = SimpleNamespace(
        folder=tmp_path, trainer=SimpleNamespace(device=torch.device("cpu")), config=settings()
    )
    profiler.on_iteration_start(run, 0)
    assert profiling._tools
    assert not torch._C._is_multithreading_enabled()
    profiler.on_exception(run, RuntimeError("a reward failed"))
    assert not profiling._tools
    assert torch._C._is_multithreading_enabled()
    assert not torch.autograd.profiler.profile(enabled=False).enabled
    with torch.profiler.profile():  # a profiler that is still on would refuse another
        pass
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.util.console.PACKAGE.propagate", True)
    (tmp_path / "profiles").write_text("a file")
    iterate(Profiler(iterations=[1]), tmp_path, 2)
    said = " ".join(caplog.text.split())
    assert re.search("note: no profile of iteration 1: .*profiles", said)
    assert not profiling._tools


def test_iterations_are_checked_where_they_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile\.iterations = \[0\]: expected iterations as"):
        Profiler(iterations=[0])
    with pytest.raises(UserError, match="expected a list of whole numbers, such as"):
        build({"profile.iterations": 2})
    with pytest.raises(UserError, match=r"expected at most train\.iterations = 5"):
        build({"profile.iterations": [6], "train.iterations": 5})
    with pytest.raises(UserError, match=r"iterations = \[3\]: expected at most train\.iterations"):
        iterate(Profiler(iterations=[3]), tmp_path, 2)


@pytest.mark.gpu
def test_a_memory_snapshot_on_a_gpu(tmp_path: Path) -> None:
    device: Any = torch.device("cuda", 0)
    run: Any = SimpleNamespace(
        folder=tmp_path, trainer=SimpleNamespace(device=device), config=settings(), iteration=0
    )
    profiler = Profiler(iterations=[1], memory=True)
    profiler.on_iteration_start(run, 0)
    torch.randn(1024, 1024, device=device) @ torch.randn(1024, 1024, device=device)
    profiler.on_iteration_end(run, {"iteration": 0})
    folder = tmp_path / "profiles/iteration-000001"
    assert (folder / "rank-000-memory.pickle").stat().st_size > 1000
    assert any(event.get("cat") == "kernel" for event in events_of(folder / "rank-000.json.gz"))
