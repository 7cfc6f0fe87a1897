"""What a signal does to a run, and what an error leaves of it: the state between two iterations, or nothing."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from sage_fast.run import trackers
from sage_fast.run.stop import SIGNALS, TWICE, Stop
from sage_fast.run.train import train
from sage_fast.run.weights import checkpoints
from sage_fast.trainer import Trainer
from sage_fast.util.errors import NonFiniteError, Stopped
from sage_fast.util.files import read_json, read_metrics
from tests.tiny import CPU, settings


@pytest.fixture
def stop() -> Iterator[Stop]:
    told: list[str] = []
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop(60, told.append) as stop:
        stop.training = True
        yield stop
    assert [signal.getsignal(number) for number in SIGNALS] == before


def receive(stop: Stop, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 10
    while not stop.number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_is_read_between_two_iterations(stop: Stop, number: signal.Signals, status: int) -> None:
    stop.boundary(CPU)
    receive(stop, number)
    stop.pause()
    stop.before_update(CPU)  # there is time to end the iteration
    with pytest.raises(Stopped) as stopped:
        stop.boundary(CPU)
    assert stopped.value.status == status


def test_the_same_signal_from_a_launcher_too_is_no_second_one(stop: Stop) -> None:
    receive(stop, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TWICE / 2)  # this process would be gone
    assert stop.number == signal.SIGTERM


def test_half_of_the_grace_time_is_for_the_checkpoint(stop: Stop) -> None:
    receive(stop, signal.SIGTERM)
    stop.grace_seconds = 2 * (time.monotonic() - stop._asked)
    with pytest.raises(Stopped):
        stop.pause()
    with pytest.raises(Stopped):
        stop.before_update(CPU)


def test_a_signal_while_a_run_is_loaded_ends_it_there(stop: Stop) -> None:
    stop.training = False
    with pytest.raises(Stopped):
        receive(stop, signal.SIGTERM)


def test_a_worker_of_a_reward_that_is_terminated_does_not_stop_the_run(stop: Stop) -> None:
    """multiprocessing ends its workers by SIGTERM; a forked one shares the pipe, and must not keep the handler."""
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(worker, signal.SIGTERM)
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    time.sleep(0.2)
    assert stop.number == 0


@pytest.fixture(autouse=True)
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the runs."""
    monkeypatch.setattr("sage_fast.report.page._charts", lambda data: [])


# -- errors -----------------------------------------------------------------------------------------------------------


def config(folder: Path, **overrides: Any) -> Any:
    small = {"sampling__steps": 2, "train__iterations": 3, "train__checkpoint_interval": 1, "eval__steps": 1}
    small |= {"train__ema_decay": 0.9, "kl__anchor_interval": 2, "train__parity_gate": False, "tracking__trackers": []}
    return settings(output=str(folder), **small | overrides)


def files(run: Path, iteration: int) -> dict[str, Any]:
    """Checksums of a checkpoint's files, without the one whose header has no fixed order."""
    found = read_json(run / "checkpoints" / f"iteration-{iteration:06d}" / "manifest.json")["files"]
    return {name: entry for name, entry in found.items() if not name.startswith("pytorch_lora_weights")}


@pytest.mark.parametrize("updates", [1, 2], ids=["one update", "the second of two"])
@pytest.mark.fault(
    "a loss that is not finite", "ends with the checkpoint of the last whole iteration; resumed, likewise"
)
def test_a_non_finite_stop_leaves_the_last_whole_iteration(
    updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last update of the second iteration, with no checkpoint by interval before it."""
    options = {"train__optimizer_steps": updates, "train__keep_checkpoints": 9}
    whole = train(config(tmp_path / "whole", **options), quiet=True)
    update = Trainer._update

    def failing(self: Trainer, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2 * updates:
            self.equalizer = self.equalizer * float("nan")
        update(self, *args)

    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", failing)
        with pytest.raises(NonFiniteError, match="the loss is nan"):
            train(config(tmp_path / "run", **options, train__checkpoint_interval=50), quiet=True)
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["iteration-000001"]
    assert files(tmp_path / "run", 1) == files(whole, 1)
    run = train(config(tmp_path / "run", **options, train__checkpoint_interval=50), resume=True, quiet=True)
    assert files(run, 3) == files(whole, 3)


def test_an_error_after_the_only_update_saves_nothing_of_its_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are those after the update, the counters those before: that is no checkpoint."""
    refresh, calls = Trainer._refresh_anchor, list[int]()

    def failing(self: Trainer) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        refresh(self)

    monkeypatch.setattr(Trainer, "_refresh_anchor", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(config(tmp_path / "run", train__checkpoint_interval=2))
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["iteration-000002"]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    assert "stopped within iteration 3, whose updates are lost; continue with --resume, from" in capsys.readouterr().out


def test_an_iteration_whose_row_cannot_be_written_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk that has room again when its checkpoint is written."""
    write, calls = trackers.append_line, list[str]()

    def failing(file: BinaryIO, line: str) -> None:
        calls.append(line)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        write(file, line)

    monkeypatch.setattr(trackers, "append_line", failing)
    with pytest.raises(OSError, match="No space left on device"):
        train(config(tmp_path / "run"), quiet=True)
    assert [row["iteration"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    newest = read_json(checkpoints(tmp_path / "run")[-1] / "state.json")
    assert (newest["iteration"], newest["optimizer_steps"]) == (2, 2)
