"""A run and its files: what trackers receive, what `--resume` continues, what colleagues can
read."""

import dataclasses
import errno
import itertools
import json
import logging
import os
import shlex
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sage_fast.callbacks import trackers
from sage_fast.callbacks import writer as module
from sage_fast.callbacks.trackers import check_trackers
from sage_fast.callbacks.writer import MetricsWriter
from sage_fast.cli import main
from sage_fast.commands.sample_videos import save_videos
from sage_fast.config.loader import build, leaves
from sage_fast.config.schema import Config
from sage_fast.eval.sheets import contact_sheet
from sage_fast.report.page import report_run
from sage_fast.rewards.composite import load_rewards
from sage_fast.run import train as train_module
from sage_fast.util.errors import RunError, UserError
from sage_fast.util.files import read_metrics
from sage_fast.util.launchers import GROUP
from sage_fast.util.meters import name_in_name
from sage_fast.util.profiling import PHASES, WAIT
from tests.test_docs import REPOSITORY, SMALL, blocks, commands, tables
from tests.tiny import BASE_SETTINGS, arguments, keys_of, settings, tiny_trainer, train
from tests.waits import wait_until


def made(config: Config, run: Path, run_id: str, start: int = 0) -> MetricsWriter:
    return MetricsWriter(config.tracking, leaves(dataclasses.asdict(config)), run, run_id, start)


def write(run: Path, names: list[str], start: int = 0) -> list[Path]:
    """Write two iterations between two evaluations of two videos, as a run does; return the
    videos."""
    run.mkdir(exist_ok=True)
    config = settings(output=str(run), tracking__trackers=names, tracking__project="shapes")
    writer = made(config, run, "0a1b2c3d", start)
    clips = [torch.rand(3, 3, 32, 32)] * 2
    videos = save_videos(clips, ["a", "b"], run / f"videos-{start}", 8)
    for iteration in (start, start + 2):
        scores = {
            "iteration": iteration,
            "prompts": ["a", "b"],
            "reward": [1.0, 2.0],
            "parts": {"vq": [0.5, iteration]},
        }
        writer.write_evaluation(scores, videos, clips)
        for i in range(iteration, start + 2):
            writer.write(
                {
                    "iteration": i,
                    "reward/mean": 10.0 + i,
                    "loss": float("nan"),
                    "norms": [1.0, None],
                }
            )
    writer.close()
    return videos


def events(run: Path) -> EventAccumulator:
    return EventAccumulator(
        str(run / "tensorboard"), {"images": 0, "scalars": 0, "tensors": 0}
    ).Reload()


def steps(found: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in found.Scalars(tag)}


def test_tensorboard_gets_numbers_scores_settings_and_the_sheet(tmp_path: Path) -> None:
    write(tmp_path, ["tensorboard"])
    found = events(tmp_path)
    assert steps(found, "reward/mean") == {1: 10, 2: 11}
    assert steps(found, "heldout/reward") == {0: 1.5, 2: 1.5}
    assert steps(found, "heldout/vq") == {0: 0.25, 2: 1.25}
    (image, _) = found.Images("heldout/videos")
    assert (image.width, image.height) == contact_sheet(
        [torch.rand(3, 3, 32, 32)] * 2, ["a", "b"]
    ).size
    (config,) = found.Tensors("config/text_summary")
    assert b"    tracking.project: shapes" in config.tensor_proto.string_val[0]


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "0"},  # left in a shell
        {"LOCAL_RANK": "1", "WORLD_SIZE": "1"},  # a run of its own on the second GPU
        {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"},
        {
            "LOCAL_RANK": "0",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        },
    ],
    ids=lambda variables: "+".join(variables),
)
def test_a_tracker_of_one_process_looks_for_no_other_ranks(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    PartialState._reset_state()
    write(tmp_path, ["tensorboard"])
    assert PartialState().num_processes == 1
    assert not dist.is_initialized()
    assert {name: os.environ[name] for name in GROUP if name in os.environ} == variables, (
        "they say which GPU it has"
    )


def test_a_resumed_run_replaces_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, ["tensorboard"])
    write(tmp_path, ["tensorboard"], start=1)
    assert steps(events(tmp_path), "reward/mean") == {1: 10, 2: 11, 3: 12}
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[0] == {"iteration": 0, "reward/mean": 10.0, "loss": None, "norms": [1.0, None]}


# -- names -----------------------------------------------------------------------------------------


def test_no_metric_is_the_folder_of_another() -> None:
    """Of all that the page of metrics lists, which a test of the page compares with a run, and of
    evaluations."""
    listed = [name for table in tables("reference/metrics.md")[:2] for name in table]
    placeholders = {"<phase>": (*PHASES, WAIT), "<part>": ("vq", "mq", "ta", "clip/score")}
    names = set(listed)
    for mark, values in placeholders.items():
        names = {name.replace(mark, value) for name in names for value in values}
    names |= {
        f"heldout/{part}"
        for part in ("reward", "videos", "video_00", "vq", "clip/score", "judge/alignment")
    }
    assert len(names) > 40
    assert name_in_name(names) is None


def test_every_row_of_a_run_can_be_a_tree_of_files(tmp_path: Path) -> None:
    """As MLflow keeps it: a folder for each part of a name, and a file for each metric."""
    trainer = tiny_trainer(settings(kl__strategy="dual", train__optimizer_steps=2))
    row = trainer.iteration(0)
    assert len(row) > 20
    for name, value in row.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(value))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["loss", "loss/policy"], ("loss", "loss/policy")),
        (["a/b/c", "a", "b"], ("a", "a/b/c")),
        (["a/b/c", "a/b", "x"], ("a/b", "a/b/c")),
        (["loss", "loss_policy", "policy/loss", "los"], None),
        ([], None),
    ],
)
def test_names_within_names(names: list[str], found: tuple[str, str] | None) -> None:
    assert name_in_name(names) == found


class Nested:
    """A reward with a part in the folder of another."""

    def __call__(self, videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
        means = videos.mean((1, 2, 3, 4))
        return {"clip": means, "clip/first": means}


@pytest.mark.parametrize("key", ["reward.name", "eval.judge"])
def test_parts_that_no_tracker_can_hold_together_are_refused(key: str) -> None:
    given = {"reward.weights": {"clip": 1.0}} if key == "reward.name" else {}
    config = build(BASE_SETTINGS | given | {key: f"{__name__}:Nested"})
    message = (
        "part 'clip' is the folder of part 'clip/first', which trackers cannot hold; expected "
        "another name"
    )
    prompts = keys_of(["a small red ball moves left slowly"])
    with pytest.raises(UserError, match=message):
        load_rewards(config, prompts, prompts, {})


def test_metrics_are_written_without_any_tracker(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert not (tmp_path / "tensorboard").exists()


def test_a_row_that_finds_no_room_is_written_before_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise there is no checkpoint, so the record of a resumed run has no gap."""

    def full(file: object, line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = made(settings(tracking__trackers=[]), tmp_path, "0a1b2c3d")
    with monkeypatch.context() as patch:
        patch.setattr(module, "append_line", full)
        for fails in (lambda: writer.write({"iteration": 0}), writer.sync):
            with pytest.raises(OSError, match="No space left"):
                fails()
    writer.sync()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"iteration": 0}]
    writer.close()


def test_wandb_gets_them_too_and_goes_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    seen: set[Path] = set()
    for start in (0, 2):
        videos = write(tmp_path / "demo", ["wandb"], start)
        wandb.teardown()  # its service then writes the log to the end, as when a process exits
        (folder,) = set((tmp_path / "demo" / "wandb").glob("offline-run-*-0a1b2c3d")) - seen
        seen.add(folder)
        log = (folder / "run-0a1b2c3d.wandb").read_bytes()
        for text in (
            b"shapes",
            b"demo",
            b"sampling.eta",
            b"reward/mean",
            b"heldout/reward",
            b"heldout/vq",
        ):
            assert text in log, text
        media = [
            path.read_bytes()
            for path in sorted((folder / "files" / "media" / "videos").rglob("*.mp4"))
        ]
        assert sorted(media) == sorted([video.read_bytes() for video in videos] * 2)
        assert len(list((folder / "files" / "media" / "images").rglob("*.png"))) == 2


def records(file: Path) -> Iterator[Any]:
    """Records of a wandb log; a header of 7 bytes precedes the first one and each of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place = file.read_bytes(), 7
    while place < len(content):
        _, size, _ = struct.unpack_from("<IHB", content, place)
        yield Record.FromString(content[place + 7 : place + 7 + size])
        place += 7 + size


def test_the_example_of_the_page_logs_to_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (block,) = [
        one
        for one in blocks(REPOSITORY / "docs" / "reference" / "metrics.md")
        if "wandb" in one.text
    ]
    for words in commands(block):
        if words[0] == "export":
            monkeypatch.setenv(*words[1].split("="))
        elif words[0] == "sage-fast":
            few = arguments(train__iterations=1, eval__num_prompts=2, eval__seeds_per_prompt=1)
            assert main([*words[1:], *SMALL, *few]) == 0
        else:
            assert words[:2] == ["wandb", "sync"]
            wandb.teardown()
            (log,) = tmp_path.glob(f"{words[2]}/*.wandb")
            assert b"reward/mean" in log.read_bytes()


def test_wandb_takes_the_rows_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb drops rows whose `step` is not beyond the last one, as after a return to a
    checkpoint."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = settings(tracking__trackers=["wandb"])
    # not closed the first time, as in a crash
    for start, rewards in ((0, (1.0, 2.0)), (1, (3.0, 4.0))):
        writer = made(config, tmp_path, "0a1b2c3d", start)
        for iteration, reward in enumerate(rewards, start):
            writer.write({"iteration": iteration, "reward/mean": reward})
    writer.close()
    wandb.teardown()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-0a1b2c3d.wandb")
    found = list(records(file))
    rows = [
        {item.nested_key[-1]: json.loads(item.value_json) for item in record.history.item}
        for record in found
    ]
    assert [row["reward/mean"] for row in rows if row] == [1, 2, 3, 4]
    assert [row["iterations"] for row in rows if row] == [1, 2, 2, 3]
    assert {record.metric.step_metric for record in found if record.metric.glob_name == "*"} == {
        "iterations"
    }


def test_a_tracker_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LoggedOut:
        def __init__(self, *args: object, **options: object) -> None: ...

        def start(self) -> None:
            raise PermissionError("log in first")

    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "wandb", LoggedOut)
    with pytest.raises(RunError, match="tracker 'wandb' does not start: log in first"):
        write(tmp_path, ["wandb"])


def test_the_contact_sheet_is_drawn_once_for_all_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(TensorBoardTracker):
        def __init__(self, project: str, folder: Path) -> None:
            super().__init__("other", folder)

        def log_images(self, images: dict[str, Any], step: int | None, **options: Any) -> None:
            shown.append((step, images["heldout/videos"][0].size))

    shown: list[Any] = []
    drawn: list[Any] = []
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "aim", Other)
    draw = trackers.contact_sheet
    monkeypatch.setattr(
        trackers, "contact_sheet", lambda *given: drawn.append(given) or draw(*given)
    )
    write(tmp_path, ["aim", "tensorboard"])
    assert len(drawn) == 2, "one for each evaluation"
    sheets = events(tmp_path).Images("heldout/videos")
    assert shown == [(sheet.step, (sheet.width, sheet.height)) for sheet in sheets]


def test_a_tracker_that_does_not_start_again_ends_no_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder is damaged, or its service is down; the record goes on."""
    write(tmp_path, [])
    for run in (tmp_path, tmp_path / "new"):
        run.mkdir(exist_ok=True)
        (run / "tensorboard").write_text("no folder")
    with pytest.raises(RunError, match="tracker 'tensorboard' does not start: "):
        write(tmp_path / "new", ["tensorboard"])
    caplog.set_level(logging.INFO)
    write(tmp_path, ["tensorboard"], start=1)
    (line,) = (" ".join(message.split()) for message in caplog.messages)
    assert line.startswith("note: tracker 'tensorboard' does not start: ")
    assert line.endswith("; it is left out, and metrics.jsonl has every row")
    assert [row["iteration"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


class Dying(TensorBoardTracker):
    """A tracker whose service goes away after the first row."""

    def __init__(self, project: str, folder: Path) -> None:
        super().__init__("dying", folder)
        self.asked: list[int] = []
        dying.append(self)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        assert step is not None
        self.asked.append(step)
        if step > 1:
            raise BrokenPipeError("the service went away\nat its socket")
        super().log(values, step, **options)

    def finish(self) -> None:
        raise BrokenPipeError("the service went away")


dying: list[Dying] = []


def test_a_tracker_that_fails_is_noted_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of a tracker do not end the run, and the record and the other trackers lose
    nothing."""
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "aim", Dying)
    config = settings(tracking__trackers=["aim", "tensorboard"])
    caplog.set_level(logging.INFO)
    writer = made(config, tmp_path, "0a1b2c3d")
    for i in range(6):
        writer.write({"iteration": i, "reward/mean": 10.0 + i})
    writer.close()
    assert dying.pop().asked == [1, 2, 3, 4], "three chances"
    assert " ".join(" ".join(caplog.messages).split()) == (
        "note: tracker 'aim' failed (BrokenPipeError: the service went away); it is left out if it "
        "fails 3 times, and metrics.jsonl has every row"
    )
    assert list(steps(events(tmp_path), "reward/mean")) == [1, 2, 3, 4, 5, 6]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6


def test_a_tracker_that_cannot_be_closed_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: TensorBoardTracker) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(TensorBoardTracker, "finish", fail)
    caplog.set_level(logging.INFO)
    writer = made(settings(tracking__trackers=["tensorboard"]), tmp_path, "0a1b2c3d")
    os.close(writer._file.fileno())  # nor can the record, whose rows are on the disk already
    writer.close()
    text = " ".join(" ".join(caplog.messages).split())
    assert "tracker 'tensorboard' failed (OSError: [Errno 116] Stale file handle)" in text
    assert "metrics.jsonl: [Errno 9] Bad file descriptor" in text


class Hanging(TensorBoardTracker):
    """A tracker one of whose calls never returns, or ends the program."""

    call = ""
    released: threading.Event
    threads: ClassVar[list[threading.Thread]]

    def __init__(self, project: str, folder: Path) -> None:
        super().__init__("hanging", folder)

    def start(self) -> None:
        self.threads.append(threading.current_thread())
        self._act("start")
        super().start()

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.threads.append(threading.current_thread())
        self._act("log")
        super().log(values, step, **options)

    def finish(self) -> None:
        self._act("finish")
        super().finish()

    def _act(self, call: str) -> None:
        if self.call == f"{call} exits":
            sys.exit(3)
        if self.call == call:
            self.released.wait(600)


@pytest.fixture
def hanging(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Hanging]]:
    monkeypatch.setattr(trackers, "SECONDS", 0.5)
    monkeypatch.setattr(trackers, "SECONDS_AT_ENDS", 0.5)
    monkeypatch.setattr(Hanging, "threads", [], raising=False)
    monkeypatch.setattr(Hanging, "released", threading.Event(), raising=False)
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "aim", Hanging)
    monkeypatch.setattr(Hanging, "call", request.param)
    yield Hanging
    Hanging.released.set()


@pytest.mark.parametrize(
    ("hanging", "why"),
    [
        ("log", "(TimeoutError: no answer within 0.5 s); it is left out, and"),
        ("finish", "(TimeoutError: no answer within 0.5 s); it is left out, and"),
        ("log exits", "(SystemExit: 3); it is left out if it fails 3 times, and"),
        ("finish exits", "(SystemExit: 3); it is left out if it fails 3 times, and"),
    ],
    indirect=["hanging"],
)
@pytest.mark.fault("a tracker hangs, or calls sys.exit", "left out, with a note; the run goes on")
def test_a_tracker_that_hangs_or_exits_does_not_hold_or_end_the_run(
    hanging: type[Hanging], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer = made(settings(tracking__trackers=["aim", "tensorboard"]), tmp_path, "0a1b2c3d")
    for i in range(4):
        writer.write({"iteration": i, "reward/mean": 10.0 + i})
    writer.close()
    assert f"tracker 'aim' failed {why} metrics.jsonl has every row" in " ".join(
        " ".join(caplog.messages).split()
    )
    assert list(steps(events(tmp_path), "reward/mean")) == [1, 2, 3, 4]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.parametrize(
    ("hanging", "why"), [("start", " within 0.5 s"), ("start exits", ": 3")], indirect=["hanging"]
)
@pytest.mark.fault("a tracker hangs, or calls sys.exit", "left out, with a note; the run goes on")
def test_a_tracker_that_hangs_or_exits_at_the_start_ends_no_resume(
    hanging: type[Hanging], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [])
    caplog.set_level(logging.INFO)
    write(tmp_path, ["aim", "tensorboard"], start=1)
    (line,) = (" ".join(message.split()) for message in caplog.messages)
    assert line.startswith(f"note: tracker 'aim' does not start{why}; it is left out, and")
    assert list(steps(events(tmp_path), "reward/mean")) == [2, 3]


def test_a_process_ends_although_the_package_of_a_tracker_hangs_at_exit(tmp_path: Path) -> None:
    """wandb's exit hook calls `finish` again."""
    code = (
        "import atexit, time; from sage_fast import cli; from tests.test_trackers import *\n"
        "Hanging.call, Hanging.released, trackers.SECONDS = 'log', threading.Event(), 0.5\n"
        "trackers.LOGGER_TYPE_TO_CLASS['aim'] = Hanging\n"
        "Hanging.threads = []; atexit.register(time.sleep, 1000)\n"
        f"cli._run = lambda words: write(Path({str(tmp_path)!r}), ['aim']) and 3\n"
        "sys.exit(cli.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, timeout=300, check=False
    )
    assert done.returncode == 3


@pytest.mark.parametrize("hanging", [""], indirect=True)
def test_all_calls_of_a_tracker_are_on_one_thread_that_ends(
    hanging: type[Hanging], tmp_path: Path
) -> None:
    """mlflow keeps its run in thread-local state."""
    write(tmp_path, ["aim"])
    (thread,) = set(hanging.threads)
    thread.join(600)
    assert not thread.is_alive()


def test_unknown_and_missing_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(["tensorboard"])
    with pytest.raises(UserError, match=r"tracking\.trackers: 'wandbb'.*did you mean 'wandb'\?"):
        check_trackers(["tensorboard", "wandbb"])
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: [])
    with pytest.raises(
        UserError, match="'comet_ml' is not installed; install it with: pip install comet-ml"
    ):
        check_trackers(["comet_ml"])


def test_trackers_are_checked_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> Any:
        raise AssertionError("loaded")

    monkeypatch.setattr(train_module, "load_setup", fail)
    with pytest.raises(UserError, match=r"tracking\.trackers"):
        train_module.train(
            settings(output=str(tmp_path / "run"), tracking__trackers=["tensorbord"])
        )
    assert not (tmp_path / "run").exists()


# -- no second run for a resumed one ---------------------------------------------------------------


def continued(names: list[str], run: Path, start: int, rewards: list[float]) -> None:
    """Resume a run that had these trackers, at the iteration `start`."""
    config = settings(output=str(run), tracking__trackers=names, tracking__project="shapes")
    about = config.tracking, leaves(dataclasses.asdict(config)), run, "0a1b2c3d", start
    writer = MetricsWriter(*about, continued=names)
    for iteration, reward in enumerate(rewards, start):
        writer.write({"iteration": iteration, "reward/mean": reward})
    writer.close()


def test_a_tracker_that_would_begin_a_second_run_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start has it; tensorboard goes on."""

    class Other(TensorBoardTracker):
        def __init__(self, project: str, folder: Path) -> None:
            super().__init__("other", folder)
            begun.append(project)

    begun: list[str] = []
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "aim", Other)
    write(tmp_path, ["aim", "tensorboard"])
    caplog.set_level(logging.INFO)
    continued(["aim", "tensorboard"], tmp_path, 2, [12.0])
    assert begun == ["shapes"]
    assert "tracker 'aim' would begin a second run for this one; it is left out" in " ".join(
        caplog.text.split()
    )
    assert steps(events(tmp_path), "reward/mean") == {1: 10, 2: 11, 3: 12}


def test_a_tracker_that_keeps_what_is_undone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    caplog.set_level(logging.INFO)
    write(tmp_path, ["tensorboard"])
    continued(["tensorboard", "wandb"], tmp_path, 1, [12.0])
    wandb.teardown()
    notes = [
        " ".join(message.split())
        for message in caplog.messages
        if message.startswith("note: tracker")
    ]
    expected = (
        "note: tracker 'wandb' keeps the numbers beyond iteration 1, which are made again: its "
        "later ones count"
    )
    assert notes == [expected]


def test_a_run_that_begins_again_leaves_no_steps_in_tensorboard(tmp_path: Path) -> None:
    """It was killed before its first checkpoint."""
    write(tmp_path, ["tensorboard"])
    continued(["tensorboard"], tmp_path, 0, [20.0])
    assert steps(events(tmp_path), "reward/mean") == {1: 20}


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    write(tmp_path / "run", ["mlflow"])
    continued(["mlflow"], tmp_path / "run", 1, [20.0, 21.0])
    (found,) = mlflow.search_runs(experiment_names=["shapes"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 10), (2, 11), (2, 20), (3, 21)]


# -- a run that is resumed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one iteration, then a second one after `--resume`, under the usual umask."""
    run = tmp_path_factory.mktemp("run") / "demo"
    umask = os.umask(0o022)
    try:
        for iterations in (1, 2):
            config = settings(output=str(run), train__iterations=iterations, train__ema_decay=0.5,
                eval__num_videos=1,
                              eval__judge="testbed-judge")  # fmt: skip
            train(config, resume=iterations > 1, report=report_run)
    finally:
        os.umask(umask)
    return run


def test_run_json_keeps_the_first_start_and_lists_the_others(resumed: Path) -> None:
    facts = json.loads((resumed / "run.json").read_text())
    (later,) = facts["resumed"]
    assert later["iteration"] == 1
    assert facts["date"] < later["date"]
    assert facts["command"] == later["command"] == shlex.join(sys.argv)
    assert len(facts["run_id"]) == 8


def test_held_out_scores_reach_the_tracker(resumed: Path) -> None:
    means, judged = {}, {}
    for name, step in (("before", 0), ("after", 2)):
        scores = json.loads((resumed / "eval" / f"{name}.json").read_text())
        means[step], judged[step] = (
            np.mean(scores["reward"]),
            np.mean(scores["parts"]["judge/naturalness"]),
        )
    found = steps(events(resumed), "heldout/reward")
    assert {step: found[step] for step in means} == pytest.approx(means)
    looked_on = steps(events(resumed), "heldout/judge/naturalness")
    assert {step: looked_on[step] for step in judged} == pytest.approx(judged)
    assert list(found) == [0, 1, 2]  # 1 is the end of the first part
    assert list(steps(events(resumed), "reward/mean")) == [1, 2]


def test_colleagues_can_read_every_file(resumed: Path) -> None:
    modes = {
        path.relative_to(resumed): path.stat().st_mode & 0o777
        for path in resumed.rglob("*")
        if path.is_file()
    }
    names = {path.name for path in modes}
    assert {
        "trainable-00001-of-00001.safetensors",
        "ema-00001-of-00001.safetensors",
        "anchor-00001-of-00001.safetensors",
        "pytorch_lora_weights.safetensors",
    } <= names
    assert {path: oct(mode) for path, mode in modes.items() if mode != 0o644} == {}


def test_tensorboard_whose_files_cannot_be_written_is_left_out_with_one_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own thread writes them; that thread prints no traceback."""
    caplog.set_level(logging.INFO)
    writer = made(settings(tracking__trackers=["tensorboard"]), tmp_path, "0a1b2c3d")
    shutil.rmtree(tmp_path / "tensorboard")
    written = itertools.count()

    def is_noted() -> bool:
        writer.write({"iteration": next(written), "loss": 1.0})
        return bool(caplog.messages)

    wait_until(is_noted)
    for _ in range(3):
        is_noted()
    writer.close()
    assert [
        message.startswith("note: tracker 'tensorboard' failed") for message in caplog.messages
    ] == [True]
    assert "Traceback" not in capfd.readouterr().err
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == next(written)
