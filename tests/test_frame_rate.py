"""The frame rate of a video reaches every reward that looks at seconds, however it is called."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.cli import main
from sage_fast.config.reward_names import SHIPPED
from sage_fast.config.schema import RewardConfig, RewardEntry
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.rewards import CompositeReward
from sage_fast.rewards.http import format_request, read_request
from sage_fast.rewards.load import find_reward, score_of
from sage_fast.rewards.server import RewardServer
from sage_fast.rewards.shipped.frame_reward import FrameReward
from sage_fast.trainer import Trainer
from sage_fast.util.captions import PromptKey
from sage_fast.util.videos import save_mp4
from tests.reward_faults import request
from tests.tiny import keys_of, settings

VIDEOS = torch.linspace(0, 1, 6)[:, None, None, None, None].expand(6, 5, 3, 16, 16).clone()
PROMPTS = keys_of("abcdef")
FRAMES_ALONE = {
    "testbed": "speeds are in pixels a frame",
    "testbed-i2v": "speeds are in pixels a frame",
    "testbed-judge": "speeds are in pixels a frame",
}
"""Shipped rewards that take no rate -> why."""


class Rate:
    """Scores the rate that it is told; fails on the first call for a batch with an odd prompt."""

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Any]:
        if "c" in prompts and len(prompts) > 1:
            raise ValueError("one at a time")
        return {"fps": [float(fps)] * len(prompts)}


class Usual:
    """Has a rate of its own where none is told."""

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float = 15.0) -> dict[str, Any]:
        return {"fps": [fps] * len(prompts)}


class NearlyRate:
    """Scores the rate, and a little of the pixels, so that samples differ."""

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Any]:
        return {"fps": fps + 1e-3 * videos.mean((1, 2, 3, 4))}


@pytest.fixture(params=["inline", "process", "http"])
def reward(request: pytest.FixtureRequest) -> Iterator[CompositeReward]:
    config = RewardConfig(
        name="tests.test_frame_rate:Rate", weights={"fps": 1.0}, retries=1, timeout_seconds=120
    )
    if request.param == "http":
        server = RewardServer(CompositeReward.of(config), "127.0.0.1", 0)
        thread = threading.Thread(target=server.listen, daemon=True)
        thread.start()
        yield CompositeReward.of(RewardConfig(name=server.address, weights={"fps": 1.0}, retries=1))
        server.should_exit = True
        thread.join(60)
    else:
        workers = int(request.param == "process")
        yield CompositeReward.of(
            RewardConfig(
                name="tests.test_frame_rate:Rate",
                weights={"fps": 1.0},
                retries=1,
                timeout_seconds=120,
                workers=workers,
            )
        )


def test_each_call_is_told_the_rate_of_its_videos(reward: CompositeReward) -> None:
    """Also where the batch failed and its videos are scored one by one."""
    pending = [
        reward.submit(VIDEOS[i : i + 2], PROMPTS[i : i + 2], fps)
        for i, fps in ((0, 12.5), (2, 24.0), (4, 8.0))
    ]
    scores = [chunk.result() for chunk in pending]
    assert [chunk.parts["fps"].tolist() for chunk in scores] == [
        [12.5, 12.5],
        [24.0, 24.0],
        [8.0, 8.0],
    ]
    assert [chunk.retried for chunk in scores] == [0, 2, 0]
    asked = dataclasses.replace(request(VIDEOS[:1]), fps=30.0)
    assert reward.raw(asked, "cpu")["fps"].tolist() == [30.0]


def test_a_default_of_the_reward_stays_where_no_rate_is_known() -> None:
    reward = CompositeReward(Usual().score, RewardConfig(name="x", weights={"fps": 1.0}))  # type: ignore[arg-type]
    assert reward(VIDEOS[:1], [PromptKey("a")]).parts["fps"].tolist() == [15.0]
    assert reward(VIDEOS[:1], [PromptKey("a")], 10.0).parts["fps"].tolist() == [10.0]


def test_a_request_has_the_rate_where_it_is_known() -> None:
    assert "fps" not in json.loads(format_request(request(VIDEOS[:1]), "id"))
    body = json.loads(format_request(dataclasses.replace(request(VIDEOS[:1]), fps=23.976), "id"))
    assert body["fps"] == 23.976
    assert read_request(json.dumps(body).encode())[1].fps == 23.976
    for wrong in (0, -1, "24", True, float("inf"), [24]):
        with pytest.raises(ValueError, match=r"fps = .*: expected frames per second above 0"):
            read_request(json.dumps(body | {"fps": wrong}).encode())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_reward_takes_the_rate_or_has_a_reason(name: str) -> None:
    served = {"url": "http://127.0.0.1:1", "model": "m"}
    args = {"vlm": served, "vlm-pairs": served, "videoalign": {"path": "x"}}.get(name, {})
    kind, _ = find_reward(RewardEntry(name=name, args=args), "reward.name")
    taken = inspect.signature(
        score_of(kind) if score_of(kind) is not kind else kind.__call__
    ).parameters
    takes = "fps" in taken or "request" in taken  # a client of a server gets the whole request
    assert takes != (name in FRAMES_ALONE)
    if isinstance(kind, type) and issubclass(kind, FrameReward):
        reward = object.__new__(kind)
        reward.num_frames, reward.fps, reward.video_fps = 8, 2.0, None  # type: ignore[attr-defined]
        looks_at_seconds = reward.choose(48, 24.0) != reward.choose(48, 8.0)
        assert looks_at_seconds == (name == "videoalign"), (
            "the others look at so many frames of the whole"
        )


def test_rollouts_and_evaluations_tell_the_rate_of_the_model() -> None:
    name = "tests.test_frame_rate:NearlyRate"
    config = settings(reward__name=name, reward__weights={"fps": 1}, eval__judge=name)
    setup = load_setup(resolve(config))
    setup.encode()
    assert setup.model.spec.fps == 8
    trainer = Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    assert trainer.iteration(0)["reward/mean"] == pytest.approx(8, abs=2e-3)
    result, _ = evaluate(setup, iteration=0)
    for part in ("fps", "judge/fps"):
        assert result["parts"][part] == pytest.approx([8, 8], abs=2e-3)


def test_videos_of_a_folder_tell_their_own_rates(tmp_path: Path) -> None:
    """Videos of one size and two rates are no batch."""
    rates = [8.0, 8.0, 25.0, 12.5, 8.0]
    folder = tmp_path / "theirs"
    folder.mkdir()
    with (folder / "videos.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "prompt"])
        for i, fps in enumerate(rates):
            save_mp4(folder / f"{i}.mp4", torch.rand(5, 3, 128, 128), fps)
            writer.writerow([f"{i}.mp4", f"prompt {i}"])
    name = "tests.test_frame_rate:Rate"
    given = [
        "--reward.name",
        name,
        "--reward.weights",
        "{fps: 1}",
        "--eval.judge",
        name,
        "--scorer",
        f"more={name}",
    ]
    scores = tmp_path / "scores.json"
    assert main(["eval", str(folder), *given, "--json", str(scores), "--quiet"]) == 0
    parts = json.loads(scores.read_text())["parts"]
    assert parts == {"fps": rates, "judge/fps": rates, "more/fps": rates}
