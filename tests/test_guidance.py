"""Guidance in evaluations: a scale of their own, and a warning where it is not training's and no KL
acts."""

from typing import Any

import pytest
import torch

from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.commands.sample_videos import generate
from sage_fast.eval.candidate import Candidate, notes_on
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import Setup
from sage_fast.ops import transition_score
from sage_fast.ops.guidance import guided
from sage_fast.rollout.replay import Replay
from sage_fast.run.messages import config_warnings, guidance_warning
from sage_fast.trainer import Trainer
from sage_fast.util.captions import PromptKey
from tests.tiny import perturb, settings, tiny_trainer

PROMPT = PromptKey("a small red ball moves left quickly")


def setup_of(trainer: Trainer) -> Setup:
    return Setup(
        resolved=trainer.resolved,
        model=trainer.model,
        reward=trainer.reward,  # type: ignore[arg-type]
        prompts=[],
        eval_prompts=trainer.prompts[:2],
        embeddings=dict(trainer.embeddings),
    )


def scores(**overrides: Any) -> list[float]:
    trainer = tiny_trainer(settings(**overrides))
    before = trainer.policy.guidance_scale
    found = evaluate(setup_of(trainer), iteration=0)[0]["reward"]
    assert trainer.policy.guidance_scale == before
    return found


def test_evaluations_are_sampled_at_their_own_scale() -> None:
    guided, free = scores(sampling__guidance_scale=3.0), scores()
    assert guided != free
    assert scores(eval__guidance_scale=3.0) == guided
    assert scores(sampling__guidance_scale=3.0, eval__guidance_scale=1.0) == free


def test_samples_are_those_of_evaluations() -> None:
    (guided, ours) = (
        generate(setup_of(trainer), [PROMPT], torch.tensor([1]))[0]
        for trainer in (
            tiny_trainer(settings(sampling__guidance_scale=3.0)),
            tiny_trainer(settings(eval__guidance_scale=3.0)),
        )
    )
    assert torch.equal(guided, ours)


def test_training_goes_on_at_its_own_scale_after_an_evaluation_that_fails() -> None:
    trainer, alone = tiny_trainer(settings(eval__guidance_scale=3.0)), tiny_trainer(settings())

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(setup_of(trainer), iteration=0, pause=stop)
    rows = [
        {key: value for key, value in one.iteration(0).items() if not key.startswith("time/")}
        for one in (trainer, alone)
    ]
    assert rows[0] == rows[1]


ACTS = {"kl__lambda_max": 0.2}
"""Otherwise lambda is at most 1e-5, as the paper prints it."""


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        pytest.param({"kl__strategy": "none"}, True, id="none"),
        pytest.param({"kl__strategy": "moving", **ACTS}, False, id="moving"),
        pytest.param({"kl__strategy": "moving"}, True, id="inert-lambda"),
        pytest.param(
            {"kl__strategy": "moving", "kl__feedback": "none"}, True, id="inert-lambda-that-stays"
        ),
        pytest.param(
            {"kl__strategy": "moving", "kl__lambda_max": 0.2, "kl__feedback": "none"},
            False,
            id="lambda",
        ),
        pytest.param(
            {"kl__strategy": "moving", "kl__beta_pos": 0.0}, True, id="no-position-weight"
        ),
        pytest.param(
            {"kl__strategy": "stepwise", "kl__beta_pos": 0.0, **ACTS}, False, id="stepwise"
        ),
        pytest.param(
            {"kl__strategy": "stepwise", "kl__beta_vel": 0.0}, True, id="no-velocity-weight"
        ),
        pytest.param(
            {"kl__strategy": "dual", "kl__lambda_min": 0.0, "kl__lambda_max": 0.0},
            True,
            id="no-lambda",
        ),
    ],
)
def test_a_warning_where_the_scales_differ_and_no_kl_acts(
    overrides: dict[str, Any], warns: bool
) -> None:
    objective = Objective(settings(**overrides))
    found = guidance_warning(objective, trained=1.0, evaluated=6.0)
    assert (found is not None) == warns
    if found:
        assert "sampling.guidance_scale = 1 in training and eval.guidance_scale = 6" in found
    assert guidance_warning(objective, trained=6.0, evaluated=6.0) is None
    long = {"train__iterations": 500} | overrides
    assert config_warnings(ResolvedConfig(settings(eval__guidance_scale=1.0, **long))) == []
    assert config_warnings(ResolvedConfig(settings(sampling__guidance_scale=6.0, **long))) == []


def test_a_source_that_was_evaluated_at_another_scale_is_named() -> None:
    guided = Candidate(label="guided", path="guided", config=settings(eval__guidance_scale=6.0))
    assert notes_on([guided], settings().sampling, 1.0) == [
        "note: guided has eval.guidance_scale = 6.0, but is sampled with 1.0, like the first"
    ]
    same = Candidate(label="same", path="same", config=settings(sampling__guidance_scale=6.0))
    assert notes_on([same], settings().sampling, 6.0) == []


# -- training --------------------------------------------------------------------------------------


def count_eager(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record every guided velocity that is formed outside the fused operators."""
    calls: list[Any] = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return guided(*arguments)

    monkeypatch.setattr("sage_fast.models.policy.guided", counted)
    return calls


@pytest.mark.parametrize(
    ("overrides", "stored"),
    [
        ({"kl__strategy": "none"}, 0),
        ({"kl__strategy": "stepwise", "kl__velocity_term": "closed_form"}, 5),
    ],
    ids=["no KL", "closed form"],
)
def test_a_guided_velocity_is_formed_only_where_it_is_stored(
    overrides: dict[str, Any], stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout and training otherwise pass both velocities to the fused operators.

    Five steps, one batch.
    """
    calls = count_eager(monkeypatch)
    config = settings(
        sampling__guidance_scale=3.0,
        train__parity_gate=False,
        train__optimizer_steps=2,
        **overrides,
    )
    trainer = tiny_trainer(config)
    assert trainer.iteration(0)["grad_norm"] > 0
    assert len(calls) == stored


def test_gradients_are_those_of_a_velocity_guided_by_plain_pytorch() -> None:
    """Of the log-prob and both KLs in the weights, through both passes of the forward."""
    config = settings(
        sampling__guidance_scale=3.0, kl__velocity_term="closed_form", train__optimizer_steps=2
    )
    trainer, seen = tiny_trainer(config), []
    trainer.replay.score = lambda *given: seen.append(given) or Replay.score(trainer.replay, *given)  # type: ignore
    trainer.iteration(0)
    (batch, micro, *_), weights = seen[-1], trainer.engine.parameters
    perturb(trainer, 0.05, seed=1)
    stored = batch.trajectories
    old, step = stored.gather(stored.velocities, micro), torch.tensor([t for _, t in micro])
    anchor, _ = batch.anchor_of(micro)
    assert anchor is not None
    eager = transition_score(
        stored.gather(stored.states, micro), stored.next_states(micro),
        trainer.replay.velocity(batch, micro),
        batch.coefs, step, anchor, old,
    )  # fmt: skip
    upstream = torch.rand(3, len(micro)).unbind()
    scores = trainer.replay.score(batch, micro)
    ours, theirs = (
        torch.autograd.grad(outputs, weights, upstream)
        for outputs in ((scores.log_prob, scores.kl_anchor, scores.kl_old), eager[:3])
    )
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max())
        )
