"""The image-to-video testbed: its reward, its images and its base."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from sage_fast.cli import main
from sage_fast.config.loader import load
from sage_fast.config.schema import Config, SamplingConfig
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.models.find import find_spec
from sage_fast.run_folder import read_scores
from sage_fast.testbed import BASE, BASE_I2V
from sage_fast.testbed.rewards_i2v import TestbedImageReward
from sage_fast.testbed.tiny_model import TestbedTransformer, load_image_encoder, load_vae
from sage_fast.testbed.world import BALLS, FRAMES, heldout_prompts
from sage_fast.util.captions import Caption
from sage_fast.util.errors import UserError
from sage_fast.util.images import read_image
from studies.testbed.images import FOLDER, SETS, draw
from studies.testbed.pretrain import picture, velocity
from studies.testbed.render import render
from tests.test_scores import gains

PROMPTS = heldout_prompts()
REWARD = TestbedImageReward()


def truth(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([render(BALLS, BALLS.parse(prompt), generator) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The first frames of `truth()` as files, as prompts have them."""
    folder = tmp_path_factory.mktemp("images")
    for i, video in enumerate(truth()):
        picture(video[0]).save(folder / f"{i}.png")
    return [{"image": str(folder / f"{i}.png")} for i in range(len(PROMPTS))]


def test_the_truth_scores_high_and_the_autoencoder_is_not_the_ceiling(
    metadata: list[dict[str, str]],
) -> None:
    vae, videos = load_vae(), truth()
    with torch.no_grad():
        decoded = vae.decode(vae.encode(2 * videos.transpose(1, 2) - 1).latent_dist.mode()).sample
    for clips, least in ((videos, 0.94), ((decoded.transpose(1, 2) + 1) / 2, 0.88)):
        assert min(float(part.min()) for part in REWARD(clips, PROMPTS, metadata).values()) > least


def other_size(videos: Tensor) -> Tensor:
    scenes = [BALLS.parse(prompt) for prompt in PROMPTS]
    generator = torch.Generator().manual_seed(0)
    other = {"small": "big", "big": "small"}
    return torch.stack(
        [
            render(BALLS, dataclasses.replace(scene, form=other[scene.form]), generator)
            for scene in scenes
        ]
    )


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, float]]] = {
    "another colour": (lambda videos: videos[:, :, [1, 2, 0]], {"color": 0.1}),
    "another colour in the end": (
        lambda videos: torch.cat([videos[:, :9], videos[:, 9:, [1, 2, 0]]], dim=1),
        {"color": 0.6},
    ),
    "another size": (other_size, {"outline": 0.85}),
    "another place": (lambda videos: videos.roll(3, dims=-1), {"place": 0.45, "motion": 0.45}),
    "a pixel off": (lambda videos: videos.roll(1, dims=-1), {"place": 0.85, "motion": 0.85}),
    "faded": (
        lambda videos: videos * torch.linspace(1, 0.2, FRAMES)[:, None, None, None],
        {"color": 0.8, "outline": 0.7, "motion": 0.8},
    ),
    "still": (lambda videos: videos[:, :1].expand(-1, FRAMES, -1, -1, -1), {"motion": 0.4}),
    "backwards": (lambda videos: videos.flip(1), {"place": 0.1, "motion": 0.4}),
    "noise": (torch.rand_like, {"color": 0.2, "outline": 0.2, "place": 0.2, "motion": 0.2}),
    "nothing": (torch.zeros_like, {"color": 0.2, "outline": 0.2, "place": 0.2, "motion": 0.2}),
}
"""What is wrong with a video -> the function that makes it of the truth, and the most that each
part then scores."""


@pytest.mark.parametrize("name", WRONG)
def test_each_part_sees_what_is_wrong(name: str, metadata: list[dict[str, str]]) -> None:
    change, most = WRONG[name]
    scores = REWARD(change(truth()), PROMPTS, metadata)
    for part, value in most.items():
        assert float(scores[part].max()) < value, part


def test_it_looks_at_the_image_for_the_object_and_at_the_prompt_for_the_motion(
    metadata: list[dict[str, str]],
) -> None:
    videos = truth()
    # each in another place, most of another look
    others = REWARD(videos, PROMPTS, metadata[1:] + metadata[:1])
    assert float(others["place"].max()) < 0.5
    assert max(float(others[part].mean()) for part in ("color", "outline")) < 0.85
    prompts = REWARD(videos, PROMPTS[1:] + PROMPTS[:1], metadata)
    assert float(prompts["motion"].max()) < 0.5
    assert min(float(prompts[part].min()) for part in ("color", "outline", "place")) > 0.9


def test_a_video_that_is_not_a_number_has_no_score(metadata: list[dict[str, str]]) -> None:
    videos = truth()
    videos[0, 5, 0, 3, 4] = torch.nan
    assert REWARD(videos, PROMPTS, metadata)["color"].isfinite().tolist() == [False] + [True] * (
        len(PROMPTS) - 1
    )


def test_a_checkpoint_without_its_image_encoder_is_refused(tmp_path: Path) -> None:
    """The hub is not asked for it."""
    for part in ("transformer", "testbed.json"):
        (tmp_path / part).symlink_to(BASE_I2V / part)
    (tmp_path / "vae").symlink_to(BASE / "vae")
    spec = find_spec(str(tmp_path))
    assert spec.takes_images
    with pytest.raises(UserError, match="expected folders image_encoder and feature_extractor"):
        spec.load_encoder(torch.float32, torch.device("cpu"), SamplingConfig())


def test_a_prompt_without_an_image_is_refused() -> None:
    with pytest.raises(UserError, match="a prompt has no image; expected one"):
        REWARD(truth()[:1], PROMPTS[:1], [{}])


def test_an_image_of_another_size_is_seen_as_by_the_model(
    metadata: list[dict[str, str]], tmp_path: Path
) -> None:
    with Image.open(metadata[0]["image"]) as image:
        expected = REWARD(truth()[:1], PROMPTS[:1], metadata[:1])
        wide = Image.new("RGB", (80, 64), "white")  # what is beside the centre is cropped
        wide.paste(image.resize((64, 64), Image.Resampling.NEAREST), (8, 0))
    wide.save(tmp_path / "wide.png")
    found = REWARD(truth()[:1], PROMPTS[:1], [{"image": str(tmp_path / "wide.png")}])
    for part, values in expected.items():
        torch.testing.assert_close(found[part], values, rtol=0, atol=0.1)


@pytest.mark.parametrize("name", SETS)
def test_the_shipped_images_are_what_the_study_draws(name: str, tmp_path: Path) -> None:
    draw(tmp_path, name)
    records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert (FOLDER / f"{name}.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes()
    for record in records:
        with (
            Image.open(FOLDER / record["image"]) as shipped,
            Image.open(tmp_path / record["image"]) as drawn,
        ):
            assert shipped.tobytes() == drawn.tobytes()
    assert len({record["image"] for record in records}) == 2 * len(
        {record["prompt"] for record in records}
    )


def test_held_out_images_are_of_other_objects_than_the_training_images() -> None:
    kinds = [{BALLS.parse(caption) for caption in captions} for captions in SETS.values()]
    assert not set.intersection(*kinds)


def test_the_shipped_base() -> None:
    assert sum(file.stat().st_size for file in BASE_I2V.rglob("*") if file.is_file()) < 4e6
    transformer = TestbedTransformer.from_pretrained(BASE_I2V / "transformer")
    assert transformer.config.task_type == "i2v"
    spec = find_spec("testbed-i2v")
    assert spec.takes_images
    assert spec.meta("vae").config == find_spec("testbed").meta("vae").config


def test_an_image_of_another_size_is_cropped_to_the_video(
    metadata: list[dict[str, str]], tmp_path: Path
) -> None:
    image = read_image(metadata[0]["image"])
    wide = Image.new("RGB", (64, 32), "white")
    wide.paste(image, (16, 0))
    encode = find_spec("testbed-i2v").load_encoder(
        torch.float32, torch.device("cpu"), SamplingConfig(height=32, width=32)
    )
    found = []
    for name, shown in (("own", image), ("wide", wide), ("twice", image.resize((64, 64)))):
        shown.save(tmp_path / f"{name}.png")
        found.append(encode(Caption(PROMPTS[0], str(tmp_path / f"{name}.png"))))
    own, cropped, smaller = found
    assert torch.equal(own.image, cropped.image)
    assert torch.equal(own.frame, cropped.frame)
    assert not torch.equal(own.frame, smaller.frame)
    torch.testing.assert_close(own.frame, smaller.frame, atol=0.5, rtol=0)
    assert own.tokens == len(own.text) + find_spec("testbed-i2v").image_tokens


@torch.no_grad()
def test_its_image_is_the_first_frame_of_its_clip(metadata: list[dict[str, str]]) -> None:
    """To the rounding of the file to 8 bits: a policy need only copy it there."""
    vae, clip = load_vae(), truth()[:1]
    frame = load_image_encoder(BASE_I2V, vae, (32, 32))(read_image(metadata[0]["image"]))["frame"]
    latents = (
        vae.config.scaling_factor * vae.encode(2 * clip.transpose(1, 2) - 1).latent_dist.mode()[0]
    )
    torch.testing.assert_close(latents[:, :1], frame, atol=0.1, rtol=0)
    assert (latents[:, 1:2] - frame).abs().max() > 0.5


def config(**changes: str) -> Config:
    """Return the shipped configuration; `eval__seeds_per_prompt="1"` changes one of its
    settings."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return load(FOLDER.parents[1] / "demo-i2v.yaml", changed)


@torch.no_grad()
def test_the_policy_sees_what_the_base_was_trained_on() -> None:
    setup = load_setup(resolve(config()), rewards=False)
    setup.encode()
    policy, prompts = setup.model.policy, setup.eval_prompts[:3] + setup.eval_prompts[16:18]
    x = torch.randn(len(prompts), 32, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    sigmas = torch.tensor([0.9, 0.4])
    table = policy.conditioning_table(sigmas, setup.embeddings)
    found = policy.velocity(x, table.at(prompts, torch.tensor([1])))
    text, tokens, frame = (
        torch.stack([getattr(setup.embeddings[prompt], name) for prompt in prompts])
        for name in ("text", "image", "frame")
    )
    model = TestbedTransformer.from_pretrained(
        BASE_I2V / "transformer", torch_dtype=torch.float32
    ).eval()
    expected = velocity(model, x, sigmas[1].expand(len(prompts)), text, tokens, frame)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    other = velocity(model, x, sigmas[1].expand(len(prompts)), text, tokens, frame.roll(1, 0))
    assert (other - expected).abs().max() > 0.1


def test_the_base_often_loses_what_the_image_shows() -> None:
    setup = load_setup(resolve(config(eval__seeds_per_prompt="1", eval__num_prompts="16")))
    setup.encode()
    found, _ = evaluate(setup, iteration=0)
    means = {part: sum(values) / len(values) for part, values in found["parts"].items()}
    assert means["place"] > 0.85  # the first frame is copied
    assert 0.3 < means["color"] < 0.75
    assert 0.1 < means["motion"] < 0.5


@pytest.mark.soak
def test_the_demo_raises_its_held_out_reward(tmp_path: Path) -> None:
    assert (
        main(
            [
                "train",
                str(FOLDER.parents[1] / "demo-i2v.yaml"),
                "--output",
                str(tmp_path),
                "--seed",
                "0",
            ]
        )
        == 0
    )
    before, after = (
        read_scores(tmp_path / "eval" / f"{name}.json") for name in ("before", "after")
    )
    rows = {row.score: row for row in gains(before, after)}
    for part in ("reward", "color", "outline"):
        assert (rows[part].gain or 0) > (rows[part].gain_margin or 1), part
