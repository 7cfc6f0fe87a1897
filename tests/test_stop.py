"""What a signal does to a run, and what an error leaves of it: the state between two iterations, or
nothing."""

import dataclasses
import errno
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from sage_fast.callbacks import writer as writer_module
from sage_fast.callbacks.notes import grace_warning
from sage_fast.report.page import report_run
from sage_fast.run.stop import Stop
from sage_fast.run_folder import STATE, RunFolder
from sage_fast.trainer import Trainer
from sage_fast.util.errors import SIGNALS, NonFiniteError, Stopped
from sage_fast.util.files import read_json, read_metrics
from tests.tiny import CPU, settings, train
from tests.waits import HANG, wait_until


@pytest.fixture
def stop() -> Iterator[Stop]:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop(60) as stop:
        stop.training = True
        yield stop
    assert [signal.getsignal(number) for number in SIGNALS] == before


def receive(stop: Stop, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    wait_until(lambda: stop.number)


STATUS = {
    signal.SIGINT: 130,
    signal.SIGQUIT: 131,
    signal.SIGTERM: 0,
    signal.SIGHUP: 0,
    signal.SIGUSR1: 0,
    signal.SIGUSR2: 0,
    signal.SIGXCPU: 0,
}
UNHANDLED = {
    "a program's own fault": {
        "SIGABRT",
        "SIGBUS",
        "SIGFPE",
        "SIGILL",
        "SIGSEGV",
        "SIGSYS",
        "SIGTRAP",
    },
    "cannot be handled": {"SIGKILL", "SIGSTOP"},
    "suspend and continue": {"SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCONT"},
    "an error of the write": {"SIGPIPE", "SIGXFSZ"},
    "of a program's own timers": {"SIGALRM", "SIGVTALRM", "SIGPROF"},
    "ignored by default": {"SIGCHLD", "SIGURG", "SIGWINCH"},
    "for drivers and init": {"SIGIO", "SIGPWR", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX"},
}
"""Why -> signals that do not stop a run."""


def test_every_signal_is_decided() -> None:
    decided = [number.name for number in STATUS] + [
        name for names in UNHANDLED.values() for name in names
    ]
    assert sorted(decided) == sorted(number.name for number in signal.Signals)
    assert STATUS == SIGNALS
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "stop-and-resume.md").read_text()
    for number, status in STATUS.items():
        assert re.search(
            rf"^\| [^|]*\b{number.name}\b[^|]*\|[^|]*\|[^|]* {status} \|$", page, re.M
        ), number.name


@pytest.mark.parametrize(("number", "status"), STATUS.items())
def test_a_signal_is_read_between_two_iterations(
    stop: Stop, number: signal.Signals, status: int
) -> None:
    stop.boundary(CPU)
    receive(stop, number)
    stop.pause()
    stop.before_update(CPU)  # there is time to end the iteration
    with pytest.raises(Stopped) as stopped:
        stop.boundary(CPU)
    assert stopped.value.status == status


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(60) as stop:
            stop.training = True
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert stop.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


RUN = """
import sys, time
from pathlib import Path
from sage_fast.run.stop import Stop
from sage_fast.util.console import log, log_to_screen
from sage_fast.util.errors import Stopped
from tests.tiny import CPU

log_to_screen()
with Stop(600) as stop:
    stop.training = True
    try:
        while True:
            stop.boundary(CPU)
            log.info("an iteration")
            time.sleep(0.1)
    except Stopped as stopped:
        log.info("stopped")
        print("a last word", file=sys.stderr, flush=True)
        Path(sys.argv[1]).write_text(str(stopped))
"""


def close_the_terminal(code: str, argument: Path, after: bytes) -> None:
    """Run `code` in a terminal that closes when `after` has been shown; the process must end
    without an error."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", code, str(argument)])
    shown = b""
    while after not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.fault("the terminal of a run closes (SIGHUP)", "as SIGTERM; what it prints is dropped")
def test_a_terminal_that_closes_stops_the_run_which_goes_on_printing(tmp_path: Path) -> None:
    """Each line to it would fail with EIO."""
    close_the_terminal(RUN, tmp_path / "saved", after=b"an iteration")
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_a_run_that_ignores_sighup_goes_on_after_its_terminal_closed(tmp_path: Path) -> None:
    """Started with `trap '' HUP`; so is a run in the moment before the signal is handled."""
    code = """
import select, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from sage_fast.util.console import log, log_to_screen
log_to_screen()
log.info("begun")
poll = select.poll()
poll.register(0, 0)
poll.poll()  # until the terminal closes
for _ in range(3):
    log.info("goes on")
open(sys.argv[1], "w").close()
"""
    close_the_terminal(code, tmp_path / "ended", after=b"begun")
    assert (tmp_path / "ended").exists()


def test_the_same_signal_from_a_launcher_too_is_no_second_one(
    stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.run.stop.DEBOUNCE", float(HANG))
    receive(stop, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)  # this process would be gone
    assert stop.number == signal.SIGTERM


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGUSR2, signal.SIGINT, signal.SIGTERM], id="LSF's run limit"),
        pytest.param(
            [signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM], id="Slurm's warning and limit"
        ),
        pytest.param(
            [signal.SIGXCPU, signal.SIGXCPU, signal.SIGXCPU], id="a CPU limit, each second"
        ),
        pytest.param(
            [signal.SIGHUP, signal.SIGCONT, signal.SIGTERM], id="a terminal with stopped jobs"
        ),
    ],
)
def test_the_signals_that_a_scheduler_sends_in_turn_are_one_request(
    numbers: list[signal.Signals], stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LSF's come ten seconds apart, and the checkpoint is being written meanwhile."""
    monkeypatch.setattr("sage_fast.run.stop.DEBOUNCE", 0.0)
    ended: list[str] = []
    monkeypatch.setattr(stop, "_end", ended.append)
    for number in numbers:
        receive(stop, number)
    time.sleep(0.2)
    assert stop.number == numbers[0]
    assert ended == []


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ([signal.SIGINT, signal.SIGINT], "at the second SIGINT"),
        ([signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM], "at the second SIGTERM"),
        ([signal.SIGINT, signal.SIGQUIT], "at SIGQUIT"),
        ([signal.SIGQUIT, signal.SIGQUIT], "at the second SIGQUIT"),
    ],
)
def test_the_same_signal_again_and_ctrl_backslash_end_the_run_at_once(
    numbers: list[signal.Signals], why: str, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.run.stop.DEBOUNCE", 0.0)
    ended: list[str] = []
    monkeypatch.setattr(stop, "_end", ended.append)
    for number in numbers:
        receive(stop, number)
        time.sleep(0.05)  # the same signal twice at once would be delivered once
    wait_until(lambda: ended)
    assert ended == [why]


CPU_LIMIT = """
import atexit, resource, sys, time
from pathlib import Path
import torch
from sage_fast import cli
from sage_fast.run.stop import Stop
from sage_fast.util.errors import Stopped

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def run(options, overrides):
    with Stop(600) as stop:
        stop.training = True
        soft = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        try:
            while True:
                stop.boundary(torch.device("cpu"))
                burn(0.1)
        except Stopped as stopped:
            burn(1.2)  # the kernel sends it again each second, while the checkpoint is written
            Path(sys.argv[-1]).write_text(str(stopped))
            raise

class Command:
    add_arguments = staticmethod(lambda add: None)
    run = staticmethod(run)

cli.load = lambda name: Command
cli.parse = lambda words: (__import__("argparse").Namespace(command="doctor"), {})
atexit.register(burn, 1.2)  # and while the interpreter ends
sys.exit(cli.main())
"""


@pytest.mark.fault(
    "a CPU limit (SIGXCPU, each second)", "as SIGTERM; a repetition is no second signal"
)
def test_a_cpu_limit_stops_the_run_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CPU_LIMIT, str(tmp_path / "saved")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").read_text() == "SIGXCPU"


def test_a_run_whose_stderr_nobody_reads_still_ends_at_once() -> None:
    """The line of what ended it is lost, not the end."""
    code = """
import os, signal
from sage_fast.run.stop import Stop
with Stop(600) as stop:
    stop.number = signal.SIGTERM
    stop._end("now")
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stderr=writer)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGTERM


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


def test_a_library_that_makes_its_own_error_of_a_signal_hides_no_stop() -> None:
    def load() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except Stopped:
            raise OSError("unable to load weights") from None

    with pytest.raises(Stopped) as raised, Stop(60):
        load()
    assert raised.value.status == 0


def test_a_worker_of_a_reward_that_is_terminated_does_not_stop_the_run(stop: Stop) -> None:
    """multiprocessing ends its workers by SIGTERM; a forked one shares the pipe, and must not keep
    the handler."""
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(worker, signal.SIGTERM)
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    time.sleep(0.2)
    assert stop.number == 0


# -- errors ----------------------------------------------------------------------------------------


def config(folder: Path, **overrides: Any) -> Any:
    small = {
        "sampling__steps": 2,
        "train__iterations": 3,
        "train__checkpoint_interval": 1,
        "eval__steps": 1,
    }
    small |= {
        "train__ema_decay": 0.9,
        "kl__anchor_interval": 2,
        "train__parity_gate": False,
        "tracking__trackers": [],
    }
    return settings(output=str(folder), **small | overrides)


def files(run: Path, iteration: int) -> dict[str, Any]:
    """Checksums of a checkpoint's files, without the weights for export, whose header has no fixed
    order."""
    folder = run / "checkpoints" / f"iteration-{iteration:06d}"
    found = {
        name: entry["sha256"]
        for name, entry in read_json(folder / "manifest.json")["files"].items()
    }
    return {
        name: entry for name, entry in found.items() if not name.startswith("pytorch_lora_weights")
    }


@pytest.mark.parametrize("updates", [1, 2], ids=["one update", "the second of two"])
@pytest.mark.fault(
    "a loss that is not finite",
    "ends with the checkpoint of the last whole iteration; resumed, likewise",
)
def test_a_non_finite_stop_leaves_the_last_whole_iteration(
    updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last update of the second iteration, with no checkpoint by interval before it."""
    options = {"train__optimizer_steps": updates, "train__keep_checkpoints": 9}
    whole = train(config(tmp_path / "whole", **options))
    update = Trainer.update

    def failing(self: Trainer, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2 * updates:
            nan = self.constants.equalizer * float("nan")
            self.constants = dataclasses.replace(self.constants, equalizer=nan)
        update(self, *args)

    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", failing)
        with pytest.raises(NonFiniteError, match="the loss is nan"):
            train(config(tmp_path / "run", **options, train__checkpoint_interval=50))
    assert [folder.name for folder in RunFolder(tmp_path / "run").checkpoints()] == [
        "iteration-000001"
    ]
    assert files(tmp_path / "run", 1) == files(whole, 1)
    run = train(config(tmp_path / "run", **options, train__checkpoint_interval=50), resume=True)
    assert files(run, 3) == files(whole, 3)


def test_an_error_after_the_only_update_saves_nothing_of_its_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are those after the update, the counters those before: that is no checkpoint."""
    refresh, calls = Trainer.refresh_anchor, list[int]()

    def failing(self: Trainer) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        refresh(self)

    monkeypatch.setattr(Trainer, "refresh_anchor", failing)
    caplog.set_level(logging.INFO)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(config(tmp_path / "run", train__checkpoint_interval=2))
    assert [folder.name for folder in RunFolder(tmp_path / "run").checkpoints()] == [
        "iteration-000002"
    ]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (
        "stopped within iteration 3, whose updates are lost; continue with --resume, from"
        in caplog.text
    )


def test_an_iteration_whose_row_cannot_be_written_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk that has room again when its checkpoint is written."""
    write, calls = writer_module.append_line, list[str]()

    def failing(file: BinaryIO, line: str) -> None:
        calls.append(line)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        write(file, line)

    monkeypatch.setattr(writer_module, "append_line", failing)
    with pytest.raises(OSError, match="No space left on device"):
        train(config(tmp_path / "run"))
    assert [row["iteration"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    newest = read_json(RunFolder(tmp_path / "run").checkpoints()[-1] / STATE)
    assert (newest["iteration"], newest["optimizer_steps"]) == (2, 2)


# -- what the grace time cannot save ---------------------------------------------------------------


ROW = {"time/total": 400.0, "time/train": 240.0}


@pytest.mark.parametrize(
    ("grace", "updates", "collective", "seconds", "advised"),
    [
        (25, 1, False, 240, 600),
        (25, 24, False, None, None),
        (319, 24, True, 160, 400),
        (321, 24, True, None, None),
    ],
    ids=["one long update", "short updates", "a rollout that cannot pause", "enough"],
)
def test_a_grace_time_that_cannot_save_an_iteration_is_told(
    grace: float, updates: int, collective: bool, seconds: int | None, advised: int | None
) -> None:
    """Rollouts pause between steps unless their forwards are collective; updates never pause."""
    train = settings(
        train__grace_seconds=grace, train__optimizer_steps=updates, train__checkpoint_interval=7
    ).train
    warning = grace_warning(ROW, train, collective=collective)
    if seconds is None:
        assert warning is None
        return
    assert warning is not None
    assert f"up to 7 iterations: {seconds} s of one cannot be interrupted" in warning
    assert f"{advised} is enough" in warning
    assert f"--signal=B:USR1@{(advised or 0) + 100}" in warning
    # As advised, there is no warning left.
    assert (
        grace_warning(ROW, dataclasses.replace(train, grace_seconds=advised), collective=collective)
        is None
    )


def test_a_run_warns_once_after_its_first_iteration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(config(tmp_path / "run", train__grace_seconds=1e-6))
    told = [record.getMessage() for record in caplog.records]
    (place,) = (
        i
        for i, line in enumerate(told)
        if line.startswith("warning: a signal can lose up to 1 iteration:")
    )
    rows = [i for i, line in enumerate(told) if "  reward " in line]
    assert rows[0] < place < rows[1]


# -- the page of a run that is going on ------------------------------------------------------------


def drawn(calls: list[tuple[str, bool]]) -> Any:
    """Draw the page and note its status line; the first time, fail as a library that draws
    might."""

    def report(run: Path, complete: bool, running: bool) -> None:
        report_run(run, complete, running)
        page = (run / "report.html").read_text()
        status = re.search(r'<p class="soft">(.*?)</p>', page)
        assert status is not None
        assert ('http-equiv="refresh"' in page) == running
        calls.append((status[1], complete))
        if len(calls) == 1:
            raise RuntimeError("no font")

    return report


def test_the_page_is_drawn_at_each_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So that it can be opened during the run. A failure to draw is told and ends nothing."""
    calls: list[tuple[str, bool]] = []
    train(config(tmp_path / "run", train__iterations=3, eval__interval=1), report=drawn(calls))
    assert [complete for _, complete in calls] == [False, False, False, True]
    found = [re.sub(r" in [\d.]+ min of training", "", status) for status, _ in calls]
    assert found == [
        "No iteration has been completed yet.", "Running: 1 of 3 iterations.",
        "Running: 2 of 3 iterations.",
        "3 iterations.",
    ]  # fmt: skip
    assert "note: no report (RuntimeError: no font); later: sage-fast report" in caplog.text


@pytest.mark.charts
@pytest.mark.parametrize("share", [1e9, 1e-9], ids=["cheap", "dear"])
def test_the_page_is_drawn_after_each_iteration_if_it_costs_little(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any evaluation in between. A page that would take more of the run's time waits."""
    monkeypatch.setattr("sage_fast.callbacks.page.PAGE_SHARE", share)
    pages: list[tuple[bool, list[str]]] = []

    def report(run: Path, complete: bool, running: bool) -> None:
        report_run(run, complete, running)
        pages.append(
            (
                running,
                re.findall(
                    r'<svg role="img" aria-label="(.*?)"', (run / "report.html").read_text()
                ),
            )
        )

    # Two updates: a KL that is 0, as in the first update of a run, has no chart.
    train(config(tmp_path / "run", train__iterations=3, train__optimizer_steps=2), report=report)
    assert [running for running, _ in pages] == [True, *[True] * (3 if share > 1 else 0), False]
    assert pages[0][1] == []
    for _, charts in pages[1:]:
        assert {
            "Training reward",
            "Parts of the reward",
            "Loss",
            "Importance ratio",
            "Time by phase",
        } <= {*charts}
        assert any(chart.startswith("KL to") for chart in charts)


def test_the_page_of_a_stopped_run_holds_its_last_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []
    iteration = Trainer.iteration

    def signalled(trainer: Trainer, index: int) -> Any:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return iteration(trainer, index)

    monkeypatch.setattr(Trainer, "iteration", signalled)
    with pytest.raises(Stopped):
        train(config(tmp_path / "run"), report=drawn(calls))
    assert [complete for _, complete in calls] == [False, False]
    assert calls[-1][0] == "Stopped early, or still running: 2 of 3 iterations."


@pytest.mark.parametrize(("number", "status"), STATUS.items())
@pytest.mark.fault(
    "each signal by which a terminal, Slurm, LSF, SGE, PBS or Kubernetes ends or warns a run",
    (
        "a checkpoint of the last whole iteration, 130 or 131 from a keyboard, else 0; resumed, it "
        "ends"
    ),
)
def test_every_signal_leaves_a_checkpoint(
    number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iteration = Trainer.iteration

    def signalled(trainer: Trainer, index: int) -> Any:
        if index == 1:
            os.kill(os.getpid(), number)
        return iteration(trainer, index)

    few = {
        "train__checkpoint_interval": 50,
        "train__prompts_per_iteration": 1,
        "eval__num_prompts": 1,
    }
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "iteration", signalled)
        with pytest.raises(Stopped) as stopped:
            train(config(tmp_path / "run", **few))
    assert stopped.value.status == status
    assert [folder.name for folder in RunFolder(tmp_path / "run").checkpoints()] == [
        "iteration-000002"
    ]
    run = train(config(tmp_path / "run", **few), resume=True)
    assert [row["iteration"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    "place", ["sage_fast.run.train.save_final_weights", "sage_fast.run.train.save_checkpoint"]
)
def test_the_page_of_a_failed_run_does_not_reload(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("an error")

    monkeypatch.setattr(place, failing)
    with pytest.raises(RuntimeError, match="an error"):
        train(config(tmp_path / "run", train__iterations=2), report=report_run)
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "No iteration has been completed yet." not in page
