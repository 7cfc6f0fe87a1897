"""docs/how-to/hpsv3.md: its file, with a module that has the interface of HPSv3 and scores by
brightness."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.test_docs import REPOSITORY, blocks

(CODE,) = (block for block in blocks(REPOSITORY / "docs" / "how-to" / "hpsv3.md")
           if block.page.name == "hpsv3.md")  # fmt: skip


class Inferencer:
    """Scores a picture by its mean and the prompt's length; column 1 must not be used."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.sizes: list[int] = []

    @torch.inference_mode()
    def reward(self, prompts: list[str], image_paths: list[Image.Image]) -> Tensor:
        self.sizes.append(len(prompts))
        values = [
            numpy.asarray(image).mean() / 255 + len(prompt)
            for image, prompt in zip(image_paths, prompts, strict=True)
        ]
        return torch.tensor([[value, float("nan")] for value in values])


@pytest.fixture
def reward(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("hpsv3")
    module.HPSv3RewardInferencer = Inferencer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpsv3", module)
    names: dict[str, Any] = {"__name__": "hpsv3_reward"}
    exec(compile(CODE.text, str(Path("hpsv3_reward.py")), "exec"), names)
    return names["HPSv3"]


def test_each_video_gets_the_mean_of_its_frames_with_its_prompt(reward: Any) -> None:
    scorer = reward(num_frames=3, chunk=4, device="cpu")
    levels = torch.tensor([[0.0, 0.2, 0.4, 0.6, 0.8], [1.0, 1.0, 0.0, 1.0, 0.2]])
    videos = levels[:, :, None, None, None].expand(2, 5, 3, 4, 6)
    scores = scorer.score(videos, ["a", "bcd"])["hpsv3"]
    expected = [1 + (0.0 + 0.4 + 0.8) / 3, 3 + (1.0 + 0.0 + 0.2) / 3]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert scorer.scorer.sizes == [4, 2]


def test_a_video_of_fewer_frames_is_scored_whole(reward: Any) -> None:
    scorer = reward(num_frames=8, device="cpu")
    assert scorer.score(torch.ones(1, 2, 3, 4, 4), ["ab"])["hpsv3"].tolist() == [3.0]
