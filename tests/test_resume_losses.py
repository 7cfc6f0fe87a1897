"""What a resume does when something that the run has written is not there: it never takes that for
a new run."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_fast.cli import main
from sage_fast.run.claim import check_checkpoints, record_checkpoint
from sage_fast.run.train import Run
from sage_fast.run_folder import MANIFEST, RunFolder, check_weights, digest, iteration_of
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics, write_json
from sage_fast.util.presence import check_readable, entries, holds_file, holds_folder
from tests.test_cli import PAPER, SMALL

EVALUATED = [
    *SMALL,
    "--train.iterations",
    "2",
    "--train.checkpoint_interval",
    "1",
    "--eval.interval",
    "1",
]


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations, with an evaluation and a checkpoint after each."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", str(PAPER), "--output", str(run), "--quiet", *EVALUATED]) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


# -- absence ---------------------------------------------------------------------------------------


def moved(folder: Path) -> None:
    folder.rename(folder.parent.parent / f"{folder.name}-elsewhere")


def link_to_nothing(path: Path) -> None:
    moved(path)
    path.symlink_to(path.parent / "unmounted")


def loop(path: Path) -> None:
    """A link to itself cannot be read, whoever asks."""
    moved(path)
    path.symlink_to(path)


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        moved(path)


def file_in_place(folder: Path) -> None:
    moved(folder)
    folder.write_text("")


def links_to_nothing(folder: Path) -> None:
    for path in list(folder.iterdir()):
        link_to_nothing(path)


def several(*acts: tuple[str, Callable[[Path], None]]) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        for name, one in acts:
            one(run / name)

    return act


NONE_SEEN = (
    "checkpoints': no checkpoint can be seen, but the run has written one after 2 iterations"
)
LOSSES: dict[str, tuple[Callable[[Path], None], str]] = {
    "checkpoints moved": (several(("checkpoints", moved)), NONE_SEEN),
    "checkpoints emptied": (several(("checkpoints", emptied)), NONE_SEEN),
    "checkpoints are links to nothing": (several(("checkpoints", links_to_nothing)), NONE_SEEN),
    "a link to nothing": (
        several(("checkpoints", link_to_nothing)),
        "checkpoints' is a link to nothing: '",
    ),
    "a file": (
        several(("checkpoints", file_in_place)),
        "checkpoints' cannot be read: Not a directory",
    ),
    "checkpoints unreadable": (
        several(("checkpoints", loop)),
        "checkpoints' cannot be read: Too many levels",
    ),
    "a checkpoint unreadable": (
        several(("checkpoints/iteration-000002", loop)),
        "iteration-000002' cannot be read: Too many levels",
    ),
    "a file of a checkpoint unreadable": (
        several(("checkpoints/iteration-000002/training/state.json", loop)),
        "state.json' cannot be read: Too many levels",
    ),
    "rows and checkpoints": (several(("checkpoints", moved), ("metrics.jsonl", moved)), NONE_SEEN),
    "rows, checkpoints and weights": (
        several(("checkpoints", moved), ("metrics.jsonl", moved), ("weights", moved)),
        NONE_SEEN,
    ),
    "run.json": (
        several(("run.json", moved)),
        "run.json' is missing, and metrics.jsonl, checkpoints, weights, eval",
    ),
    "run.json and checkpoints": (
        several(("run.json", moved), ("checkpoints", moved)),
        "run.json' is missing, and metrics.jsonl, weights, eval, videos",
    ),
    "all but settings and pictures": (
        several(
            *(
                (name, moved)
                for name in ("run.json", "metrics.jsonl", "checkpoints", "weights", "eval")
            )
        ),
        "run.json' is missing, and videos, tensorboard, report.html are there",
    ),
    "run.json is a link to nothing": (
        several(("run.json", link_to_nothing)),
        "run.json' is a link to nothing",
    ),
    "metrics are a link to nothing": (
        several(("metrics.jsonl", link_to_nothing)),
        "metrics.jsonl' is a link to nothing",
    ),
    "evaluations unreadable": (several(("eval", loop)), "eval' cannot be read: Too many levels"),
    "an evaluation unreadable": (
        several(("eval/before.json", loop)),
        "before.json' cannot be read: Too many levels",
    ),
    "an evaluation is a link to nothing": (
        several(("eval/after.json", link_to_nothing)),
        "after.json' is a link to",
    ),
    "settings": (
        several(("config.yaml", moved)),
        "config.yaml is missing, and run.json, metrics.jsonl, checkpoints, weights, eval",
    ),
    "settings are a link to nothing": (
        several(("config.yaml", link_to_nothing)),
        "config.yaml' is a link to nothing",
    ),
}


@pytest.mark.parametrize("requeued", [False, True], ids=["by hand", "requeued"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.fault(
    "a resume of a run whose checkpoints, settings or records were moved, emptied, or cannot be "
    "read",
    "one line with status 2, nothing changed",
)
def test_a_loss_is_never_taken_for_a_new_run(
    loss: str, requeued: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    act, expected = LOSSES[loss]
    act(run)
    before = files(run)
    source = [str(PAPER), "--output", str(run)] if requeued else [str(run)]
    assert main(["train", *source, "--resume", "--train.iterations", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert files(run) == before


def test_a_moved_run_without_run_json_begins_no_other_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.yaml names the folder where it was: taken for a file of settings, it would begin a
    run there."""
    (run / "run.json").unlink()
    before = files(run)
    assert main(["train", str(run / "config.yaml"), "--resume"]) == 2
    assert "run.json' is missing" in capsys.readouterr().err
    assert files(run) == before


def without_checkpoint(run: Path, keys: tuple[str, ...] = ()) -> RunFolder:
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "weights")
    (run / "eval" / "after.json").unlink()
    facts = {key: value for key, value in read_json(run / "run.json").items() if key not in keys}
    write_json(facts | ({} if "checkpoint" in keys else {"checkpoint": None}), run / "run.json")
    return RunFolder(run)


@pytest.mark.parametrize(
    ("left", "trace"),
    [
        ("weights", "weights/ holds what the run has trained"),
        ("eval/after.json", "eval/after.json is of the trained weights"),
        (None, None),
    ],
)
def test_each_trace_of_a_checkpoint_counts(
    left: str | None, trace: str | None, finished: Path, run: Path
) -> None:
    folder = without_checkpoint(run)
    if left is None:
        check_checkpoints(folder)  # it was killed before its first checkpoint
        return
    if (finished / left).is_dir():
        shutil.copytree(finished / left, run / left)
    else:
        shutil.copy(finished / left, run / left)
    with pytest.raises(UserError, match=trace):
        check_checkpoints(RunFolder(run))


def test_rows_of_a_version_that_recorded_no_checkpoint_are_not_dropped(run: Path) -> None:
    folder = without_checkpoint(run, ("checkpoint",))
    with pytest.raises(
        UserError,
        match=r"no checkpoint can be seen, but metrics.jsonl has the lines of 2 iterations",
    ):
        check_checkpoints(folder)


@pytest.mark.fault("a resume of a run that ended before its first checkpoint", "it begins again")
def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    tmp_path: Path,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has rows and an evaluation, and no checkpoint is lost."""

    def full(self: Run, states: object = None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints")

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", full)
        command = ["train", str(PAPER), "--output", str(run), *EVALUATED]
        assert main(command) == 1
    assert [row["iteration"] for row in read_metrics(run / "metrics.jsonl")] == [0]
    assert (run / "eval" / "iteration-000001.json").is_file()
    capsys.readouterr()
    assert main(["train", str(run), "--resume"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no checkpoint: starting at iteration 1" in text
    assert (
        "note: the run continues after 0 iterations; undone: the line of iteration 1, the "
        "evaluation iter" in text
    )
    assert same(run, finished)


def numbers(run: Path) -> list[dict[str, object]]:
    timed = ("time/", "throughput/", "memory/", "log_prob/")
    rows = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


def same(run: Path, other: Path) -> bool:
    """Whether two runs have the same metrics and evaluations."""
    scores = [
        {file.name: read_json(file) for file in (folder / "eval").iterdir()}
        for folder in (run, other)
    ]
    return scores[0] == scores[1] and numbers(run) == numbers(other)


# -- what lies beyond ------------------------------------------------------------------------------


def tensorboard_steps(run: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    return [event.step for event in found.Scalars(tag)]


@pytest.mark.fault(
    "a resume of a finished run whose newest checkpoint is gone",
    "from the one before; what lay beyond is undone by name, final weights are kept; likewise",
)
def test_what_lies_beyond_is_as_if_it_had_never_been(
    run: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at once, the run has nothing beyond its iteration; carried on, it ends as it did."""
    moved(run / "checkpoints" / "iteration-000002")
    weights = files(run / "weights")
    earlier = run / "weights.until-000002"  # of an earlier resume of this kind: it stays
    earlier.mkdir()

    with monkeypatch.context() as patch:
        patch.setattr(Run, "iterate", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["train", str(run), "--resume"]) == 130
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "the checkpoint of 2 iterations, the newest that the run has written, cannot be used"
        in text
    )
    assert "iterations 2 to 2 are done again" in text
    assert (
        "undone: the line of iteration 2, the evaluation after, the final weights, which are now in"
        in text
    )
    assert [row["iteration"] for row in read_metrics(run / "metrics.jsonl")] == [0]
    assert sorted(path.name for path in (run / "eval").iterdir()) == [
        "before.json",
        "iteration-000001.json",
    ]
    assert sorted(path.name for path in (run / "videos").iterdir()) == [
        "before",
        "iteration-000001",
    ]
    assert RunFolder(run).newest_weights() == (run / "checkpoints" / "iteration-000001", 1)
    assert tensorboard_steps(run, "heldout/reward") == [0, 1]
    assert not files(earlier)
    aside = files(run / "weights.until-000002-2")
    assert {path.name: content for path, content in aside.items()} == {
        p.name: c for p, c in weights.items()
    }
    assert RunFolder(run).facts["checkpoint"] == 1

    assert main(["train", str(run), "--resume"]) == 0
    assert same(run, finished)
    assert tensorboard_steps(run, "reward/mean") == [1, 2]
    assert tensorboard_steps(run, "heldout/reward") == [0, 1, 2]
    assert [start["iteration"] for start in RunFolder(run).facts["resumed"]] == [1, 1]


def test_a_checkpoint_that_was_skipped_is_read_by_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what a resume reads is damaged, so `sample` would use weights that the run has
    undone."""
    newest = run / "checkpoints" / "iteration-000002"
    with (newest / "training" / "state.json").open("a") as damaged:
        damaged.write("\n")
    assert RunFolder(run).newest_weights()[1] == 2
    options = ["--train.iterations", "3", "--train.keep_best", "false"]
    assert main(["train", str(run), "--resume", *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "iteration-000002, which is iteration-000002.skipped until the next checkpoint is written"
        in text
    )
    assert [iteration_of(folder) for folder in RunFolder(run).checkpoints()] == [2, 3]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "iteration-000002",
        "iteration-000003",
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.fault(
    "a resume whose newest checkpoint cannot be read at the moment", "one line, nothing changed"
)
def test_a_checkpoint_that_cannot_be_read_is_not_undone(
    number: int, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files can be opened, but not read: it may be whole, so a resume from the one before would
    lose it."""
    before = files(run)

    def unread(file: Path) -> dict[str, object]:
        if "iteration-000002" in str(file):
            raise OSError(number, os.strerror(number))
        return digest(file)

    monkeypatch.setattr("sage_fast.run_folder.digest", unread)
    assert main(["train", str(run), "--resume"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        f"iteration-000002': {os.strerror(number)}: cannot be read now; try again, or move "
        "iteration-000002" in line
    )
    assert line.endswith("nothing was changed")
    after = files(run)
    for changed in (run / "run.lock", run / "logs" / "rank-000.log"):
        before.pop(changed, None)
        after.pop(changed, None)
    assert after == before
    (run / "weights").rename(run / "elsewhere")
    assert RunFolder(run).newest_weights() == (run / "checkpoints" / "iteration-000001", 1)


def test_settings_until_an_iteration_are_those_it_was_reached_with(run: Path) -> None:
    """The second resume, from an earlier iteration, undoes the settings of the first."""
    first = (run / "config.yaml").read_bytes()
    resume = ["train", str(run), "--resume", "--quiet"]
    resume += ["--train.keep_best", "false"]
    assert main([*resume, "--train.iterations", "3", "--train.learning_rate", "2e-3"]) == 0
    assert RunFolder(run).settings_until(2).read_bytes() == first
    for iteration in (2, 3):
        moved(RunFolder(run).checkpoint(iteration))
    shutil.copytree(run / "iteration-000002-elsewhere", run / "checkpoints" / "iteration-000001")
    reseal(run / "checkpoints" / "iteration-000001", 1)
    assert main([*resume, "--train.iterations", "2", "--train.learning_rate", "4e-3"]) == 0
    assert {i: file.read_bytes() for i, file in RunFolder(run).earlier_settings().items()} == {
        1: first
    }


def reseal(checkpoint: Path, iteration: int) -> None:
    """Make a copy of a checkpoint one of another iteration."""
    from sage_fast.run_folder import STATE, digest

    state = read_json(checkpoint / STATE)
    write_json(state | {"iteration": iteration}, checkpoint / STATE)
    manifest = read_json(checkpoint / MANIFEST)
    manifest["files"][STATE] = digest(checkpoint / STATE)
    write_json(manifest, checkpoint / MANIFEST)


# -- the record, and other members -----------------------------------------------------------------


def test_the_newest_checkpoint_is_on_record(finished: Path) -> None:
    assert RunFolder(finished).facts["checkpoint"] == 2
    assert RunFolder(finished).facts["trackers"] == ["tensorboard"]


def test_a_record_that_cannot_be_written_is_a_note(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.json")

    monkeypatch.setattr("sage_fast.run.claim.write_json", full)
    record_checkpoint(RunFolder(run), 2)
    text = " ".join(caplog.text.split())
    assert "the checkpoint is not named in run.json: 'run.json': No space left on device" in text


def test_a_wrong_record_is_named(run: Path) -> None:
    write_json(read_json(run / "run.json") | {"checkpoint": "two"}, run / "run.json")
    with pytest.raises(UserError, match="'checkpoint' does not hold what it should"):
        check_checkpoints(RunFolder(run))


def test_weights_of_a_run_without_their_manifest_are_refused(run: Path) -> None:
    """Another program's weights have none, but a run's have: without it nothing says whether they
    are whole."""
    for weights in (run / "weights", run / "checkpoints" / "iteration-000001"):
        check_weights(str(weights))
        (weights / MANIFEST).unlink()
        with pytest.raises(UserError, match=r"damaged: manifest\.json is missing"):
            check_weights(str(weights))
    check_weights(str(shutil.copytree(run / "weights", run.parent / "exported")))


def test_a_page_says_that_evaluations_cannot_be_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would show a run without evaluations."""
    loop(run / "eval")
    assert main(["report", str(run)]) == 2
    assert "eval' cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.ESTALE, errno.EIO, errno.ELOOP, errno.ENOTCONN]
)
def test_only_what_is_not_there_is_absent(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of rights, of a disk and of a network file system are never an answer."""
    present = tmp_path / "present"
    present.mkdir()
    (present / "file").write_text("")
    absent = tmp_path / "absent"
    assert entries(absent) == []
    assert not holds_file(absent)
    assert not holds_folder(absent)
    assert entries(present) == [present / "file"]
    assert holds_file(present / "file")
    assert holds_folder(present)
    check_readable(tmp_path)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        patch.setattr(Path, "stat", fail)
        patch.setattr(Path, "open", fail)
        for ask in (entries, holds_file, holds_folder, check_readable):
            for path in (present, absent):
                with pytest.raises(UserError, match="cannot be read"):
                    ask(path)


def test_a_settings_file_of_another_version_is_read_once_by_name(run: Path) -> None:
    """Every setting that has left is named, with the version and the commit that wrote it."""
    facts = read_json(run / "run.json")
    write_json(facts | {"sage_fast": "0.0.7", "commit": "0123abc"}, run / "run.json")
    with (run / "config.yaml").open("a") as file:
        file.write("left: 1\nthese: {have: 2, too: 3}\n")
    with pytest.raises(UserError) as error:
        RunFolder(run).settings()
    for expected in (
        "'left'",
        "'these.have'",
        "'these.too'",
        "sage-fast 0.0.7, commit 0123abc wrote the run",
    ):
        assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_value_that_has_left_names_the_version_too(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run / "config.yaml").read_text().replace("surrogate: clip", "surrogate: clipped")
    (run / "config.yaml").write_text(text)
    before = files(run)
    assert main(["train", str(run), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "objective.surrogate = 'clipped': expected one of" in error
    assert f"sage-fast {json.loads((run / 'run.json').read_text())['sage_fast']}" in error
    assert files(run) == before
