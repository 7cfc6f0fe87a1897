"""The world of balls: honest rewards, an honest base, and reproducible weights."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.cli import main
from sage_fast.commands.sample_videos import generate
from sage_fast.config.loader import load
from sage_fast.loading import load_setup, resolve
from sage_fast.testbed import BASE
from sage_fast.testbed.judge import TestbedJudge
from sage_fast.testbed.rewards import TestbedReward, matches, measure
from sage_fast.testbed.text_encoder import embed
from sage_fast.testbed.tiny_model import TestbedTransformer, load_vae
from sage_fast.testbed.world import BALLS, FRAMES, Scene, heldout_prompts, train_prompts
from sage_fast.util.errors import UserError
from sage_fast.util.seeding import sample_seeds
from studies.testbed.pretrain import LESSONS, Steps, pretrain
from studies.testbed.render import render
from tests.tiny import embeddings, keys_of

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"

REWARD = TestbedReward()
CAPTION = "a big red ball moves left quickly"
SCENE = BALLS.parse(CAPTION)


def truth(scene: Scene = SCENE, seed: int = 0) -> Tensor:
    return render(BALLS, scene, torch.Generator().manual_seed(seed))


def score(video: Tensor, prompt: str = CAPTION) -> dict[str, float]:
    return {part: float(value) for part, value in REWARD(video[None], [prompt]).items()}


def test_captions_and_splits() -> None:
    train, heldout = train_prompts(), heldout_prompts()
    assert not set(train) & set(heldout)
    for prompt in train + heldout:
        assert BALLS.caption(BALLS.parse(prompt)) == prompt
    for attribute in BALLS.attributes:
        values = [BALLS.words_of(BALLS.parse(prompt))[attribute] for prompt in heldout]
        counts = [values.count(value) for value in set(values)]
        assert max(counts) == min(counts), attribute


def test_unknown_words_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"(?i)smal.*small"):
        BALLS.parse("a smal red ball moves left quickly")
    with pytest.raises(ValueError, match=r"(?i)gren.*green"):
        embed("a small gren ball")


def test_render() -> None:
    video = truth()
    assert video.shape == (FRAMES, 3, 32, 32)
    assert 0 <= float(video.min()) < float(video.max()) <= 1
    assert torch.equal(video, truth())
    assert not torch.equal(video, truth(seed=1))


@pytest.mark.parametrize("prompt", heldout_prompts()[::5])
def test_the_truth_scores_high(prompt: str) -> None:
    assert min(score(truth(BALLS.parse(prompt)), prompt).values()) > 0.85


@pytest.mark.parametrize(
    ("attribute", "other"),
    [("color", "green"), ("form", "small"), ("direction", "right"), ("speed", "slowly")],
)
def test_ta_sees_each_attribute(attribute: str, other: str) -> None:
    wrong = truth(replace(SCENE, **{attribute: other}))
    assert score(wrong)["ta"] < score(truth())["ta"] - 0.1
    assert score(wrong)["vq"] > 0.85  # vq and mq do not look at the prompt
    assert score(wrong)["mq"] > 0.85


def test_mq_sees_jitter_stillness_and_teleports() -> None:
    video = truth()
    order = torch.randperm(FRAMES, generator=torch.Generator().manual_seed(0))
    best = score(video)["mq"]
    assert score(video[order])["mq"] < best - 0.3
    assert score(video[:1].expand(FRAMES, -1, -1, -1))["mq"] < best - 0.3
    assert score(torch.cat([video[:8], video[:9].flip(-1)]))["mq"] < best - 0.1


def test_vq_sees_blur_noise_and_a_second_ball() -> None:
    video = truth()
    best = score(video)["vq"]
    blurred = torch.nn.functional.avg_pool2d(video, 7, stride=1, padding=3)
    noisy = (
        video + 0.3 * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 1)
    two = torch.maximum(video, truth(replace(SCENE, color="green"), seed=4).flip(-2))
    for name, worse in {"blur": blurred, "noise": noisy, "two": two}.items():
        assert score(worse)["vq"] < best - 0.05, name


def test_a_video_that_is_not_a_number_has_no_score() -> None:
    """A diverged policy or the decoder may cause it: one NaN pixel is enough, and no other video
    suffers."""
    sound = truth()
    spoiled, lost = sound.clone(), torch.full_like(sound, torch.nan)
    spoiled[0, 0, 3, 4] = torch.nan
    for reward in (TestbedReward(), TestbedJudge()):
        parts = reward(torch.stack([sound, spoiled, lost]), [CAPTION] * 3)
        for part, values in parts.items():
            assert values.isfinite().tolist() == [True, False, False], part
            torch.testing.assert_close(values[:1], reward(sound[None], [CAPTION])[part])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_empty_videos_score_low(value: float) -> None:
    scores = score(torch.full((FRAMES, 3, 32, 32), value))
    assert max(scores.values()) < 0.35
    noise = torch.rand(FRAMES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert max(score(noise).values()) < 0.4


def test_shipped_base() -> None:
    assert sum(file.stat().st_size for file in Path(BASE).rglob("*") if file.is_file()) <= 8e6
    transformer, vae = TestbedTransformer.from_pretrained(BASE / "transformer"), load_vae()
    assert 3e5 < sum(p.numel() for p in transformer.parameters()) < 7e5
    assert vae.config.scaling_factor != 1


def test_transformer_round_trip(tmp_path: Path) -> None:
    transformer = TestbedTransformer()
    transformer.save_pretrained(tmp_path)
    loaded = TestbedTransformer.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(transformer.state_dict().values(), loaded.state_dict().values())
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", LESSONS)
def test_pretraining_is_deterministic(tmp_path: Path, name: str) -> None:
    steps = Steps(
        vae_steps=2,
        decoder_steps=1,
        steps=2,
        vae_batch=2,
        batch=4,
        videos_per_prompt=1,
        judge_steps=2,
        judge_batch=4,
    )
    lesson = dataclasses.replace(LESSONS[name], prompts=LESSONS[name].prompts[:20], steps=steps)
    for folder in ("a", "b"):
        pretrain(tmp_path / folder, lesson, seed=3)
    files = [file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*.safetensors")]
    assert len(files) >= 2
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@torch.no_grad()
def test_the_autoencoder_is_not_the_ceiling() -> None:
    """Rendered clips score 2.87 and decoded ones at least 2.7, so that a policy's faults are its
    own."""
    vae = load_vae()
    prompts = heldout_prompts()
    videos = torch.stack([truth(BALLS.parse(prompt), seed) for seed, prompt in enumerate(prompts)])
    decoded = vae.decode(vae.encode(2 * videos.transpose(1, 2) - 1).latent_dist.mode()).sample
    scores = REWARD(((decoded.transpose(1, 2) + 1) / 2).clamp(0, 1), prompts)
    means = {part: float(values.mean()) for part, values in scores.items()}
    assert sum(means.values()) > 2.7, means
    assert min(means.values()) > 0.88, means


def drawn_by_the_base(prompts: list[str]) -> Tensor:
    setup = load_setup(
        resolve(load(Path(__file__).parents[2] / "configs" / "demo.yaml")), rewards=False
    )
    keys = keys_of(prompts)
    setup.embeddings = dict(embeddings(keys))
    return torch.stack(generate(setup, keys, sample_seeds(0, 0, 0, range(len(prompts)), "base")))


def test_the_base_follows_prompts_but_not_perfectly() -> None:
    """It does clearly better than chance (the prompts of other videos) and clearly worse than the
    rendered truth."""
    prompts = heldout_prompts() * 2
    videos = drawn_by_the_base(prompts)
    matched = REWARD(videos, prompts)
    shuffled = REWARD(videos, prompts[7:] + prompts[:7])
    difference = matched["ta"] - shuffled["ta"]
    assert float(difference.mean()) > 5 * float(difference.std()) / len(prompts) ** 0.5
    composite = (matched["vq"] + matched["mq"] + matched["ta"]) / 3
    assert 0.4 < float(composite.mean()) < 0.8
    assert float(composite.std()) > 0.05


def test_the_base_shows_each_word_sometimes() -> None:
    """A word that no clip shows cannot be learned from rewards, and one that all show well need not
    be."""
    prompts = 4 * train_prompts()
    seen = measure(drawn_by_the_base(prompts))
    matched = matches(seen, prompts)
    for attribute, words in BALLS.attributes.items():
        for word in words:
            asked = torch.tensor([word in prompt.split() for prompt in prompts])
            values = matched[attribute][asked]
            assert float((values > 0.5).float().mean()) > 0.15, word
            assert float(values.mean()) < 0.97, word


def test_no_videos_have_no_scores() -> None:
    scores = REWARD(torch.zeros(0, FRAMES, 3, 32, 32), [])
    assert {part: tuple(values.shape) for part, values in scores.items()} == dict.fromkeys(
        ("vq", "mq", "ta"), (0,)
    )


@pytest.mark.parametrize("prompt", ["a small red ball", "a red small ball moves left slowly"])
def test_a_prompt_of_known_words_that_is_no_caption_is_refused_before_training(
    prompt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text(f"{prompt}\n")
    words = ["train", str(DEMO), "--data.prompts", str(tmp_path / "prompts.txt")]
    for more in (["--dry-run"], []):
        assert main([*words, "--output", str(tmp_path / "run"), *more]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert f"prompt {prompt!r}" in told
        assert "Traceback" not in told


def test_a_word_in_capitals_has_its_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'a'"):
        embed("A Small Red Ball")
