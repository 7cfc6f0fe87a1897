"""The held-out judge: it knows what it looks at, falls with every corruption, and is not fooled as
the reward is."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.config.schema import RewardConfig
from sage_fast.eval.playback import read_video
from sage_fast.rewards import Judge, load_reward
from sage_fast.testbed.judge import JUDGE as WEIGHTS
from sage_fast.testbed.judge import TestbedJudge
from sage_fast.testbed.rewards import (
    TestbedReward,
    measure,
    motion_quality,
    text_alignment,
    visual_quality,
)
from sage_fast.testbed.world import BACKGROUND, BALLS, FRAMES, Scene, heldout_prompts
from sage_fast.util.errors import RewardError, UserError
from sage_fast.util.videos import save_mp4
from studies.testbed.corruptions import (
    SCENE_CORRUPTIONS,
    draw,
    pixel_corruptions,
    random_clip,
)
from studies.testbed.render import render
from tests.tiny import keys_of

JUDGE = TestbedJudge()
SCENES = BALLS.scenes
CAPTIONS = [BALLS.caption(scene) for scene in SCENES]
PIXELS = pixel_corruptions(BALLS)


def rendered(seed: int) -> Tensor:
    """One fresh clip of each caption; the judge was trained with another generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([render(BALLS, scene, generator) for scene in SCENES])


def alignment(scores: dict[str, Tensor]) -> Tensor:
    """Mean over the words of a caption, [B]."""
    return torch.stack([scores[attribute] for attribute in BALLS.attributes]).mean(dim=0)


def corrupted(kind: str, strength: float, scenes: list[Scene] = SCENES[::5]) -> Tensor:
    generator = torch.Generator().manual_seed(77)
    clips = [
        draw(BALLS, scene, kind if kind in SCENE_CORRUPTIONS else None, strength, generator)
        for scene in scenes
    ]
    if kind in PIXELS and strength > 0:
        clips = [PIXELS[kind].apply(clip, strength, generator) for clip in clips]
    return torch.stack(clips).clamp(0, 1)


def test_it_is_small() -> None:
    weights = sum(p.numel() for p in JUDGE.network.parameters())
    assert weights <= 150_000
    assert JUDGE.gpu_bytes == 4 * weights
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) <= 4e5


def test_it_names_the_attributes_of_fresh_clips() -> None:
    with torch.no_grad():
        logits, _ = JUDGE.network(torch.cat([rendered(1001), rendered(1002)]))
    for attribute, words in BALLS.attributes.items():
        named = [words.index(BALLS.words_of(scene)[attribute]) for scene in SCENES]
        truth = torch.tensor(named * 2)
        assert float((logits[attribute].argmax(dim=1) == truth).float().mean()) > 0.95, attribute


def test_rendered_clips_score_high_and_others_low() -> None:
    scores = JUDGE(rendered(1003), CAPTIONS)
    assert min(float(scores[attribute].mean()) for attribute in BALLS.attributes) > 0.9
    assert float(scores["naturalness"].mean()) > 0.8
    black, white = (torch.full((1, FRAMES, 3, 32, 32), value) for value in (0.0, 1.0))
    noise = torch.rand(4, FRAMES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    garbage = torch.cat([black, white, noise])
    scores = JUDGE(garbage, CAPTIONS[: len(garbage)])
    assert all(bool(part.isfinite().all()) for part in scores.values())
    # by chance half of the sizes and speeds, and a quarter of the colours and directions
    assert float(alignment(scores).max()) < 0.5
    assert float(scores["naturalness"].max()) < 0.5


def test_it_tells_prompts_that_match_from_prompts_that_do_not() -> None:
    videos = rendered(1004)
    matched = JUDGE(videos, CAPTIONS)
    for attribute, words in BALLS.attributes.items():
        field = "form" if attribute == BALLS.form_name else attribute
        other = []
        for scene in SCENES:
            following = words[(words.index(BALLS.words_of(scene)[attribute]) + 1) % len(words)]
            other.append(BALLS.caption(dataclasses.replace(scene, **{field: following})))
        unmatched = JUDGE(videos, other)
        for part, value in matched.items():
            fall = float((value - unmatched[part]).mean())
            assert fall > 0.8 if part == attribute else fall == 0, (attribute, part)


def trail(video: Tensor, strength: float) -> Tensor:
    """Each frame keeps a share of the one shown before it."""
    frames = [video[0]]
    for frame in video[1:]:
        frames.append(torch.maximum(frame, BACKGROUND + strength * (frames[-1] - BACKGROUND)))
    return torch.stack(frames)


def tear(video: Tensor, strength: float) -> Tensor:
    """The lower half is shifted sideways."""
    return torch.cat([video[:, :, :16], video[:, :, 16:].roll(round(10 * strength), -1)], dim=2)


@pytest.mark.parametrize("kind", [*PIXELS, *SCENE_CORRUPTIONS, "trail", "tear"])
def test_naturalness_falls_with_the_strength_of_each_corruption(kind: str) -> None:
    """The last two kinds were held out of its training."""
    strengths = (0.0, 0.25, 0.5, 0.75)
    heldout = {"trail": trail, "tear": tear}.get(kind)
    means = []
    for strength in strengths:
        videos = corrupted(kind, 0.0 if heldout else strength)
        if heldout:
            videos = torch.stack([heldout(video, strength) for video in videos])
        means.append(float(JUDGE(videos, CAPTIONS[::5])["naturalness"].mean()))
    assert all(low < high for high, low in itertools.pairwise(means)), means
    # balls that change on the way are the hardest to see
    assert means[-1] < means[0] - 0.15, means


@pytest.mark.parametrize("kind", ["blur", "pixelate", "warp"])
def test_a_ball_without_a_clean_outline_keeps_its_size(kind: str) -> None:
    """Otherwise a run that only sharpens its clips would seem to learn the word."""
    scores = JUDGE(corrupted(kind, 0.6), CAPTIONS[::5])
    assert float(scores["size"].mean()) > 0.85


def reward_of(videos: Tensor, prompts: list[str]) -> Tensor:
    """The composite, differentiable in the pixels."""
    seen = measure(videos)
    return visual_quality(seen) + motion_quality(seen) + text_alignment(seen, prompts)


def test_a_video_made_to_please_the_reward_does_not_please_the_judge() -> None:
    """Gradient ascent on pixels, from noise: speckled balls of the wrong colour that move the
    wrong way and change on the way, which the reward likes better than what a trained policy
    makes."""
    prompts = heldout_prompts()[:3]
    generator = torch.Generator().manual_seed(0)
    logits = (
        torch.randn(len(prompts), FRAMES, 3, 32, 32, generator=generator).sub_(2).requires_grad_()
    )
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (-reward_of(logits.sigmoid(), prompts).sum()).backward()
        optimizer.step()
    hacked = logits.detach().sigmoid()
    reward = sum(TestbedReward()(hacked, prompts).values(), torch.zeros(()))
    assert float(reward.min()) > 1.7  # of the 2.9 of a rendered clip
    judge = JUDGE(hacked, prompts)
    assert float(judge["naturalness"].max()) < 0.5  # rendered clips: 0.8 to 1
    assert float(alignment(judge).max()) < 0.8  # 0.98 to 1


def test_a_saved_clip_scores_about_as_it_does_in_memory(tmp_path: Path) -> None:
    """Files are enlarged and compressed."""
    videos, prompts = rendered(6)[::8], CAPTIONS[::8]
    for i, video in enumerate(videos):
        save_mp4(tmp_path / f"{i}.mp4", video, fps=8)
    files = torch.stack([read_video(tmp_path / f"{i}.mp4") for i in range(len(videos))])
    assert files.shape[3:] == (128, 128)
    for scorer in (JUDGE, TestbedReward()):
        saved = scorer(files, prompts)
        for part, values in scorer(videos, prompts).items():
            torch.testing.assert_close(saved[part], values, rtol=0, atol=0.2)


def test_training_clips_are_graded() -> None:
    generator = torch.Generator().manual_seed(0)
    clips = [random_clip(BALLS, SCENES[0], generator) for _ in range(200)]
    clean = torch.tensor([grade for _, grade, _ in clips])
    assert 0.1 < float((clean == 1).float().mean()) < 0.3
    assert float(clean.min()) < 0.1
    assert all(float(video.min()) >= 0 and float(video.max()) <= 1 for video, _, _ in clips)
    assert all(0 <= share <= 1 for _, _, attributes in clips for share in attributes.values())


def test_it_is_deterministic_and_sees_each_video_alone() -> None:
    videos = rendered(5)[:3]
    together, again = JUDGE(videos, CAPTIONS[:3]), JUDGE(videos, CAPTIONS[:3])
    for part, value in together.items():
        assert torch.equal(value, again[part])
        alone = torch.cat([JUDGE(videos[i : i + 1], CAPTIONS[i : i + 1])[part] for i in range(3)])
        torch.testing.assert_close(alone, value, rtol=1e-4, atol=1e-5)


def test_its_name_is_known_and_others_are_refused_by_the_name_of_the_setting() -> None:
    assert isinstance(load_reward(RewardConfig(name="testbed-judge")), TestbedJudge)
    with pytest.raises(
        UserError, match=r"eval\.judge = 'testbed-juge': .*did you mean 'testbed-judge'"
    ):
        Judge("testbed-juge", RewardConfig())


def test_what_a_judge_fails_on_has_no_scores() -> None:
    videos = torch.zeros(2, FRAMES, 3, 32, 32)
    judge = Judge("testbed-judge", RewardConfig())
    scores = judge(videos, keys_of([CAPTIONS[0], "a cat"]))
    assert scores.dropped == 1
    assert scores.parts["naturalness"].isfinite().tolist() == [True, False]
    assert "dropped a sample of 'a cat': reward 'testbed-judge': " in scores.notes[-1]
    with pytest.raises(RewardError, match="1 of 2 samples have no score"):
        judge.check_share(scores)
    with pytest.raises(RewardError, match="expected 7 words"):
        Judge("testbed-judge", RewardConfig(on_failure="stop"))(
            videos, keys_of([CAPTIONS[0], "a cat"])
        )
