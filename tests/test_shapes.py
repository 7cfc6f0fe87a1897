"""The world of shapes, of the finished studies: its captions, its reward, its judge, its model and
its weights."""

import dataclasses

import pytest
import torch
from torch import Tensor

from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.models.find import find_spec
from sage_fast.testbed.tiny_model import Testbed
from sage_fast.testbed.world import BALLS
from studies.pairs import world as pairs
from studies.pairs.model import Pairs
from studies.runs import shipped
from studies.shapes.judge import ShapesJudge
from studies.shapes.model import Shapes
from studies.shapes.reward import ShapesReward
from studies.shapes.world import FOLDER, SHAPES, WORLD_SETTINGS, heldout_prompts, train_prompts
from studies.testbed.render import render

pytestmark = pytest.mark.soak

REWARD, JUDGE = ShapesReward(), ShapesJudge()
SCENE = SHAPES.parse("a red circle moves left quickly")


def truth(prompts: list[str]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([render(SHAPES, SHAPES.parse(prompt), generator) for prompt in prompts])


def test_the_prompt_files_are_those_of_the_world() -> None:
    for name, prompts in (("train", train_prompts()), ("heldout", heldout_prompts())):
        assert (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines() == prompts
    assert len({*train_prompts(), *heldout_prompts()}) == len(SHAPES.scenes) == 96


def test_true_clips_score_high() -> None:
    prompts = heldout_prompts()
    videos = truth(prompts)
    assert min(float(part.min()) for part in REWARD(videos, prompts).values()) > 0.85
    assert min(float(part.mean()) for part in JUDGE(videos, prompts).values()) > 0.8


@pytest.mark.parametrize("form", ["square", "triangle"])
def test_another_shape_scores_less_where_the_prompt_counts(form: str) -> None:
    other = SHAPES.caption(dataclasses.replace(SCENE, form=form))
    videos = truth([other])
    own, wrong = REWARD(videos, [other]), REWARD(videos, [SHAPES.caption(SCENE)])
    assert float(wrong["ta"]) < float(own["ta"]) - 0.1
    assert torch.equal(wrong["vq"], own["vq"])
    judged = (
        JUDGE(videos, [other])["alignment"] - JUDGE(videos, [SHAPES.caption(SCENE)])["alignment"]
    )
    assert float(judged) > 0.2


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        (Testbed, BALLS.train_prompts()[0]),
        (Shapes, train_prompts()[0]),
        (Pairs, pairs.train_prompts()[0]),
    ],
)
def test_a_prompt_has_as_many_tokens_as_the_model_says(model: type[Testbed], prompt: str) -> None:
    """Plans and benchmarks take that number."""
    assert len(model.embed(prompt)) == model.text_tokens


def test_a_study_begins_from_its_base() -> None:
    config = shipped("recipes/paper", WORLD_SETTINGS, {"eval.seeds_per_prompt": 1})
    assert isinstance(find_spec(config.model.path), Shapes)
    setup = load_setup(resolve(config))
    setup.encode()
    scores, _ = evaluate(setup, iteration=0)
    assert 1.5 < sum(scores["reward"]) / len(scores["reward"]) < 2.3  # of 3
