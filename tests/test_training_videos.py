"""Samples of training iterations, as a run shows them: which, where, and for how long."""

import dataclasses
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sage_fast.callbacks.interface import Rollouts
from sage_fast.callbacks.training_videos import MOST_KEPT, TrainingVideos
from sage_fast.cli import main
from sage_fast.config.loader import dump
from sage_fast.eval.training_samples import Sample, choose, shown_iterations
from sage_fast.eval.video_folder import read_folder
from sage_fast.report.page import write_report
from sage_fast.util.files import write_json
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown
from tests.ranks import run_ranks, screens
from tests.test_cli import PAPER, SMALL
from tests.tiny import settings

PROMPTS = ["a small red ball"] * 3 + ["a big blue ball"] * 3
GROUPS = [0, 0, 0, 1, 1, 1]


def sample(group: int, seed: int, advantage: float, **others: Any) -> Sample:
    known = {"rank": 0, "index": 0, "prompt": "p", "reward": advantage, "parts": {}}
    return Sample(group=group, seed=seed, advantage=advantage, **known | others)


class Sent:
    """Stands in for the writer of metrics: what the trackers were to show."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], Any, list[str], int]] = []

    def show_sheet(
        self, group: str, files: list[Path], sheet: Any, captions: list[str], iteration: int
    ) -> None:
        assert group == "training"
        self.calls.append(([file.name for file in files], sheet(), captions, iteration))


def run_in(folder: Path, done: int = 0) -> Any:
    return SimpleNamespace(folder=folder, iteration=done, is_main=True, writer=Sent())


def rollouts(iteration: int, rewards: list[float], wanted: list[int]) -> Rollouts:
    """Six samples in two groups; a video of sample i is grey, i / 8 bright."""
    values = torch.tensor(rewards)
    filled = values.nan_to_num(0.0).view(2, 3)
    advantages = (filled - filled.mean(1, keepdim=True)).flatten()
    videos = {i: torch.full((5, 3, 32, 32), 32 * i, dtype=torch.uint8) for i in wanted}
    return Rollouts(
        iteration=iteration,
        prompts=PROMPTS,
        seeds=[100 + i for i in range(6)],
        groups=GROUPS,
        rewards=values,
        parts={"vq": values * 2, "ta": values * 3},
        advantages=advantages,
        videos=videos,
        fps=8,
    )


def show(callback: TrainingVideos, run: Any, iteration: int, rewards: list[float]) -> None:
    """Call the callback as a run does in the iteration with this number, from 1."""
    run.iteration = iteration - 1
    members = [(group, number % 3) for number, group in enumerate(GROUPS)]
    wanted = list(callback.videos_wanted(run, members))
    callback.on_rollout_end(run, rollouts(iteration - 1, rewards, wanted))


def test_the_highest_and_the_lowest_advantage_of_the_first_groups() -> None:
    samples = [
        sample(1, 4, 0.5),
        sample(0, 1, -1.0),
        sample(0, 2, 2.0),
        sample(0, 3, 0.1),
        sample(1, 5, -0.5),
        sample(2, 6, 9.0),
        sample(2, 7, -9.0),
        sample(0, 2, 2.0, rank=1),  # a rank of the same sequence group
        sample(1, 8, 3.0, reward=math.nan),  # its reward failed
    ]
    assert [found.seed for found in choose(samples, 4)] == [2, 1, 4, 5]
    assert [found.seed for found in choose(samples, 3)] == [2, 1, 4]
    assert [found.rank for found in choose(samples, 4)] == [0] * 4
    assert [found.seed for found in choose([sample(0, 1, 0.0)], 4)] == [1]
    assert choose([sample(0, 1, 1.0, reward=math.nan)], 4) == []


def test_videos_are_wanted_of_the_shown_iterations_first_groups_alone(tmp_path: Path) -> None:
    members = [(0, 1), (1, 0), (2, 0), (0, 2)]
    callback = TrainingVideos(count=2, interval=10)
    assert callback.videos_wanted(run_in(tmp_path, done=8), members) == ()
    assert callback.videos_wanted(run_in(tmp_path, done=9), members) == [0, 3]
    assert TrainingVideos(count=3, interval=1).videos_wanted(run_in(tmp_path), members) == [0, 1, 3]
    assert TrainingVideos(count=0, interval=1).videos_wanted(run_in(tmp_path), members) == ()


def test_the_folder_the_trackers_and_the_page_show_them(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    show(TrainingVideos(count=4, interval=10), run, 10, [0.2, 0.9, 0.5, 0.4, math.nan, 0.1])

    folder = tmp_path / "videos" / "training-000010"
    videos = read_folder("training", folder)
    assert videos.prompts == ["a small red ball"] * 2 + ["a big blue ball"] * 2
    assert videos.seeds == [101, 100, 103, 105]
    assert list(videos.scores) == ["reward", "advantage", "vq", "ta"]
    assert np.allclose(videos.scores["reward"], [0.9, 0.2, 0.4, 0.1])
    assert np.allclose(videos.scores["ta"], [2.7, 0.6, 1.2, 0.3])
    assert np.allclose(videos.scores["advantage"][:2], [0.9 - 1.6 / 3, 0.2 - 1.6 / 3])

    (files, sheet, captions, iteration) = run.writer.calls[0]
    assert iteration == 10
    assert files[0] == "00-a-small-red-ball.mp4"
    assert len(files) == 4
    assert captions[0].startswith("advantage +0.37, reward 0.9: a small red ball")
    strip = np.asarray(sheet)[20 + 64]  # a line through the first video's frames
    assert (strip == 32).any(), "the frames of sample 1"

    (tmp_path / "config.yaml").write_text(dump(settings()))
    write_json({"run_id": "1"}, tmp_path / "run.json")
    page = write_report(tmp_path).read_text()
    assert "Training samples of iteration 10" in page
    assert page.count("<video") == 4
    shown = page[page.index("Training samples") :]
    assert shown.index("<span>highest advantage") < shown.index("<span>lowest advantage")
    assert "<span>highest advantage</span><span>reward <b>0.900</b></span>" in shown
    assert shown.count('class="card"') == 2


def test_only_the_newest_stay_and_a_resume_forgets_what_is_beyond(tmp_path: Path) -> None:
    callback, run = TrainingVideos(count=1, interval=1), run_in(tmp_path)
    rewards = [0.2, 0.9, 0.5, 0.4, 0.3, 0.1]
    for iteration in range(1, MOST_KEPT + 3):
        (tmp_path / "videos" / f"training-{iteration:06d}").mkdir(parents=True)
    show(callback, run, MOST_KEPT + 3, rewards)
    kept = list(shown_iterations(tmp_path / "videos"))
    assert kept == list(range(4, MOST_KEPT + 4))

    callback.on_run_start(run_in(tmp_path, done=MOST_KEPT))
    assert list(shown_iterations(tmp_path / "videos")) == list(range(4, MOST_KEPT + 1))


def test_a_video_that_cannot_be_written_is_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.util.console.PACKAGE.propagate", True)
    (tmp_path / "videos").write_text("a file")
    run, callback = run_in(tmp_path), TrainingVideos(count=2, interval=1)
    with caplog.at_level(logging.WARNING):
        for iteration in (1, 2):
            show(callback, run, iteration, [0.2, 0.9, 0.5, 0.4, 0.3, 0.1])
    assert " ".join(caplog.text.split()).count("note: no training video") == 1


def test_a_damaged_table_is_left_out_of_the_page(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    show(TrainingVideos(count=2, interval=1), run, 1, [0.2, 0.9, 0.5, 0.4, 0.3, 0.1])
    table = tmp_path / "videos" / "training-000001" / "videos.csv"
    table.write_text(table.read_text().replace("prompt", "caption"))
    (tmp_path / "config.yaml").write_text(dump(settings()))
    write_json({"run_id": "1"}, tmp_path / "run.json")
    page = write_report(tmp_path).read_text()
    assert "Training samples" not in page
    assert "left out, since it is damaged" in page


# -- in a run --------------------------------------------------------------------------------------


def test_a_run_shows_its_samples_and_profiles_an_iteration(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shown = ["--tracking.training_videos_interval", "2", "--tracking.training_videos", "2"]
    profiled = ["--profile.iterations", "[2]"]
    words = ["train", str(PAPER), "--output", str(run), "--quiet", *SMALL, *shown, *profiled]
    assert main([*words, "--train.iterations", "3"]) == 0

    assert list(shown_iterations(run / "videos")) == [2]
    videos = read_folder("training", run / "videos" / "training-000002")
    assert len(videos.files) == 2
    high, low = videos.scores["advantage"]
    assert high >= low
    assert {"reward", "advantage", "vq", "mq", "ta"} <= set(videos.scores)
    assert "Training samples of iteration 2" in (run / "report.html").read_text()
    profile = sorted(file.name for file in run.glob("profiles/*/*"))
    assert profile == ["rank-000.json.gz", "rates.txt"]
    events = b"".join(file.read_bytes() for file in run.glob("tensorboard/events*"))
    assert b"training/videos" in events


def show_a_half(folder: Path) -> None:
    """The callback on one of two ranks, which have the even and the odd samples."""
    initialize()
    whole = rollouts(0, [0.2, 0.9, 0.5, 0.4, 0.3, 0.1], list(range(6)))
    own = list(range(rank(), 6, 2))
    part = dataclasses.replace(
        whole,
        prompts=[whole.prompts[i] for i in own],
        seeds=[whole.seeds[i] for i in own],
        groups=[whole.groups[i] for i in own],
        rewards=whole.rewards[own],
        parts={name: values[own] for name, values in whole.parts.items()},
        advantages=whole.advantages[own],
        videos={place: whole.videos[i] for place, i in enumerate(own)},
    )
    run = run_in(folder)
    run.is_main = rank() == 0
    TrainingVideos(count=4, interval=1).on_rollout_end(run, part)
    if run.is_main:
        assert len(run.writer.calls[0][0]) == 4
    else:
        assert not run.writer.calls
    shutdown()


def test_two_ranks_show_the_samples_of_both(tmp_path: Path) -> None:
    assert run_ranks(show_a_half, 2, tmp_path) == [0, 0], screens(tmp_path)
    videos = read_folder("training", tmp_path / "videos" / "training-000001")
    assert videos.seeds == [101, 100, 103, 105]
    assert all(file is not None and file.is_file() for file in videos.files)
