"""Checkpoints that are damaged, the ones that are kept, files that appear whole, and the lock of a
run folder."""

import contextlib
import errno
import functools
import json
import logging
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sage_fast.callbacks.checkpoints import prune_checkpoints
from sage_fast.run import train as train_module
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.run.claim import locked, remove_partials
from sage_fast.run.shards import SavedParts
from sage_fast.run_folder import SKIPPED, STATE, TRAINING, RunFolder, digest, iteration_of
from sage_fast.trainer import Trainer
from sage_fast.util import files
from sage_fast.util.errors import UserError
from sage_fast.util.files import append_line, atomic_path, write_atomic
from tests.tiny import perturb, settings, tiny_trainer, train
from tests.waits import HANG, wait_until


def save(trainer: Trainer, run: Path, iteration: int) -> None:
    save_checkpoint(run, iteration, trainer.engine, trainer.state_dict(), trainer.anchor)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def part(kind: str) -> str:
    return f"training/{kind}-00001-of-00001.safetensors"


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (
        part("ema"),
        lambda file: os.truncate(file, 1000),
        f"{part('ema')} has 1,000 bytes of",
    ),
    "missing": (part("ema"), os.remove, f"{part('ema')} is missing"),
    "weights": (part("trainable"), flip, f"{part('trainable')} has changed"),
    "moments": (part("optimizer-exp_avg"), flip, f"{part('optimizer-exp_avg')} has changed"),
    "optimizer": ("training/optimizer.json", flip, "training/optimizer.json has changed"),
    "counters": (STATE, flip, f"{STATE} has changed"),
    "no manifest": ("manifest.json", os.remove, "manifest.json is missing"),
    "torn manifest": (
        "manifest.json",
        lambda file: os.truncate(file, 100),
        "manifest.json is not what was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.fault(
    "a checkpoint that is truncated, lacks a file, or has a flipped bit",
    "skipped for the sound one before, with a note; without one refused",
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(train__ema_decay=0.9)
    trainer = tiny_trainer(config)
    trainer.iteration(0)
    save(trainer, tmp_path, 1)
    whole = trainer.policy.snapshot()
    trainer.iteration(1)
    save(trainer, tmp_path, 2)
    file, act, fault = DAMAGE[damage]
    act(tmp_path / "checkpoints" / "iteration-000002" / file)

    resumed = tiny_trainer(config)
    caplog.set_level(logging.INFO)
    found = load_checkpoint(tmp_path, resumed.engine)
    assert found is not None
    assert found[0] == 1
    assert all(
        torch.equal(tensor, whole[name]) for name, tensor in resumed.policy.snapshot().items()
    )
    text = " ".join(" ".join(caplog.messages).split())
    assert f"iteration-000002 cannot be used and is skipped: {fault}" in text

    act(tmp_path / "checkpoints" / "iteration-000001" / file)
    before = resumed.policy.snapshot()
    with pytest.raises(
        UserError, match=r"no checkpoint can be used \(iteration-000002: .*; iteration-000001: .*\)"
    ):
        load_checkpoint(tmp_path, resumed.engine)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in resumed.policy.snapshot().items()
    )


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the content of a JSON file."""

    def act(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return act


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Change the tensors of a file of parts."""

    def act(file: Path) -> None:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata)

    return act


def first_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return with_tensors(
        lambda tensors: tensors.update({min(tensors): change(tensors[min(tensors)])})
    )


COUNTS, MOMENTS = "training/optimizer.json", part("optimizer-exp_avg_sq")
ODD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "another iteration": (
        STATE,
        edited(lambda state: state.update(iteration=7)),
        f"{STATE} does not hold",
    ),
    "no iteration": (STATE, edited(lambda state: state.pop("iteration")), f"{STATE} does not hold"),
    "steps as text": (
        STATE,
        edited(lambda state: state.update(optimizer_steps="2")),
        f"{STATE} does not hold",
    ),
    "steps below 0": (
        STATE,
        edited(lambda state: state.update(optimizer_steps=-1)),
        f"{STATE} does not hold",
    ),
    "no KL": (STATE, edited(lambda state: state.pop("kl")), f"{STATE} does not hold"),
    "KL null": (STATE, edited(lambda state: state.update(kl=None)), f"{STATE} does not hold"),
    "lambda NaN": (
        STATE,
        edited(lambda state: state["kl"].update(value=float("nan"))),
        f"{STATE} does not hold",
    ),
    "history of text": (
        STATE,
        edited(lambda state: state["kl"].update(history=["a"])),
        f"{STATE} does not hold",
    ),
    "anchor step a list": (
        STATE,
        edited(lambda state: state.update(anchor_step=[])),
        f"{STATE} does not hold",
    ),
    "a flag of 3": (
        STATE,
        edited(lambda state: state.update(anchor_is_current=3)),
        f"{STATE} does not hold",
    ),
    "counters a list": (
        STATE,
        lambda file: file.write_text("[]"),
        "state.json: expected a JSON object",
    ),
    "step below 0": (
        COUNTS,
        edited(lambda state: state["steps"].update(dict.fromkeys(state["steps"], -3))),
        COUNTS[9:],
    ),
    "step null": (
        COUNTS,
        edited(lambda state: state["steps"].update(dict.fromkeys(state["steps"]))),
        COUNTS[9:],
    ),
    "steps a number": (COUNTS, edited(lambda state: state.update(steps=4)), COUNTS[9:]),
    "step of no weight": (
        COUNTS,
        edited(lambda state: state["steps"].update(odd=1)),
        "the optimizer's state of odd",
    ),
    "a step lost": (
        COUNTS,
        edited(lambda state: state["steps"].popitem()),
        "the optimizer's state of",
    ),
    "moments NaN": (MOMENTS, first_changed(lambda t: t * float("nan")), f"{MOMENTS[9:]}: "),
    "moments whole numbers": (MOMENTS, first_changed(torch.Tensor.int), f"{MOMENTS[9:]}: "),
    "a moment lost": (MOMENTS, with_tensors(lambda tensors: tensors.pop(min(tensors))), ""),
    "weights infinite": (
        part("trainable"),
        first_changed(lambda t: t + torch.inf),
        "trainable-00001-of-00001",
    ),
    "a shape": (part("anchor"), first_changed(lambda t: t[:-1].clone()), ""),
    "two dimensions": (part("ema"), first_changed(lambda t: t[None].clone()), ""),
    "an average of nothing": (
        part("ema"),
        lambda file: save_file({}, file, {"parts": "{}"}),
        "ema has 0 elements",
    ),
    "an anchor of nothing": (
        part("anchor"),
        lambda file: save_file({}, file, {"parts": "{}"}),
        "anchor has 0 element",
    ),
    "no average listed": (
        "manifest.json",
        edited(lambda held: held["files"].pop(part("ema"))),
        COUNTS[9:],
    ),
    "no anchor listed": (
        "manifest.json",
        edited(lambda held: held["files"].pop(part("anchor"))),
        COUNTS[9:],
    ),
    "no second moment listed": (
        "manifest.json",
        edited(lambda held: held["files"].pop(MOMENTS)),
        "",
    ),
    "no optimizer's name": (COUNTS, edited(lambda state: state.pop("optimizer")), COUNTS[9:]),
    "an unknown optimizer": (
        COUNTS,
        edited(lambda state: state.update(optimizer=["adamw"])),
        COUNTS[9:],
    ),
}


def seal(folder: Path) -> None:
    """Write the checksums of what is in a checkpoint now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: digest(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@functools.cache
def two_checkpoints() -> tuple[Trainer, Path]:
    """A trainer, and the run folder with the checkpoints of its first two iterations."""
    trainer, run = (
        tiny_trainer(settings(train__ema_decay=0.9, kl__strategy="moving")),
        Path(tempfile.mkdtemp()),
    )
    for iteration in (1, 2):
        trainer.iteration(iteration - 1)
        save(trainer, run, iteration)
    return trainer, run


@pytest.fixture(scope="module", autouse=True)
def _no_checkpoint_stays() -> Iterator[None]:
    yield
    if two_checkpoints.cache_info().currsize:
        shutil.rmtree(two_checkpoints()[1])


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.fault(
    "a checkpoint whose checksums fit, and whose content is not what a run writes",
    "skipped for the sound one before, with a note",
)
def test_a_checkpoint_that_no_run_writes_is_skipped(
    odd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, run = two_checkpoints()
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints" / "iteration-000002"
    name, act, fault = ODD[odd]
    act(folder / name)
    seal(folder)
    caplog.set_level(logging.INFO)
    found = load_checkpoint(tmp_path, trainer.engine, trainer.state_dict())
    assert found is not None
    assert found[0] == 1
    text = " ".join(" ".join(caplog.messages).split())
    assert "iteration-000002 cannot be used and is skipped: " in text
    assert fault in text


@pytest.mark.parametrize("value", ["12", 12.5, None, True, [12], 10**30])
def test_a_manifest_of_other_types_is_skipped(
    value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer(settings())
    for iteration in (1, 2):
        save(trainer, tmp_path, iteration)
    entry = {"bytes": value, "sha256": "0"}
    edited(lambda manifest: manifest["files"].update({STATE: entry}))(
        tmp_path / "checkpoints" / "iteration-000002" / "manifest.json"
    )
    found = load_checkpoint(tmp_path, trainer.engine)
    assert found is not None
    assert found[0] == 1


def test_a_checkpoint_whose_manifest_lacks_the_optimizer_is_skipped(tmp_path: Path) -> None:
    trainer = tiny_trainer(settings())
    for iteration in (1, 2):
        save(trainer, tmp_path, iteration)
    edited(lambda manifest: manifest["files"].pop(f"{TRAINING}optimizer.json"))(
        tmp_path / "checkpoints" / "iteration-000002" / "manifest.json"
    )
    found = load_checkpoint(tmp_path, trainer.engine)
    assert found is not None
    assert found[0] == 1


@pytest.mark.parametrize("parts", ["[" * 100_000, '{"a": [Infinity, 3]}', '{"a": 1}', "3"])
def test_a_part_with_an_odd_header_is_refused(parts: str, tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(3)}, tmp_path / "trainable-00001-of-00001.safetensors", {"parts": parts}
    )
    with pytest.raises(UserError, match="not a file of parts of weights"):
        SavedParts(tmp_path)


def test_a_file_that_the_manifest_does_not_list_is_no_part(tmp_path: Path) -> None:
    """Such as a part of another number of ranks, left by a copy over an older checkpoint."""
    trainer = tiny_trainer(settings())
    save(trainer, tmp_path, 1)
    training = tmp_path / "checkpoints" / "iteration-000001" / TRAINING
    for name in (
        "trainable-00001-of-00002.safetensors",
        "trainable-00002-of-00002.safetensors",
        "more.safetensors",
    ):
        shutil.copy(training / Path(part("trainable")).name, training / name)
    assert load_checkpoint(tmp_path, trainer.engine) is not None


def test_a_sound_checkpoint_is_not_written_again_and_a_damaged_one_is(tmp_path: Path) -> None:
    trainer = tiny_trainer(settings())
    for iteration in (1, 2, 3):
        save(trainer, tmp_path, iteration)
    second = tmp_path / "checkpoints" / "iteration-000002"
    inode = (second / "manifest.json").stat().st_ino
    save(trainer, tmp_path, 2)
    assert (second / "manifest.json").stat().st_ino == inode
    flip(second / part("trainable"))
    perturb(trainer)
    save(trainer, tmp_path, 2)
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == [1, 2], (
        "those after it came from elsewhere"
    )
    found = load_checkpoint(tmp_path, tiny_trainer(settings()).engine)
    assert found is not None
    assert found[0] == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "iteration-000001",
        "iteration-000002",
    ]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, True, [20, 40, 50]),
        (1, False, [50]),
        (1, True, [20, 40, 50]),
        (4, True, [20, 30, 40, 50]),
    ],
)
def test_the_last_checkpoints_and_the_best_one_are_kept(
    keep: int, best: bool, left: list[int], tmp_path: Path
) -> None:
    (tmp_path / "eval").mkdir()
    for iteration, reward in ((10, 0.5), (20, 0.9), (30, 0.7), (40, None), (50, 0.8)):
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)
        if reward is not None:
            scores = {"prompts": ["a", "b"], "seeds": [0, 1], "reward": [reward, 0.0], "parts": {}}
            text = json.dumps({"iteration": iteration, **scores})
            write_atomic(tmp_path / "eval" / f"iteration-{iteration:06d}.json", text)
    # damaged: it may be the best one
    (tmp_path / "eval" / "iteration-000040.json").write_text('{"reward": [9')
    prune_checkpoints(tmp_path, keep, {} if best else None)
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == left
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left)


def test_the_best_checkpoint_is_that_under_the_weights_of_today(tmp_path: Path) -> None:
    """A resume has changed the weight from 100 to 1: the composites that the files hold cannot be
    compared."""
    (tmp_path / "eval").mkdir()
    for iteration, part, weight in ((1, 0.008, 100.0), (2, 0.017, 1.0), (3, 0.01, 1.0)):
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)
        scores = {"prompts": ["a"], "seeds": [0], "reward": [weight * part], "parts": {"x": [part]}}
        text = json.dumps({"iteration": iteration, **scores, "weights": {"x": weight}})
        write_atomic(tmp_path / "eval" / f"iteration-{iteration:06d}.json", text)
    prune_checkpoints(tmp_path, 1, {"x": 1.0})
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == [2, 3]


@pytest.mark.parametrize("damage", ["torn", "without the part"])
def test_a_best_checkpoint_that_cannot_be_compared_is_kept(damage: str, tmp_path: Path) -> None:
    for iteration, reward in ((1, 0.9), (2, 0.5), (3, 0.6)):
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)
        evaluated(tmp_path, iteration, reward)
    file = tmp_path / "eval" / "iteration-000001.json"
    if damage == "torn":
        os.truncate(file, 20)
    else:
        write_atomic(file, json.dumps(json.loads(file.read_text()) | {"weights": {"y": 1.0}}))
    for _ in range(2):
        prune_checkpoints(tmp_path, 1, {"x": 1.0})
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == [1, 3]


@pytest.mark.parametrize(("interval", "left"), [(0, [4]), (2, [2, 4]), (3, [4])])
def test_a_checkpoint_whose_evaluation_is_lost_is_kept(
    interval: int, left: list[int], tmp_path: Path
) -> None:
    """It may be the best one; a checkpoint between two evaluations is not, and has never had
    one."""
    for iteration in (1, 2, 4):
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)
    evaluated(tmp_path, 4, 0.5)
    prune_checkpoints(tmp_path, 1, {"x": 1.0}, interval)
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == left


def test_a_skipped_checkpoint_that_is_busy_fails_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in which something has a file open cannot be renamed on SMB. Nothing reads it."""
    trainer = tiny_trainer(settings())
    skipped = tmp_path / "checkpoints" / f"iteration-000002{SKIPPED}"
    skipped.mkdir(parents=True)
    replace = os.replace

    def busy(source: Path, target: Path) -> None:
        if Path(source) == skipped:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", busy)
    monkeypatch.setattr(files, "_noted", set())
    caplog.set_level(logging.INFO)
    save(trainer, tmp_path, 1)
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == [1]
    assert "the file system cannot remove what is no longer needed" in " ".join(caplog.text.split())


def evaluated(run: Path, iteration: int, reward: float) -> None:
    scores = {
        "iteration": iteration,
        "prompts": ["a"],
        "seeds": [0],
        "reward": [reward],
        "parts": {},
    }
    (run / "eval").mkdir(exist_ok=True)
    write_atomic(run / "eval" / f"iteration-{iteration:06d}.json", json.dumps(scores))


@pytest.mark.parametrize(
    "name", ["iteration-\u0663", "iteration-" + "9" * 200, "iteration-000007", "iteration-7"]
)
def test_a_stray_entry_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(settings())
    save(trainer, tmp_path, 1)
    stray = tmp_path / "checkpoints" / name
    stray.touch() if name == "iteration-000007" else stray.mkdir()
    assert [folder.name for folder in RunFolder(tmp_path).checkpoints()] == ["iteration-000001"]
    found = load_checkpoint(tmp_path, trainer.engine)
    assert found is not None
    assert found[0] == 1


def test_what_cannot_be_removed_is_noted_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where a file that something has open keeps its folder from being removed."""
    for iteration in (1, 2, 3):
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)
    rmdir = os.rmdir
    caplog.set_level(logging.INFO)

    def busy(path: str, **options: int) -> None:
        if "iteration-000001" in str(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", busy)
    monkeypatch.setattr(files, "_noted", set())
    prune_checkpoints(tmp_path, 1, None)
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == [3]
    remove_partials(tmp_path)
    [note] = [" ".join(line.split()) for line in caplog.messages]
    assert note.startswith(
        "note: the file system cannot remove what is no longer needed (Directory not empty): it "
    )
    assert "iteration-000001.old.partial" in note


def test_the_best_checkpoint_of_a_run_is_kept(tmp_path: Path) -> None:
    config = {"train__iterations": 3, "train__checkpoint_interval": 1, "train__keep_checkpoints": 1}
    config |= {"eval__interval": 1, "tracking__trackers": [], "sampling__steps": 2}
    run = train(settings(output=str(tmp_path / "run"), **config))
    rewards = {
        i: json.loads((run / "eval" / f"iteration-{i:06d}.json").read_text())["reward"]
        for i in (1, 2)
    }
    best = max(rewards, key=lambda i: sum(rewards[i]))
    assert [iteration_of(folder) for folder in RunFolder(run).checkpoints()] == [best, 3]


def test_a_link_to_a_folder_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    """As of `weights/` that was moved to another disk, or of an old checkpoint."""
    target, weights = tmp_path / "there", tmp_path / "weights"
    for name in ("weights", "checkpoints/iteration-000001"):
        target.mkdir(exist_ok=True)
        (target / "file").write_text("mine")
        link = tmp_path / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
    with atomic_path(weights) as partial:
        partial.mkdir()
        (partial / "file").write_text("new")
    (tmp_path / "checkpoints" / "iteration-000002").mkdir()
    prune_checkpoints(tmp_path, 1, None)
    assert not weights.is_symlink()
    assert (weights / "file").read_text() == "new"
    assert (target / "file").read_text() == "mine"
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == [2]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "there", "weights"}


def test_a_file_appears_whole_or_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    write_atomic(file, "before")
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(OSError, match="No space left") as error:
        write_atomic(file, "after")
    assert error.value.filename == str(file)
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == [file.name]


def test_a_folder_appears_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    for content in ("first", "second"):
        with atomic_path(weights) as folder:
            (folder / "transformer").mkdir(parents=True)
            (folder / "transformer" / "config.json").write_text(content)
            assert weights.exists() == (content == "second")
        assert (weights / "transformer" / "config.json").read_text() == content
    with pytest.raises(OSError, match=f"{weights}'"), atomic_path(weights) as folder:
        os.close(os.open(folder, os.O_WRONLY))
    assert (weights / "transformer" / "config.json").read_text() == "second"
    assert os.listdir(tmp_path) == [weights.name]


@pytest.mark.fault("the disk fills up within a line of metrics", "the line is cut off again")
def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    """The kernel takes five bytes more, as of a disk that fills up within the line."""
    file = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with file.open("ab", buffering=0) as opened:
        append_line(opened, "first")
        resource.setrlimit(resource.RLIMIT_FSIZE, (11, hard))
        try:
            with pytest.raises(OSError, match=str(file)):
                append_line(opened, "second")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert file.read_text() == "first\n"
        append_line(opened, "third")
    assert file.read_text() == "first\nthird\n"


@pytest.mark.fault(
    "a process that a reward forked outlives the run", "the run folder is free again"
)
def test_a_fork_does_not_keep_the_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
        child = os.fork()
        if child == 0:
            time.sleep(10 * HANG)
            os._exit(0)
        with pytest.raises(UserError, match="another run is using it"), locked(tmp_path / "run"):
            pytest.fail("the fork has let go what the run holds")

    def is_free() -> bool:
        with contextlib.suppress(UserError), locked(tmp_path / "run"):
            return True
        return False

    try:
        wait_until(is_free)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(number, "none here")

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(files, "_noted", set())
    with caplog.at_level(logging.INFO), locked(tmp_path / "run"):
        text = " ".join(caplog.text.split())
        assert (
            text.count("cannot lock a file (none here): make sure that only one process uses it")
            == 1
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_refused_before_anything_is_loaded(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(output=str(tmp_path / "run"))

    def load(*args: object, **options: object) -> Any:
        raise AssertionError("loaded")

    monkeypatch.setattr(train_module, "load_setup", load)
    with locked(tmp_path / "run") as own_claim:
        if resume:
            from sage_fast.config.loader import dump
            from sage_fast.run.claim import claim_output

            claim_output(own_claim, tmp_path / "run", dump(config))
        with pytest.raises(
            UserError,
            match=rf"another run is using it \(process {os.getpid()} on .*nothing was changed",
        ):
            train_module.train(config, resume=resume)
    with pytest.raises(AssertionError, match="loaded"):  # the lock has been given back
        train_module.train(config, resume=resume)
    assert (tmp_path / "run").exists() == resume, "a run that did not begin leaves no folder"
