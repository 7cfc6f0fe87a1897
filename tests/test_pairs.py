"""The race's second world: its captions, its rewards, its model and its weights."""

import itertools

import pytest
import torch

from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.models.find import find_spec
from sage_fast.trainer import Trainer
from sage_fast.util.errors import UserError
from studies.pairs.judge import PairsJudge
from studies.pairs.model import Pairs, embed
from studies.pairs.reward import pairs_reward
from studies.pairs.world import (
    APART,
    BASE,
    heldout_prompts,
    parse,
    paths,
    render,
    scenes,
    train_prompts,
)
from studies.race.runs import SECOND, Cell, config_of
from studies.shapes.world import BASE as SHAPES_BASE

pytestmark = pytest.mark.soak


def rendered() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([render(parse(prompt), generator) for prompt in heldout_prompts()])


def means(scores: dict[str, torch.Tensor]) -> dict[str, float]:
    return {part: float(values.mean()) for part, values in scores.items()}


def test_the_captions_for_evaluation_are_not_trained_on_and_name_every_word() -> None:
    assert sorted([*train_prompts(), *heldout_prompts()]) == sorted(scenes())
    assert len(set(heldout_prompts())) == 24
    for place, attribute in itertools.product(range(2), ("shape", "direction")):
        assert len({getattr(parse(prompt)[place], attribute) for prompt in heldout_prompts()}) >= 3
    with pytest.raises(
        UserError, match="such as 'a red circle moves left and a green circle moves left'"
    ):
        parse("a red circle moves left and a green circle moves lef")


def test_the_two_stay_apart_and_inside() -> None:
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([paths(scene, generator) for scene in scenes().values()])
    assert (found[:, 0] - found[:, 1]).norm(dim=-1).min() >= APART
    assert found.min() >= 9
    assert found.max() <= 55


def test_only_what_the_prompt_says_scores_high() -> None:
    videos, prompts = rendered(), heldout_prompts()
    assert min(means(pairs_reward(videos, prompts)).values()) > 0.75
    assert max(means(pairs_reward(videos, prompts[1:] + prompts[:1])).values()) < 0.35
    assert max(means(pairs_reward(torch.rand_like(videos), prompts)).values()) < 0.05
    assert means(pairs_reward(videos.flip(1), prompts))["motion"] < 0.25  # the wrong way


def test_the_judge_knows_the_prompt_and_a_clean_video() -> None:
    videos, prompts, judge = rendered(), heldout_prompts(), PairsJudge()
    seen = means(judge(videos, prompts))
    assert seen["alignment"] > 0.8
    assert seen["naturalness"] > 0.7
    assert means(judge(videos, prompts[1:] + prompts[:1]))["alignment"] < 0.5
    noise = torch.randn(videos.shape, generator=torch.Generator().manual_seed(0))
    assert means(judge((videos + 0.3 * noise).clamp(0, 1), prompts))["naturalness"] < 0.5


def test_words_belong_to_their_thing() -> None:
    """The transformer has no text positions."""
    one, other = (
        embed(f"a red {first} moves left and a blue {second} moves left")
        for first, second in (("circle", "square"), ("square", "circle"))
    )
    assert one.shape == other.shape == (7, 32)
    assert not torch.equal(one.sort(0).values, other.sort(0).values)


def test_the_autoencoder_is_that_of_the_world_of_shapes() -> None:
    weights = "vae/diffusion_pytorch_model.safetensors"
    assert (BASE / weights).read_bytes() == (SHAPES_BASE / weights).read_bytes()


def test_a_run_of_the_race_trains_in_this_world() -> None:
    config = config_of(Cell("nft_half", 1e-3, 0.0, SECOND), seed=0, quick=True)
    config = config.replace({"eval.num_prompts": 12})
    assert isinstance(find_spec(config.model.path), Pairs)
    setup = load_setup(resolve(config))
    setup.encode()
    before = evaluate(setup, iteration=0)[0]["reward"]
    assert 0.3 < sum(before) / len(before) < 1.5  # it follows prompts, and much is left to learn
    row = Trainer(
        setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings
    ).iteration(0)
    assert setup.model.policy.uses_guidance
    assert row["reward/mean"] > 0.2
