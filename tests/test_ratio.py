"""The ratio: how centring and normalising change its mean, gradient and clip; the KL's share of the
gradient."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.kl_weight import KLController
from sage_fast.algorithm.objective import (
    Loss,
    Objective,
    StepConstants,
    TransitionScores,
    gradient_norms,
    gradient_share,
    sage_loss,
)
from sage_fast.algorithm.transitions import TransitionTable, sigma_schedule, transition_table
from sage_fast.config.schema import KLConfig, ObjectiveConfig
from sage_fast.ops import transition_score
from tests.test_objective import rolled_out
from tests.tiny import paper_trainer, perturb, resolved, settings, tiny_trainer

NUMEL = 24
TABLE = transition_table(sigma_schedule(6, 3.0), "flow", 0.7)
REDUCTIONS = ["mean", "unscaled"]


def drawn(
    objective: ObjectiveConfig,
    step: int,
    moved: float,
    samples: int = 4000,
    table: TransitionTable = TABLE,
) -> tuple[Loss, Tensor, Tensor]:
    """Loss, velocity `[samples, NUMEL]` and KL of transitions drawn by a rollout policy, in
    float64.

    The trained policy differs from it by `moved` per element; every advantage is 1 and there is no
    other term.
    """
    generator = torch.Generator().manual_seed(5)
    x, v_old, direction = (
        torch.randn(3, NUMEL, generator=generator, dtype=torch.float64)
        .expand(samples, 3, -1)
        .unbind(1)
    )
    noise = torch.randn(samples, NUMEL, generator=generator, dtype=torch.float64)
    x_next = table.a[step] * x + table.b[step] * v_old + table.c[step] * noise
    coefs = exact_coefficients(table, objective.log_prob)
    at = torch.tensor(step)
    v = (v_old + moved * direction / direction[0].square().mean().sqrt()).requires_grad_()
    old, *_ = transition_score(x, x_next, v_old, coefs, at)
    log_prob, kl_anchor, kl_old, *_ = transition_score(x, x_next, v, coefs, at, v_old=v_old)
    ones = torch.ones(samples, dtype=torch.float64)
    scores = TransitionScores(
        log_prob=log_prob, log_prob_old=old, kl_anchor=kl_anchor, kl_old=kl_old, advantage=ones
    )
    constants = StepConstants(
        equalizer=table.equalizer(objective.log_prob),
        bias=table.log_ratio_bias(objective.log_prob),
        coefs=coefs,
    )  # fmt: skip
    loss = sage_loss(resolved(objective), scores, constants.at(at.expand(samples)), 0.0)
    return loss, v, kl_old.detach()


def exact_coefficients(table: TransitionTable, reduction: str) -> Tensor:
    """`coefficients` before rounding to float32."""
    scale = NUMEL if reduction == "sum" else 1
    w = torch.full_like(table.c, -1) if reduction == "unscaled" else -scale / (2 * table.c.square())
    m = scale * table.b.square() / (2 * table.c.square())
    return torch.stack([table.a, table.b, table.c, w, torch.zeros_like(w), m], dim=1)


def gradient_of_log_ratio(loss: Loss, v: Tensor) -> Tensor:
    """Gradient of the log-ratio, `[samples, NUMEL]`: the policy term is -ratio here, so divide its
    gradient by that."""
    (gradient,) = torch.autograd.grad(loss.policy.sum(), v)
    return -gradient / loss.ratio[:, None]


def is_zero(mean_of: Tensor) -> bool:
    """Whether the mean over the first axis is 0, within 5 standard errors."""
    return bool((mean_of.mean(0).abs() < 5 * mean_of.std(0) / math.sqrt(len(mean_of))).all())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("moved", [0.2, 1.0])
def test_centred_log_ratio_and_its_gradient_have_mean_zero(reduction: str, moved: float) -> None:
    """At any distance from the rollout policy the log-ratio's mean is minus the KL, and centring
    removes it.

    Centring also removes the KL's gradient: the centred gradient is b noise / c at any distance, so
    its variance does not grow either. The KL's gradient biases the plain one towards the rollout
    policy. A detached KL would keep that bias, as it does not change the gradient.
    """
    plain, v, kl = drawn(
        ObjectiveConfig(log_prob=reduction, clip_range=1e9, equalizer=False), 3, moved
    )
    bias = float(TABLE.log_ratio_bias(reduction)[3])
    assert is_zero(plain.ratio.log() + bias * kl)
    assert not is_zero(plain.ratio.log())
    gradient = gradient_of_log_ratio(plain, v)
    assert not is_zero(gradient)
    objective = ObjectiveConfig(
        log_prob=reduction, clip_range=1e9, equalizer=False, ratio="centred"
    )
    centred, v, _ = drawn(objective, 3, moved)
    assert is_zero(centred.ratio.log())
    gradient = gradient_of_log_ratio(centred, v)
    assert is_zero(gradient)
    at_rollout, v_old, _ = drawn(objective, 3, 0.0)
    torch.testing.assert_close(
        gradient, gradient_of_log_ratio(at_rollout, v_old), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("side", [0.9, 1.1])
def test_the_kl_mask_goes_by_the_exact_kl(reduction: Any, side: float) -> None:
    """The KL is that of two normal distributions in torch.distributions; unmasked samples keep the
    ratio's gradient."""
    step, moved = 3, 0.2
    means = float(TABLE.b[step]) * torch.tensor([0.0, moved], dtype=torch.float64)
    new, old = (torch.distributions.Normal(mean, TABLE.c[step]) for mean in means)
    exact = float(torch.distributions.kl_divergence(new, old)) * (
        NUMEL if reduction == "sum" else 1
    )
    row = {"surrogate": "kl_mask", "log_prob": reduction, "kl_limit": side * exact}
    loss, v, kl = drawn(ObjectiveConfig(**row), step, moved, samples=400)
    torch.testing.assert_close(kl, torch.full_like(kl, exact), rtol=1e-9, atol=0)
    masked = (loss.ratio > 1) & (side < 1)  # every advantage is 1
    assert loss.clipped.bool().tolist() == masked.tolist()
    assert side > 1 or 0.1 < masked.double().mean() < 0.9
    (gradient,) = torch.autograd.grad(loss.total.sum(), v)
    wide, v, _ = drawn(
        ObjectiveConfig(log_prob=reduction, clip_range=1e9), step, moved, samples=400
    )
    (unclipped,) = torch.autograd.grad(wide.total.sum(), v)
    torch.testing.assert_close(
        gradient, torch.where(masked[:, None], 0.0, unclipped), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("equalizer", [True, False])
def test_every_ratio_has_the_same_gradient_at_the_rollout_policy(
    reduction: str, equalizer: bool
) -> None:
    def gradient(ratio: Any, step: int) -> Tensor:
        loss, v, _ = drawn(
            ObjectiveConfig(log_prob=reduction, ratio=ratio, equalizer=equalizer),
            step,
            0.0,
            samples=8,
        )
        return torch.autograd.grad(loss.total.sum(), v)[0]

    for step in TABLE.stochastic_steps:
        plain = gradient("plain", step)
        assert plain.abs().max() > 0
        for ratio in ("centred", "normalised"):
            torch.testing.assert_close(gradient(ratio, step), plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("equalizer", [True, False])
def test_the_clip_acts_alike_at_every_step_on_a_normalised_ratio(equalizer: bool) -> None:
    """The same change of the velocity spreads the log-ratio equally at each step, so the same share
    is clipped."""
    moved = 0.01
    steps = TABLE.stochastic_steps
    scale = TABLE.gradient_scale()
    # median(N) |v - v_old| / D
    spread = float(scale[steps].quantile(0.5)) * moved / math.sqrt(NUMEL)

    def spread_of(ratio: Any) -> tuple[list[float], list[float]]:
        objective = ObjectiveConfig(ratio=ratio, equalizer=equalizer, clip_range=spread)
        losses = [drawn(objective, step, moved)[0] for step in steps]
        return [float(loss.ratio.log().std()) for loss in losses], [
            float(loss.clipped.mean()) for loss in losses
        ]

    stds, clipped = spread_of("normalised")
    assert stds == pytest.approx([spread] * len(steps), rel=0.05)
    # more than one standard deviation above
    assert clipped == pytest.approx([0.159] * len(steps), abs=0.03)
    stds, clipped = spread_of("centred")
    assert max(stds) > 2 * min(stds)
    assert max(clipped) > 0.25
    assert min(clipped) < 0.1


def test_the_log_prob_surrogate_uses_no_ratio() -> None:
    def total(ratio: Any) -> Tensor:
        return drawn(ObjectiveConfig(surrogate="log_prob", ratio=ratio), 2, 0.1, samples=4)[0].total

    assert torch.equal(total("plain"), total("normalised"))


NORMED = [("clip", ratio) for ratio in ("plain", "centred", "normalised")]
NORMED += [("kl_mask", "plain"), ("nft", "plain")]
"""Surrogate and ratio."""


@pytest.mark.parametrize(("surrogate", "ratio"), NORMED)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("strategy", "velocity_term"),
    [("moving", "rollout"), ("stepwise", "closed_form"), ("dual", "closed_form")],
)
def test_gradient_norms_are_those_of_autograd(
    strategy: str,
    velocity_term: str,
    reduction: str,
    surrogate: str,
    ratio: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare the norms on the velocity by sample, away from rollout and anchor; the KL's terms add
    in quadrature."""
    config = settings(
        kl__strategy=strategy, kl__velocity_term=velocity_term, kl__lambda_min=0.3,
        kl__lambda_max=0.3,
        kl__beta_pos=0.7, objective__log_prob=reduction, objective__ratio=ratio,
        objective__clip_range=10.0,
        objective__surrogate=surrogate, objective__kl_limit=10.0, sampling__steps=3,
        train__group_size=2,
        train__optimizer_steps=2,
    )  # fmt: skip
    trainer = tiny_trainer(config, dtype=torch.float64)
    if trainer.objective.surrogate.scores_rollout:
        monkeypatch.setattr(
            "sage_fast.rollout.samples.initial_latents",
            lambda seeds, shape, device: torch.randn(len(seeds), *shape, dtype=torch.float64),
        )
    perturb(trainer, 0.02, seed=8)
    batch, transitions = rolled_out(trainer)
    if trainer.objective.scores_noised:
        trainer.replay.score_noised(batch)
    if trainer.anchor is not None:
        trainer.anchor_is_current = False
        batch.anchor_velocities = trainer.anchor_velocities(batch, transitions)
    perturb(trainer, 0.1, seed=9)
    seen: list[tuple[Tensor, ...]] = []

    def watched(x: Tensor, x_next: Tensor, v: Tensor, *others: Any) -> Any:
        scores = transition_score(x, x_next, v, *others)
        seen.append((v, *scores))
        return scores

    monkeypatch.setattr("sage_fast.rollout.replay.transition_score", watched)
    trainer.rounding = torch.zeros_like(trainer.rounding)
    loss, norms = trainer._loss(batch, transitions)
    v, _, kl_anchor, kl_old, *_ = seen[-1]

    def norm(value: Tensor) -> Tensor:
        return torch.autograd.grad(value.sum(), v, retain_graph=True)[0].flatten(1).norm(dim=1)

    torch.testing.assert_close(norms.policy, norm(loss.policy), rtol=1e-4, atol=1e-12)
    nothing = torch.zeros_like(norms.policy)
    anchor = norm(0.7 * kl_anchor) if strategy != "stepwise" else nothing
    velocity = norm(0.1 * kl_old) if strategy != "moving" else nothing
    torch.testing.assert_close(norms.anchor, anchor**2, rtol=1e-4, atol=1e-20)
    torch.testing.assert_close(norms.velocity, velocity**2, rtol=1e-4, atol=1e-20)
    if strategy != "dual":
        kl = (norms.anchor + norms.velocity).sqrt()
        torch.testing.assert_close(0.3 * kl, norm(loss.total - loss.policy), rtol=1e-4, atol=1e-12)


# -- lambda ----------------------------------------------------------------------------------------


def controlled(config: KLConfig, plant: Any, updates: int) -> tuple[KLController, float]:
    """Update a controller by a plant (lambda -> observation); return it and the last
    observation."""
    controller, seen = KLController(config), 0.0
    for _ in range(updates):
        seen = plant(controller.value)
        controller.update(seen)
    return controller, seen


def penalised(weight: float) -> float:
    """KL as a plant: 1e-2 without a weight, half of it at a weight of 0.01."""
    return 1e-2 / (1 + weight / 0.01)


def test_paper_runs_to_its_floor() -> None:
    controller, kl = controlled(
        KLConfig(feedback="paper", target=1e-4, warmup_steps=5), penalised, 300
    )
    assert controller.value == controller.config.lambda_min
    assert kl > 50e-4


def test_the_share_by_hand() -> None:
    """k^2 = lambda^2 (A + V) with A, V = mean of 4 beta^2 m (KL - rounding) / D; p is the policy
    term's rms."""
    # m = 2 and 0.5
    coefs = torch.tensor([[1.0, -0.5, 1.0, -0.5, 0.0, 2.0], [1.0, -0.5, 1.0, -0.5, 0.0, 0.5]])
    steps = StepConstants(equalizer=torch.ones(2), bias=torch.zeros(2), coefs=coefs)
    log_prob = torch.full((2,), -0.5, requires_grad=True)
    scores = TransitionScores(
        log_prob=log_prob,
        log_prob_old=log_prob.detach(),
        kl_anchor=torch.tensor([3e-4, 1e-4]),
        kl_old=torch.tensor([2e-4, 1e-4]) + 0 * log_prob,
        advantage=torch.ones(2),
    )
    config = dataclasses.replace(
        settings(train__optimizer_steps=2), kl=KLConfig(beta_pos=1.0, beta_vel=0.1)
    )
    objective, rounding = Objective(config), torch.tensor([1e-4, 2e-4])
    norms = gradient_norms(
        objective, sage_loss(objective, scores, steps, 0.1), scores, steps.row, 100, rounding
    )
    assert norms.anchor.tolist() == pytest.approx([4 * 2 * 2e-4 / 100, 4 * 0.5 * -1e-4 / 100])
    assert norms.velocity.tolist() == pytest.approx(
        [0.01 * 4 * 2 * 1e-4 / 100, 0.01 * 4 * 0.5 * -1e-4 / 100]
    )
    # The policy's gradient by element is 2 w b r / D with mean(r^2) = 1: its norm is 2 |w b| /
    # sqrt(D) = 0.05.
    assert norms.policy.tolist() == pytest.approx([0.05, 0.05])
    squares = norms.policy.square().mean(), norms.anchor.mean(), norms.velocity.mean()
    anchor, velocity = (1.6e-5 - 2e-6) / 2, (8e-8 - 2e-8) / 2
    pull = 0.1 * math.sqrt(anchor + velocity)
    assert gradient_share(0.1, *map(float, squares)) == pytest.approx(pull / (pull + 0.05))


def test_a_kl_that_rounding_explains_has_no_share() -> None:
    assert gradient_share(0.1, 1e-3, -1e-9, 0.0) == 0
    assert gradient_share(0.1, 0.0, 0.0, 0.0) == 0
    assert gradient_share(0.1, 0.0, 1e-9, -1.0) == 1, "each term for itself"


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("guidance", [1.0, 6.0])
def test_the_share_does_not_follow_rounding(guidance: float, updates: int) -> None:
    """In bfloat16 rounding moves the velocity a thousand times as far as a small update does.

    The rollout's batches differ from those of training, so that even equal weights have a KL. A
    tenth of the KL that the measurement misses, on samples of 1,280 elements, would be a third of
    the share; with guidance it is up to two fifths.
    """
    acts = {
        "kl__lambda_min": 0.05,
        "kl__lambda_max": 0.05,
        "kl__warmup_steps": 0,
        "kl__feedback": "none",
    }
    config = settings(
        **acts, kl__strategy="dual", kl__velocity_term="closed_form", train__learning_rate=1e-6,
        train__optimizer_steps=updates, sampling__guidance_scale=guidance, sampling__batch_size=6,
        train__batch_size=1,
        objective__clip_range=1.0,
    )  # fmt: skip
    trainer = tiny_trainer(config, dtype=torch.bfloat16)
    shares = [trainer.iteration(index)["kl/gradient_share"] for index in range(3)]
    assert bool((trainer.rounding[trainer.resolved.table.stochastic_steps] > 0).all())
    trainer.rounding = torch.zeros_like(trainer.rounding)
    followed = trainer.iteration(3)["kl/gradient_share"]
    assert followed > 1e-4
    assert shares[0] == 0 or updates > 1
    assert max(shares) < followed / 2


def test_the_share_in_float32_is_that_of_float64() -> None:
    """From the second update on it is the KL of the weights, of which rounding is a part at small
    updates."""
    config = settings(
        kl__strategy="fixed", kl__lambda_min=0.05, kl__lambda_max=0.05, kl__warmup_steps=0,
        train__learning_rate=1e-6,
        sampling__guidance_scale=6.0, sampling__batch_size=6, train__batch_size=1,
    )  # fmt: skip
    single, double = (tiny_trainer(config, dtype=dtype) for dtype in (torch.float32, torch.float64))
    shares = [
        [trainer.iteration(index)["kl/gradient_share"] for index in range(3)]
        for trainer in (single, double)
    ]
    assert shares[0][0] == 0
    assert shares[0][1:] == pytest.approx(shares[1][1:], rel=0.3)


def test_the_share_is_that_of_a_pull() -> None:
    """The gradient of logp_old - logp alone is sampling noise: it has no share to control."""
    config = settings(kl__strategy="dual", kl__beta_pos=0.0, kl__lambda_min=1.0, kl__lambda_max=1.0)
    assert tiny_trainer(config).iteration(0)["kl/gradient_share"] == 0


def test_the_kl_of_the_paper_does_nothing(tmp_path: Any) -> None:
    """At its lambda, 1e-7 to 1e-5, the KL has less than 1e-4 of the gradient; without it the
    rewards are the same."""
    rewards = {}
    for strategy in ("dual", "none"):
        trainer = paper_trainer(tmp_path, kl__strategy=strategy, kl__warmup_steps=1,
            kl__feedback="paper",
                               kl__lambda_min=1e-7, kl__lambda_max=1e-5,
                               train__prompts_per_iteration=2)  # fmt: skip
        rows = [trainer.iteration(index) for index in range(2)]
        rewards[strategy] = [row["reward/mean"] for row in rows]
        assert (rows[1]["kl/gradient_share"] > 0) == (strategy == "dual")
        assert rows[1]["kl/gradient_share"] < 1e-4
    assert rewards["dual"] == pytest.approx(rewards["none"], abs=5e-5)
