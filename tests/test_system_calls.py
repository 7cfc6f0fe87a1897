"""System calls that a file system does not have: what is only safer is done without, what is needed
is found at once.

A library that is preloaded (faulty_calls.c) makes calls on files fail in real runs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from sage_fast.config.loader import read_yaml
from sage_fast.run_folder import RunFolder, digest
from sage_fast.testbed.rewards import TestbedReward
from sage_fast.util import files
from tests.fork_server import ForkServer
from tests.test_survive import PAPER, SMALL, SOAK, Place, outcome, two_ranks
from tests.waits import HANG

SOURCE = Path(__file__).with_name("faulty_calls.c")
LACKING = ("EINVAL", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "ENOTTY", "EBADF", "EPERM", "EACCES")
BROKEN = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "ETIMEDOUT", "ENOTCONN", "EXDEV")
OTHERS = ("EBUSY", "ENOTEMPTY", "ENOLCK", "EISDIR")
EVERY = (*LACKING, *BROKEN, *OTHERS)
GOES_ON = {
    "flush": LACKING,
    "flush_folder": (*LACKING, "EISDIR"),
    "permissions": EVERY,
    "lock": EVERY,
    "unlock": EVERY,
    "claim": EVERY,
    "remove": EVERY,
    "free_space": EVERY,
}
"""Kind of call -> the errors of network, object-store, FUSE and quota file systems that end
nothing."""


@pytest.mark.parametrize("kind", files.ONLY_SAFER)
def test_each_error_of_a_call_that_is_only_safer(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in EVERY:
        number = getattr(errno, name)
        monkeypatch.setattr(files, "_noted", set())
        caplog.clear()
        goes_on = name in GOES_ON[kind]
        for _ in range(2):
            refused = (
                contextlib.nullcontext()
                if goes_on
                else pytest.raises(OSError, match="'/there/file'")
            )
            with refused, files.only_safer(kind, "/there/file"):
                raise OSError(number, os.strerror(number))
        assert len(caplog.messages) == goes_on, (kind, name)


def test_a_rename_whose_answer_was_lost_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats the request, and the second one finds nothing to rename."""
    replace = os.replace

    def repeated(source: Path, target: Path) -> None:
        replace(source, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))

    file = tmp_path / "file"
    file.write_text("before")
    monkeypatch.setattr(os, "replace", repeated)
    files.write_atomic(file, "after")
    assert file.read_text() == "after"
    monkeypatch.setattr(
        os, "replace", lambda *names: (_ for _ in ()).throw(FileNotFoundError(errno.ENOENT, "gone"))
    )
    with pytest.raises(FileNotFoundError):
        files.write_atomic(file, "later")
    assert file.read_text() == "after"


def test_a_folder_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "weights", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    replace = os.replace

    def fails(source: Path, target: Path) -> None:
        if Path(source) == new:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="cross-device"):
        files.put_in_place(new, old)
    assert (old / "file").read_text() == "weights"
    assert sorted(os.listdir(tmp_path)) == ["new", "weights"]


def test_a_folder_set_aside_before_and_busy_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that something has open keeps its folder on NFS."""
    folder, busy = tmp_path / "weights", tmp_path / "weights.old.partial"
    for made in (folder, busy):
        made.mkdir()
        (made / ".nfs0001").touch()
    unlink = os.unlink

    def refuses(name: str, **options: int) -> None:
        if ".nfs" in str(name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", refuses)
    files.remove_folder(folder)
    assert not folder.exists()
    assert sorted(os.listdir(tmp_path)) == ["weights.old.partial", "weights.old1.partial"]


@pytest.mark.parametrize(
    "read", [files.read_text, files.read_json, files.read_metrics, read_yaml, digest]
)
def test_an_error_of_a_read_names_the_file(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own names none: only an opening knows the name."""
    file = tmp_path / "file"
    file.write_text("{}")

    def fails(*about: object, **named: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_text", fails)
    monkeypatch.setattr(hashlib, "file_digest", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{file}'"):
        read(file)


def test_the_error_of_a_write_is_not_hidden_by_that_of_its_repair(tmp_path: Path) -> None:
    """The line cannot be cut off either."""

    class Broken:
        """An opened file on a disk that fails within a line."""

        name = str(tmp_path / "metrics.jsonl")

        def __init__(self) -> None:
            self.file = (tmp_path / "metrics.jsonl").open("ab", buffering=0)

        def fileno(self) -> int:
            return self.file.fileno()

        def write(self, content: bytes) -> int:
            return self.file.write(content[:3])

        def truncate(self, size: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "no truncate")

    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        files.append_line(Broken(), "a row")  # type: ignore[arg-type]


# -- real runs under a preloaded library -----------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("calls")
    library = folder / "faulty_calls.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    with ForkServer(["env", f"LD_PRELOAD={library}"]) as server:
        assert server.wait(server.start(["--version"], Path(os.devnull))) == 0
        (folder / "runs").mkdir()
        yield Place(
            server, folder / "runs", folder / "runs", tmp_path_factory.mktemp("logs"), private=False
        )


def faulty(calls: str, path: str) -> dict[str, str]:
    return {"FAULTY_CALLS": calls, "FAULTY_PATH": path}


def notes(shown: str) -> list[str]:
    """The first lines of the notes in a log, but for that about the sampler."""
    return [
        line
        for line in shown.splitlines()
        if line.startswith("note: ") and not line.startswith("note: sage: ")
    ]


def numbered(calls: Sequence[str], name: str) -> str:
    return ",".join(f"{call}={getattr(errno, name)}" for call in calls)


@pytest.fixture(scope="module")
def reference(place: Place) -> Path:
    """A run that nothing disturbs."""
    place.finish("reference")
    return place.here / "reference"


LOGS = ("rank-000.log", "rank-001.log")


def files_in(folder: Path) -> dict[Path, bytes]:
    """What is in a folder, apart from what names the processes that came last."""
    kept = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("run.lock", *LOGS)
    )
    return {path.relative_to(folder): path.read_bytes() for path in kept}


ONLY_SAFER_CALLS = ("fsync", "fsync_folder", "chmod", "flock")
WITHOUT = [*LACKING] if SOAK else ["EOPNOTSUPP"]


@pytest.mark.fault("a file system without flushes, permissions and locks", "four notes; likewise")
@pytest.mark.parametrize("name", WITHOUT)
def test_a_run_goes_on_without_what_is_only_safer(name: str, place: Place, reference: Path) -> None:
    # of a lock, it means that it is held
    calls = ONLY_SAFER_CALLS if name != "EACCES" else ONLY_SAFER_CALLS[:3]
    run = f"without-{name}"
    assert place.server.wait(place.start(run, **faulty(numbered(calls, name), f"/{run}"))) == 0, (
        place.log(run)
    )
    log = " ".join(place.log(run).split())
    assert log.count("note: the file system cannot ") == len(calls), log
    assert outcome(place.here / run) == outcome(reference)


@pytest.mark.fault("a file system that removes nothing", "one note; likewise")
def test_a_run_that_can_remove_nothing(place: Place, reference: Path) -> None:
    run = "unlink"
    assert (
        place.server.wait(place.start(run, **faulty(numbered(["unlink"], "EBUSY"), f"/{run}"))) == 0
    ), place.log(run)
    log = " ".join(place.log(run).split())
    assert (
        log.count(
            "note: the file system cannot remove what is no longer needed (Device or resource busy)"
        )
        == 1
    )
    found = outcome(place.here / run)
    assert found.pop("left")
    expected = outcome(reference)
    expected.pop("left")
    assert found == expected


NEEDED = {
    "mkdir": "make a folder",
    "write": "write a file",
    "append": "append to a file",
    "rename": "replace a file by renaming another",
    "rename_folder": "rename a folder",
    "fsync": "write a file",
    "fsync_folder": "replace a file by renaming another",
}
"""Call -> what the trial before training says a run cannot do."""
REFUSED = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "ETIMEDOUT", "ENOTCONN")
ALSO = ("EXDEV", "EPERM", "EACCES", "ENOSYS", "EOPNOTSUPP", "EINVAL")
"""Errors that are a lack of a call which a run needs, and not of a flush."""


@pytest.mark.parametrize("call", NEEDED)
@pytest.mark.fault(
    "a call that a run needs fails, with up to 13 errors each", "one line before anything is loaded"
)
def test_what_a_run_needs_is_tried_before_anything_is_loaded(
    call: str, place: Place, reference: Path
) -> None:
    """A new run leaves no folder, and a resumed one is as it was."""
    before = files_in(reference)
    errors = REFUSED if call.startswith("fsync") else (*REFUSED, *ALSO)
    for name in errors if SOAK else (errors[1], errors[-1]):
        fault = numbered([call], name)
        tag = f"{call}-{name}"
        new = ["train", str(PAPER), "--output", str(place.there / tag / "new"), *SMALL]
        again = [
            "train",
            str(PAPER),
            "--output",
            str(reference),
            *SMALL,
            "--resume",
            "--train.iterations",
            "9",
        ]
        log = place.logs / f"{tag}.log"
        for command in (new, again):
            assert (
                place.server.wait(place.server.start(command, log, **faulty(fault, "/probe-"))) == 1
            ), log.read_text()
        errors_told = [
            line for line in log.read_text().splitlines() if line.startswith("sage-fast train: '")
        ]
        assert len(errors_told) == 2, log.read_text()
        strerror = os.strerror(getattr(errno, name))
        cannot = f"{strerror}: a run cannot {NEEDED[call]} there; nothing was changed"
        assert all(line.endswith(cannot) for line in errors_told), log.read_text()
        assert "Traceback" not in log.read_text()
        assert "evaluate" not in log.read_text()
        assert not (place.here / tag).exists()
    assert files_in(reference) == before


@pytest.mark.parametrize("calls", ["write=28", "append=13", *["write=30", "append=28"] * SOAK])
@pytest.mark.fault("a log file that cannot be written", "one note; likewise")
def test_a_log_that_cannot_be_written_says_so_once(
    calls: str, place: Place, reference: Path
) -> None:
    run = f"log-{calls}"
    assert place.server.wait(place.start(run, **faulty(calls, "/rank-000.log"))) == 0, place.log(
        run
    )
    shown = place.log(run)
    [note] = notes(shown)
    assert "rank-000.log" in note
    assert "Traceback" not in shown
    assert "Logging error" not in shown
    assert outcome(place.here / run) == outcome(reference)


@pytest.mark.parametrize(
    ("calls", "path", "note"),
    [
        ("mkdir=28", "/videos/", "note: no video"),
        ("rename=28", ".mp4", "note: no video"),
        ("rename=28", "/report.html", "note: no report"),
        ("write=28", "/events.out", "note: tracker 'tensorboard' does not start"),
    ],
    ids=["videos", "a video", "page", "tensorboard"],
)
@pytest.mark.fault("a video, page or tracker file that cannot be written", "one note; likewise")
def test_what_is_only_shown_ends_no_run(
    calls: str, path: str, note: str, place: Place, reference: Path
) -> None:
    run = f"shown-{len(path)}"
    options = ["--tracking.trackers", "[tensorboard]"] * ("events" in path)
    assert place.server.wait(place.start(run, *options, **faulty(calls, path))) == 0, place.log(run)
    shown = place.log(run)
    [found] = notes(shown)
    assert note in found
    assert shown.count("Traceback") == 0, shown
    assert outcome(place.here / run) == outcome(reference)


@pytest.mark.fault("stdout and stderr on a full disk", "nothing more is printed; likewise")
def test_a_screen_that_is_a_file_on_a_full_disk_ends_no_run(place: Place, reference: Path) -> None:
    command = ["train", str(PAPER), "--output", str(place.there / "screen"), *SMALL]
    assert place.server.wait(place.server.start(command, Path("/dev/full"))) == 0
    assert outcome(place.here / "screen") == outcome(reference)
    log = (place.here / "screen" / "logs" / "rank-000.log").read_text()
    assert "6/6 " in log


# -- two runs where locks act on one host only -----------------------------------------------------


class WaitsForFile(TestbedReward):
    """Waits in the fifth batch, after the check, an evaluation and two iterations, until the file
    WAIT_FOR is there."""

    batches = 0

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        WaitsForFile.batches += 1
        if WaitsForFile.batches == 5 and "WAIT_FOR" in os.environ:
            print("waits", flush=True)
            deadline = time.monotonic() + HANG
            while not Path(os.environ["WAIT_FOR"]).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        return super().__call__(videos, prompts)


@pytest.mark.parametrize("stopped", [False, True], ids=["goes on", "is stopped"])
@pytest.mark.fault(
    "a resume of a live run where locks act on one host only",
    "the first stops and writes nothing; likewise",
)
def test_a_run_whose_folder_was_taken_over_stops(
    stopped: bool, place: Place, reference: Path
) -> None:
    """It sees another claim before it writes its next row, or the checkpoint that a signal asks
    for."""
    name = f"taken-{stopped}"
    run, flag = place.here / name, place.here / f"{name}.flag"
    options = ["--reward.name", "tests.test_system_calls:WaitsForFile"]
    without_locks = faulty("flock=0", f"/{name}/run.lock")
    first = place.start(name, *options, **without_locks, WAIT_FOR=str(flag))
    place.wait_for(name, "waits")
    logs, second_log = place.logs / f"{name}.log", place.logs / f"{name}-second.log"
    command = ["train", str(PAPER), "--output", str(run), *SMALL, *options, "--resume"]
    second = place.server.start(command, second_log, **without_locks)
    assert place.server.wait(second) == 0, second_log.read_text()
    before = files_in(run)
    if stopped:
        os.kill(first, signal.SIGTERM)
    flag.touch()
    assert place.server.wait(first) == 1, logs.read_text()
    assert files_in(run) == before
    told = [line for line in logs.read_text().splitlines() if line.startswith("sage-fast train: '")]
    assert len(told) == 1, logs.read_text()
    assert f"run.lock': another run has taken the folder over (process {second} on " in told[0]
    assert "Traceback" not in logs.read_text()
    assert outcome(run) == outcome(reference)
    assert RunFolder(run).facts["resumed"]


@pytest.mark.fault(
    "a resume of a live run of two ranks where locks act on one host only",
    "both stop together, without writing",
)
def test_two_ranks_whose_folder_was_taken_over_stop_together(place: Place) -> None:
    run, flag = place.here / "taken-two", place.here / "taken-two.flag"
    options = [
        "--reward.name",
        "tests.test_system_calls:WaitsForFile",
        "--train.checkpoint_interval",
        "1",
    ]
    without_locks = faulty("flock=0", "/taken-two/run.lock")
    ranks = [
        place.start(
            "taken-two",
            *options,
            "--timeout_minutes",
            "5",
            **without_locks,
            **rank,
            WAIT_FOR=str(flag),
        )
        for rank in two_ranks()
    ]
    place.wait_for("taken-two", "waits", times=2)
    second_log = place.logs / "taken-two-second.log"
    command = [
        "train",
        str(PAPER),
        "--output",
        str(run),
        *SMALL,
        *options,
        "--resume",
        "--train.iterations",
        "2",
    ]
    second = place.server.start(command, second_log, **without_locks)
    assert place.server.wait(second) == 0, second_log.read_text()
    before = files_in(run)
    flag.touch()
    assert [place.server.wait(process) for process in ranks] == [1, 1], place.log("taken-two")
    assert files_in(run) == before
    assert f"another run has taken the folder over (process {second} on " in place.log("taken-two")
    assert "Traceback" not in place.log("taken-two")
