"""CLIPScore and PickScore on a tiny CLIP model, against transformers' own path from PIL pictures to
logits."""

import importlib
import inspect
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from sage_fast.config.schema import RewardConfig
from sage_fast.rewards import SHIPPED, load_reward
from sage_fast.rewards.shipped.clip import CLIPScoreReward, PickScoreReward
from sage_fast.rewards.shipped.frame_reward import FrameReward
from sage_fast.util.errors import UserError
from tests.tiny_rewards import write_clip

PROMPTS = [
    "a red ball",
    "The Blue table falls, and then it falls again, and again and again and once more",
    "a b c",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


def videos(count: int, frames: int = 9, height: int = 41, width: int = 60) -> Tensor:
    """Videos on whole 8-bit levels."""
    draw = torch.Generator().manual_seed(count)
    return torch.randint(64, 192, (count, frames, 3, height, width), generator=draw) / 255


def expected_cosines(folder: Path, clip: Tensor, frames: list[int], prompt: str) -> Tensor:
    """Cosine of each frame with the prompt, by `CLIPModel.forward` on what the processor makes of
    PIL pictures."""
    model = CLIPModel.from_pretrained(folder).eval()
    pictures = [
        Image.fromarray((clip[i] * 255).round().byte().permute(1, 2, 0).numpy()) for i in frames
    ]
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")[
        "pixel_values"
    ]
    words = AutoTokenizer.from_pretrained(folder)(
        prompt, truncation=True, max_length=24, return_tensors="pt"
    )
    with torch.no_grad():
        return model(pixel_values=pixels, **words).logits_per_image[:, 0] / model.logit_scale.exp()


def test_what_clip_cuts_is_said_once(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = CLIPScoreReward(str(tiny), num_frames=1)
    for _ in range(2):
        reward.score(videos(2), ["a short one", "a ball " * 20])
    (line,) = caplog.messages
    assert (
        " ".join(line.split())
        == f"note: prompt {('a ball ' * 20)[:60]!r} has 62 tokens; CLIP reads 24"
    )


@pytest.mark.parametrize(("height", "width"), [(32, 32), (41, 60), (90, 50)])
def test_scores_are_those_of_their_definitions(tiny: Path, height: int, width: int) -> None:
    clips = videos(3, 9, height, width)
    clip_score = CLIPScoreReward(str(tiny), num_frames=3)
    pick_score = PickScoreReward(str(tiny), processor=str(tiny), num_frames=3)
    scores = clip_score.score(clips, PROMPTS) | pick_score.score(clips, PROMPTS)
    cosines = [
        expected_cosines(tiny, clip, [0, 4, 8], prompt) for clip, prompt in zip(clips, PROMPTS)
    ]
    assert any((each < 0).any() for each in cosines)
    assert any((each > 0).any() for each in cosines)
    expected = {
        "clip_cosine": [each.mean() for each in cosines],
        "clipscore": [sum(2.5 * max(float(cosine), 0) for cosine in each) / 3 for each in cosines],
        # logit_scale of the tiny model
        "pickscore": [math.exp(3.0) * each.mean() / 26 for each in cosines],
    }
    assert scores.keys() == expected.keys()
    for part, value in expected.items():
        assert (scores[part] - torch.tensor(value)).abs().max() < 1e-5, part
        assert scores[part].dtype == torch.float32
        assert not scores[part].requires_grad


def test_neither_the_prompts_nor_the_videos_beside_it_change_a_score(tiny: Path) -> None:
    reward = CLIPScoreReward(str(tiny))
    clips, prompts = videos(9), PROMPTS * 3
    together = reward.score(clips, prompts)["clip_cosine"]
    alone = torch.cat(
        [reward.score(clips[i : i + 1], [prompts[i]])["clip_cosine"] for i in range(9)]
    )
    torch.testing.assert_close(together, alone)
    assert len(alone.unique()) == 9
    clips[5, 0] = math.nan
    assert reward.score(clips, prompts)["clipscore"].isfinite().tolist() == [
        i != 5 for i in range(9)
    ]
    short = reward.score(clips[:1, :2], prompts[:1])["clip_cosine"]
    torch.testing.assert_close(
        short, expected_cosines(tiny, clips[0], [0, 1], prompts[0]).mean()[None], atol=1e-5, rtol=0
    )


def test_the_short_names_lead_to_classes_with_the_parts_of_the_documentation() -> None:
    table = (Path(__file__).parent.parent / "docs" / "how-to" / "videoalign.md").read_text()
    for name in ("videoalign", "clipscore", "pickscore"):
        module, _, attribute = SHIPPED[name].partition(":")
        reward = getattr(importlib.import_module(module), attribute)
        assert issubclass(reward, FrameReward)
        assert f"| `{name}` | `" in table
        arguments = inspect.signature(reward).parameters
        assert [
            argument
            for argument in arguments
            if f"`{argument}`" not in table and argument != "device"
        ] == []
        assert [argument for argument, how in arguments.items() if how.default is how.empty] == [
            "path"
        ] * (name == "videoalign")


def hub_form(folder: Path) -> None:
    """Replace processor_config.json by preprocessor_config.json, as openai/clip-vit-base-patch32
    has it on the hub."""
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "crop_size": 32, "do_center_crop": True, "do_normalize": True, "do_resize": True,
                "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.48145466,
                    0.4578275, 0.40821073],
                "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3, "size": 32,
            }
        )
    )  # fmt: skip


def test_the_processor_may_be_in_the_form_of_the_hub(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "hub")
    hub_form(folder)
    clips = videos(2)
    scores = CLIPScoreReward(str(folder)).score(clips, PROMPTS[:2])
    torch.testing.assert_close(
        scores, CLIPScoreReward(str(tiny)).score(clips, PROMPTS[:2]), atol=0, rtol=0
    )


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = write_clip(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"], weights["logit_scale"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"missing or of another shape: .*(visual_projection.weight|logit_scale)"
    ):
        PickScoreReward(str(folder), processor=None)


def test_arguments_that_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_frames = 0: expected at least 1"):
        CLIPScoreReward(str(tiny), num_frames=0)
    with pytest.raises(
        UserError, match=r"path = .*nowhere.*: expected a folder or hub id of a CLIP model"
    ):
        CLIPScoreReward(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"processor = .*nowhere.*: expected that of a CLIP model"):
        PickScoreReward(str(tiny), processor=str(tmp_path / "nowhere"))
    entry = RewardConfig(name="clipscore", args={"path": str(tiny), "device": "gpu"})
    with pytest.raises(
        UserError, match=r"CLIPScoreReward\(\) failed: .*Expected one of cpu, cuda.*: gpu"
    ):
        load_reward(entry)
