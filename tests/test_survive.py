"""Runs that are killed, stopped, torn and starved at random moments end as if nothing had happened.

`make soak` (SAGE_FAST_SOAK=1) stops runs 50 times with kill -9 and 25 times each with SIGINT and
SIGTERM; `make test-all` stops one with SIGTERM and kills one inside ten writes, `make test` inside
three. Ctrl-C stops a run in tests/test_new_user.py and tests/test_resume.py too.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from torch import Tensor

from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.run.stop import DEBOUNCE
from sage_fast.run_folder import STATE, RunFolder, iteration_of
from sage_fast.testbed.rewards import TestbedReward
from sage_fast.util.files import read_json, read_metrics
from tests.fork_server import Fault, ForkServer
from tests.tiny import arguments
from tests.waits import HANG, wait_until

SOAK = "SAGE_FAST_SOAK" in os.environ
PAPER = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"
SMALL = arguments(
    train__iterations=6, train__prompts_per_iteration=2, train__group_size=2,
    train__optimizer_steps=2,
    train__batch_size=16, train__ema_decay=0.9, train__checkpoint_interval=2,
    train__parity_gate="false",
    kl__anchor_interval=3, sampling__num_frames=5, sampling__steps=2, eval__steps=1,
    eval__num_prompts=2,
    eval__seeds_per_prompt=1, eval__num_videos=1, eval__interval=0, eval__judge="null",
    tracking__trackers="[]",
)  # fmt: skip


@dataclass
class Place:
    """A server and the folder of its runs, under its names there and here; a full disk does not
    reach `logs`."""

    server: ForkServer
    there: Path
    here: Path
    logs: Path
    private: bool

    def start(self, run: str, *options: str, fault: Fault | None = None, **environment: str) -> int:
        """Begin a run, or resume it if there is one."""
        resume = ["--resume"] * (self.here / run / "config.yaml").is_file()
        command = [
            "train",
            str(PAPER),
            "--output",
            str(self.there / run),
            *SMALL,
            *resume,
            *options,
        ]
        return self.server.start(command, self.logs / f"{run}.log", fault, **environment)

    def finish(self, run: str, *options: str) -> None:
        status = self.server.wait(self.start(run, *options))
        assert status == 0, self.log(run)

    def log(self, run: str) -> str:
        return (self.logs / f"{run}.log").read_text()

    def wait_for(self, run: str, text: str, times: int = 1) -> None:
        """Wait until the log of a run holds a text."""
        log = self.logs / f"{run}.log"
        wait_until(
            lambda: log.is_file() and log.read_text().count(text) >= times, lambda: self.log(run)
        )

    def wait_until_locked(self, run: str, process: int) -> None:
        """Wait until the run handles signals itself."""
        lock = self.here / run / "run.lock"
        wait_until(lambda: lock.is_file() and f"process {process} " in lock.read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A file system in memory that only the server sees, if it may mount one, as a disk that can be
    filled."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as folder:
        mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
                 f'mount -t tmpfs -o size=256m tmpfs {folder} && exec "$@"', "sh"]  # fmt: skip
        private = (
            shutil.which("unshare")
            and subprocess.run([*mount, "true"], capture_output=True).returncode == 0
        )
        with ForkServer(mount if private else ()) as server:
            # it has imported everything
            assert server.wait(server.start(["--version"], Path(os.devnull))) == 0
            there = Path(folder)
            here = Path(f"/proc/{server.process.pid}/root{folder}") if private else there
            yield Place(server, there, here, tmp_path_factory.mktemp("logs"), bool(private))


def outcome(run: Path) -> dict[str, Any]:
    """What must be the same however often a run was stopped: all but times and memory, which are
    the machine's."""
    rows = [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("time/", "throughput/", "memory/"))
        }
        for row in read_metrics(run / "metrics.jsonl")
    ]
    last = RunFolder(run).checkpoints()[-1]
    files = read_json(last / "manifest.json")["files"]
    # its header lists two entries in any order; the files of `ema` hold the same weights
    files.pop(LORA_FILE)
    weights = load_file(run / "weights" / LORA_FILE)
    return {
        "metrics": rows,
        "evaluations": {
            name: read_json(run / "eval" / f"{name}.json") for name in ("before", "after")
        },
        "weights": {name: tensor.tobytes() for name, tensor in weights.items()},
        last.name: files,  # with checksums
        "left": sorted(path.name for path in run.rglob("*.partial")),
    }


@dataclass
class Reference:
    run: Path
    seconds: float
    outcome: dict[str, Any]


@pytest.fixture(scope="module")
def reference(place: Place) -> Reference:
    """A run that nothing disturbs."""
    begun = time.monotonic()
    place.finish("reference")
    run = place.here / "reference"
    return Reference(run, time.monotonic() - begun, outcome(run))


KILLS, STOPS = 50, 25 if SOAK else 1


@pytest.mark.soak
@pytest.mark.fault("kill -9 at a random moment", "resumed, it ends like an undisturbed run", KILLS)
def test_kills_at_random_moments(place: Place, reference: Reference) -> None:
    stop_at_random(signal.SIGKILL, KILLS, place, reference)


@pytest.mark.soak
@pytest.mark.fault(
    "Ctrl-C (SIGINT) at a random moment",
    "a checkpoint of the last whole iteration, 130; likewise",
    STOPS,
)
def test_ctrl_c_at_random_moments(place: Place, reference: Reference) -> None:
    stop_at_random(signal.SIGINT, STOPS, place, reference)


@pytest.mark.fault(
    "SIGTERM at a random moment", "a checkpoint of the last whole iteration, 0; likewise", STOPS
)
def test_sigterm_at_random_moments(place: Place, reference: Reference) -> None:
    stop_at_random(signal.SIGTERM, STOPS, place, reference)


def stop_at_random(
    number_of_signal: signal.Signals, count: int, place: Place, reference: Reference
) -> None:
    """Stop runs at random moments and resume them until they end; the outcome is that of an
    undisturbed run."""
    rng, stopped, round_of_runs, latest = (
        random.Random(int(number_of_signal)),
        0,
        0,
        reference.seconds,
    )
    while stopped < count:
        name = f"{number_of_signal.name}-{round_of_runs}"
        round_of_runs += 1
        run = place.here / name
        while not (run / "report.html").is_file() and stopped < count:
            process = place.start(name)
            if number_of_signal != signal.SIGKILL:
                place.wait_until_locked(name, process)
            time.sleep(rng.uniform(0, latest))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number_of_signal)
            status = place.server.wait(process)
            ended = (run / "report.html").is_file()
            stopped += not ended
            # a machine becomes busy or idle; most runs are to be stopped
            latest *= 0.8 if ended else 1.1
            if ended:  # the signal may have come after the run restored its handlers
                assert status in (0, 128 + number_of_signal, -number_of_signal), place.log(name)
            elif number_of_signal == signal.SIGKILL:
                assert status == -signal.SIGKILL, place.log(name)
            else:
                assert status == {signal.SIGINT: 130, signal.SIGTERM: 0}[number_of_signal], (
                    place.log(name)
                )
                done = len(read_metrics(run / "metrics.jsonl"))
                assert [iteration_of(folder) for folder in RunFolder(run).checkpoints()[-1:]] == [
                    done
                ] * bool(RunFolder(run).checkpoints())
        place.finish(name)
        assert outcome(run) == reference.outcome, place.log(name)
        shutil.rmtree(run)


WRITES = [
    (Fault("config.yaml"), False),
    (Fault("run.json"), True),
    (Fault("before/00-", "rename"), False),  # a video
    (Fault("before.json"), False),
    (Fault("trainable-00001", "save"), False),
    (Fault("metrics.jsonl", nth=2), False),  # write 1 copies the rows of the previous start
    (Fault("metrics.jsonl", nth=1), True),
    (Fault("state.json"), True),
    (Fault("exp_avg_sq-00001", "save"), True),
    (Fault("optimizer.json"), True),
    (Fault("manifest.json"), False),
    (Fault("iteration-000002", "rename"), False),
    (Fault("iteration-000002", "renamed"), False),
    (Fault("iteration-000006", "rename"), True),
    (Fault("iteration-000002.old.partial", "renamed"), False),
    (Fault("/weights", "rename"), False),
    (Fault("after.json"), True),
    (Fault("report.html"), False),
]
"""In their order, and whether another one is written in the same way, so that only `make soak` does
it."""
INSIDE_WRITES = [fault for fault, alike in WRITES if SOAK or not alike]
THREE = [
    Fault("trainable-00001", "save"),
    Fault("metrics.jsonl", nth=2),
    Fault("iteration-000002", "rename"),
]
"""One in the weights, one in the metrics, one before a checkpoint has its name."""


@pytest.mark.fault(
    "kill -9 inside a write", "no partial file under a final name; likewise", len(INSIDE_WRITES)
)
def test_kills_inside_each_write(place: Place, reference: Reference) -> None:
    kill_inside_writes("writes", INSIDE_WRITES, place, reference)


def test_three_kills(place: Place, reference: Reference) -> None:
    """Those that `make test` does."""
    kill_inside_writes("three", THREE, place, reference)


def kill_inside_writes(
    name: str, faults: Sequence[Fault], place: Place, reference: Reference
) -> None:
    """Each kill leaves half of a file; all hit the same run, one after the other."""
    for fault in faults:
        status = place.server.wait(place.start(name, fault=fault))
        assert status == -signal.SIGKILL, (fault, place.log(name))
    place.finish(name)
    assert outcome(place.here / name) == reference.outcome, place.log(name)


@pytest.mark.fault(
    "the disk is full", "the last checkpoint stays, one line says why; resumed with room, likewise"
)
def test_a_full_disk(place: Place, reference: Reference) -> None:
    """The last checkpoint survives, one line says what happened, and a resume on the full disk
    damages nothing."""
    run, filler = place.here / "full", place.here / "filler"
    slow = ["--reward.name", "tests.test_survive:SlowReward"]
    if place.private:
        process = place.start("full", *slow)
        place.wait_for("full", "3/6")
        fill(filler)
    else:
        process = place.start("full", *slow, fault=Fault("state.json", nth=2, do="full"))
    assert place.server.wait(process) == 1, place.log("full")
    assert RunFolder(run).checkpoints()
    assert not list(run.rglob("*.partial"))

    def files() -> dict[Path, bytes]:
        """What a run has, apart from the lock and the log of its processes."""
        kept = (
            path
            for path in run.rglob("*")
            if path.is_file() and path.name not in ("run.lock", "rank-000.log")
        )
        return {path: path.read_bytes() for path in kept}

    before = files()
    if place.private:
        fill(filler)  # again, because the run freed space when it could not write
        assert place.server.wait(place.start("full", *slow, "--quiet")) == 1
        assert files() == before
        filler.unlink()
    errors = [
        line for line in place.log("full").splitlines() if line.startswith("sage-fast train: '")
    ]
    assert len(errors) == (2 if place.private else 1), place.log("full")
    assert all("No space left on device" in line for line in errors), errors
    assert "Traceback" not in place.log("full")
    place.finish("full", *slow)
    assert outcome(run) == reference.outcome, place.log("full")


def fill(file: Path) -> None:
    """Grow the file until the disk is full."""
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as filler:
        while filler.write(bytes(1 << 16)):
            pass


class SlowReward(TestbedReward):
    """Takes a quarter of a second per batch of videos."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        time.sleep(0.25)
        return super().__call__(videos, prompts)


class HangingReward(TestbedReward):
    """Hangs in the fourth batch: after the check, the first evaluation and one iteration."""

    batches = 0

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        HangingReward.batches += 1
        if HangingReward.batches == 4:
            print("hangs", flush=True)
            time.sleep(HANG)
        return super().__call__(videos, prompts)


@pytest.mark.fault(
    "a second signal, from a reward that hangs", "ends at once; the last checkpoint counts"
)
def test_a_second_signal_ends_at_once(place: Place) -> None:
    """The reward hangs and no new checkpoint is written; a resume uses the one before."""
    patient = ["--train.grace_seconds", str(10 * HANG)]
    process = place.start("twice", "--reward.name", "tests.test_survive:HangingReward", *patient)
    place.wait_for("twice", "hangs")
    os.kill(process, signal.SIGTERM)
    place.wait_for("twice", "SIGTERM: stopping after this iteration")
    time.sleep(2 * DEBOUNCE)
    os.kill(process, signal.SIGTERM)
    assert place.server.wait(process) == 143
    assert "ended at the second SIGTERM; --resume uses the last complete checkpoint" in place.log(
        "twice"
    )
    assert RunFolder(place.here / "twice").checkpoints() == []


@pytest.mark.fault(
    "SIGTERM to a run that hangs", "ends after the grace time; the last checkpoint counts"
)
def test_the_grace_time_ends_a_run_that_hangs(place: Place) -> None:
    hanging = ["--reward.name", "tests.test_survive:HangingReward", "--train.grace_seconds", "1"]
    process = place.start("grace", *hanging, "--train.checkpoint_interval", "1")
    place.wait_for("grace", "hangs")
    os.kill(process, signal.SIGTERM)
    assert place.server.wait(process) == 143
    assert "ended 1 s after SIGTERM; --resume uses the last complete checkpoint" in place.log(
        "grace"
    )
    assert [iteration_of(folder) for folder in RunFolder(place.here / "grace").checkpoints()] == [1]


def test_an_iteration_that_takes_longer_than_the_grace_time_is_given_up(place: Place) -> None:
    """The rollout ends at the first step after half of that time; earlier iterations are saved."""
    long = [
        "--sampling.steps",
        "1000",
        "--sampling.num_frames",
        "33",
        "--train.timestep_fraction",
        "0.01",
    ]
    process = place.start("slow", *long, "--train.grace_seconds", "6")
    place.wait_for("slow", "rollout: ")
    os.kill(process, signal.SIGTERM)
    assert place.server.wait(process) == 0, place.log("slow")
    assert "stopped after 0 iterations; continue with --resume" in place.log("slow")
    assert [iteration_of(folder) for folder in RunFolder(place.here / "slow").checkpoints()] == [0]
    assert read_metrics(place.here / "slow" / "metrics.jsonl") == []


@pytest.mark.fault(
    "a second process on the folder of a live run, with and without --resume",
    "refused; neither is hurt",
    2,
)
def test_a_second_process_is_refused_while_the_first_one_lives(place: Place) -> None:
    """The kernel's lock refuses it, and goes away with the first one, however that ends."""
    run = place.here / "twofold"
    first = place.start("twofold", "--reward.name", "tests.test_survive:HangingReward")
    place.wait_for("twofold", "hangs")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    command = ["train", str(PAPER), "--output", str(place.there / "twofold"), *SMALL]
    refused = [place.server.wait(place.server.start([*command, *resume], place.logs / "second.log"))
               for resume in ([], ["--resume"])]  # fmt: skip
    assert refused == [2, 2]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert (
        f"another run is using it (process {first} on {socket.gethostname()}); wait"
        in place.log("second")
    )
    os.kill(first, signal.SIGKILL)
    assert place.server.wait(first) == -signal.SIGKILL
    place.finish("twofold", "--train.iterations", "1")


# -- two ranks -------------------------------------------------------------------------------------


class FailsOnOneRank(TestbedReward):
    """Fails on the second rank, in the third batch after the check."""

    batches = 0

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        FailsOnOneRank.batches += 1
        if FailsOnOneRank.batches > 3 and os.environ["RANK"] == "1":
            raise ConnectionError("the server of this rank went away")
        return super().__call__(videos, prompts)


def start_two(
    place: Place, run: str, *options: str, fault: Fault | None = None, first: bool = False
) -> list[int]:
    """Start two gloo ranks as torchrun would; the fault is in the second rank, or in the first one
    if `first`."""
    bounded = ["--timeout_minutes", "5", *options]
    faults = (fault if first else None, None if first else fault)
    return [
        place.start(run, *bounded, fault=of_rank, **rank)
        for rank, of_rank in zip(two_ranks(), faults)
    ]


def two_ranks() -> list[dict[str, str]]:
    """The environments that torchrun would give two ranks on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


@pytest.mark.fault(
    "SIGTERM to one of two ranks", "both stop at the same iteration; one rank alone resumes from it"
)
def test_two_ranks_stop_together(place: Place) -> None:
    """Only one of them gets the signal; both leave the same iteration, and one rank alone can
    resume from it."""
    run = place.here / "together"
    ranks = start_two(place, "together", "--train.iterations", "1000")
    place.wait_for("together", "2/1000")
    os.kill(ranks[1], signal.SIGTERM)
    assert [place.server.wait(process) for process in ranks] == [0, 0], place.log("together")
    done = len(read_metrics(run / "metrics.jsonl"))
    assert done >= 2
    assert iteration_of(RunFolder(run).checkpoints()[-1]) == done
    place.finish("together", "--train.iterations", str(done + 1))
    assert f"resumed after {done} iterations" in place.log("together")


def test_two_ranks_that_cannot_write_what_they_stop_with_say_so(place: Place) -> None:
    """A status of 0 would tell a scheduler that nothing is lost."""
    fault = Fault("state.json", do="full")
    ranks = start_two(
        place,
        "unsaved",
        "--train.iterations",
        "1000",
        "--train.checkpoint_interval",
        "999",
        fault=fault,
        first=True,
    )
    place.wait_for("unsaved", "2/1000")
    os.kill(ranks[1], signal.SIGTERM)
    assert [place.server.wait(process) for process in ranks] == [1, 1], place.log("unsaved")
    assert "and no checkpoint could be written: [Errno 28] No space left on device" in place.log(
        "unsaved"
    )
    assert place.log("unsaved").count("/training/state.json': No space left on device\n") == 1
    assert "Traceback" not in place.log("unsaved")
    assert RunFolder(place.here / "unsaved").checkpoints() == []


@pytest.mark.fault(
    "a reward raises on one of two ranks", "both end, with the checkpoint of the last iteration"
)
def test_a_failure_on_one_rank_leaves_a_checkpoint_of_both(place: Place) -> None:
    ranks = start_two(
        place,
        "one-fails",
        "--reward.name",
        "tests.test_survive:FailsOnOneRank",
        "--reward.on_failure",
        "stop",
    )
    assert [place.server.wait(process) for process in ranks] == [1, 1]
    log = place.log("one-fails")
    assert "rank 1 failed: RewardError: " in log
    assert log.count("ConnectionError: the server of this rank went away") == 2, log
    run = place.here / "one-fails"
    assert (
        [iteration_of(folder) for folder in RunFolder(run).checkpoints()]
        == [len(read_metrics(run / "metrics.jsonl"))]
        == [1]
    )


@pytest.mark.fault(
    "a loss that is NaN on one of two ranks", "both end, with the checkpoint of the last iteration"
)
def test_a_loss_that_is_not_finite_on_one_rank_stops_both_before_the_update(place: Place) -> None:
    """It happens in the second of two updates; the first one is undone."""
    ranks = start_two(place, "nan", fault=Fault("loss", "loss", nth=4))
    assert [place.server.wait(process) for process in ranks] == [1, 1]
    log = place.log("nan")
    assert log.count("the loss is nan at optimizer step 3; nothing was updated") == 2, log
    assert "stopped after 1 iteration; fix the cause, then continue with --resume" in log
    run = place.here / "nan"
    assert (
        [iteration_of(folder) for folder in RunFolder(run).checkpoints()]
        == [len(read_metrics(run / "metrics.jsonl"))]
        == [1]
    )
    assert read_json(RunFolder(run).checkpoints()[0] / STATE)["optimizer_steps"] == 2
    place.finish("nan", "--train.iterations", "2")


@pytest.mark.parametrize(
    "number_of_signal",
    [
        pytest.param(signal.SIGKILL, id="dies", marks=pytest.mark.fault(
            "kill -9 of one of two ranks", "the other ends, before `timeout_minutes`")),
        pytest.param(signal.SIGSTOP, id="hangs", marks=[pytest.mark.soak, pytest.mark.fault(
            "one of two ranks hangs (SIGSTOP)", "the other ends after `timeout_minutes`")]),
    ],
)  # fmt: skip
def test_a_rank_that_dies_or_hangs_does_not_leave_the_other_waiting(
    number_of_signal: signal.Signals, place: Place
) -> None:
    hangs = number_of_signal == signal.SIGSTOP
    name, limit = f"one-{number_of_signal.name}", 30 if hangs else HANG
    ranks = start_two(
        place, name, "--train.iterations", "1000", "--timeout_minutes", str(limit / 60)
    )
    place.wait_for(name, "3/1000")
    os.kill(ranks[1], number_of_signal)
    assert place.server.wait(ranks[0]) == 1
    assert (f"Timed out waiting {limit}000ms" in place.log(name)) == hangs
    if hangs:
        os.kill(ranks[1], signal.SIGKILL)  # as torchrun does
    lost = [
        line
        for line in place.log(name).splitlines()
        if "rank 0 failed: another rank is gone, hangs or cannot be reached: RuntimeError: " in line
    ]
    assert len(lost) == 1, place.log(name)
    assert "Traceback" not in place.log(name)
    assert place.server.wait(ranks[1]) == -signal.SIGKILL
    run = place.here / name
    assert iteration_of(RunFolder(run).checkpoints()[-1]) % 2 == 0, "one rank alone saves nothing"
    place.finish(name, "--train.iterations", str(len(read_metrics(run / "metrics.jsonl"))))
