"""The ratio: how centring and normalising change its mean, gradient and clip; the KL's share of the gradient."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.kl_weight import KLController
from sage_fast.algorithm.objective import Loss, StepConstants, TransitionScores, gradient_norms, sage_loss
from sage_fast.algorithm.transitions import TransitionTable, sigma_schedule, transition_table
from sage_fast.config.schema import KLConfig, ObjectiveConfig
from sage_fast.ops import transition_score
from tests.test_objective import rolled_out
from tests.tiny import paper_trainer, perturb, resolved, settings, tiny_trainer

NUMEL = 24
TABLE = transition_table(sigma_schedule(6, 3.0), "flow", 0.7)
REDUCTIONS = ["mean", "unscaled"]


def drawn(
    objective: ObjectiveConfig, step: int, moved: float, samples: int = 4000, table: TransitionTable = TABLE
) -> tuple[Loss, Tensor, Tensor]:
    """Loss, velocity `[samples, NUMEL]` and KL of transitions drawn by a rollout policy, in float64.

    The trained policy differs from it by `moved` per element; every advantage is 1 and there is no other term.
    """
    generator = torch.Generator().manual_seed(5)
    x, v_old, direction = (
        torch.randn(3, NUMEL, generator=generator, dtype=torch.float64).expand(samples, 3, -1).unbind(1)
    )
    noise = torch.randn(samples, NUMEL, generator=generator, dtype=torch.float64)
    x_next = table.a[step] * x + table.b[step] * v_old + table.c[step] * noise
    coefs = exact_coefficients(table, objective.log_prob)
    at = torch.tensor(step)
    v = (v_old + moved * direction / direction[0].square().mean().sqrt()).requires_grad_()
    old, *_ = transition_score(x, x_next, v_old, coefs, at)
    log_prob, kl_anchor, kl_old, *_ = transition_score(x, x_next, v, coefs, at, v_old=v_old)
    ones = torch.ones(samples, dtype=torch.float64)
    scores = TransitionScores(log_prob=log_prob, log_prob_old=old, kl_anchor=kl_anchor, kl_old=kl_old, advantage=ones)
    constants = StepConstants(
        equalizer=table.equalizer(objective.log_prob), bias=table.log_ratio_bias(objective.log_prob),
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
    """Gradient of the log-ratio, `[samples, NUMEL]`: the policy term is -ratio here, so divide its gradient by that."""
    (gradient,) = torch.autograd.grad(loss.policy.sum(), v)
    return -gradient / loss.ratio[:, None]


def is_zero(mean_of: Tensor) -> bool:
    """Whether the mean over the first axis is 0, within 5 standard errors."""
    return bool((mean_of.mean(0).abs() < 5 * mean_of.std(0) / math.sqrt(len(mean_of))).all())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("moved", [0.2, 1.0])
def test_centred_log_ratio_and_its_gradient_have_mean_zero(reduction: str, moved: float) -> None:
    """At any distance from the rollout policy the log-ratio's mean is minus the KL, and centring removes it.

    Centring also removes the KL's gradient: the centred gradient is b noise / c at any distance, so its variance does
    not grow either. The KL's gradient biases the plain one towards the rollout policy. A detached KL would keep that
    bias, as it does not change the gradient.
    """
    plain, v, kl = drawn(ObjectiveConfig(log_prob=reduction, clip_range=1e9, equalizer=False), 3, moved)
    bias = float(TABLE.log_ratio_bias(reduction)[3])
    assert is_zero(plain.ratio.log() + bias * kl)
    assert not is_zero(plain.ratio.log())
    gradient = gradient_of_log_ratio(plain, v)
    assert not is_zero(gradient)
    objective = ObjectiveConfig(log_prob=reduction, clip_range=1e9, equalizer=False, ratio="centred")
    centred, v, _ = drawn(objective, 3, moved)
    assert is_zero(centred.ratio.log())
    gradient = gradient_of_log_ratio(centred, v)
    assert is_zero(gradient)
    at_rollout, v_old, _ = drawn(objective, 3, 0.0)
    torch.testing.assert_close(gradient, gradient_of_log_ratio(at_rollout, v_old), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("side", [0.9, 1.1])
def test_the_kl_mask_goes_by_the_exact_kl(reduction: Any, side: float) -> None:
    """The KL is that of two normal distributions in torch.distributions; unmasked samples keep the ratio's gradient."""
    step, moved = 3, 0.2
    means = float(TABLE.b[step]) * torch.tensor([0.0, moved], dtype=torch.float64)
    new, old = (torch.distributions.Normal(mean, TABLE.c[step]) for mean in means)
    exact = float(torch.distributions.kl_divergence(new, old)) * (NUMEL if reduction == "sum" else 1)
    row = {"surrogate": "kl_mask", "log_prob": reduction, "kl_limit": side * exact}
    loss, v, kl = drawn(ObjectiveConfig(**row), step, moved, samples=400)
    torch.testing.assert_close(kl, torch.full_like(kl, exact), rtol=1e-9, atol=0)
    masked = (loss.ratio > 1) & (side < 1)  # every advantage is 1
    assert loss.clipped.bool().tolist() == masked.tolist()
    assert side > 1 or 0.1 < masked.double().mean() < 0.9
    (gradient,) = torch.autograd.grad(loss.total.sum(), v)
    wide, v, _ = drawn(ObjectiveConfig(log_prob=reduction, clip_range=1e9), step, moved, samples=400)
    (unclipped,) = torch.autograd.grad(wide.total.sum(), v)
    torch.testing.assert_close(gradient, torch.where(masked[:, None], 0.0, unclipped), rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("equalizer", [True, False])
def test_every_ratio_has_the_same_gradient_at_the_rollout_policy(reduction: str, equalizer: bool) -> None:
    def gradient(ratio: Any, step: int) -> Tensor:
        loss, v, _ = drawn(ObjectiveConfig(log_prob=reduction, ratio=ratio, equalizer=equalizer), step, 0.0, samples=8)
        return torch.autograd.grad(loss.total.sum(), v)[0]

    for step in TABLE.stochastic_steps:
        plain = gradient("plain", step)
        assert plain.abs().max() > 0
        for ratio in ("centred", "normalised"):
            torch.testing.assert_close(gradient(ratio, step), plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("equalizer", [True, False])
def test_the_clip_acts_alike_at_every_step_on_a_normalised_ratio(equalizer: bool) -> None:
    """The same change of the velocity spreads the log-ratio equally at each step, so the same share is clipped."""
    moved = 0.01
    steps = TABLE.stochastic_steps
    scale = TABLE.gradient_scale()
    spread = float(scale[steps].quantile(0.5)) * moved / math.sqrt(NUMEL)  # median(N) |v - v_old| / D

    def spread_of(ratio: Any) -> tuple[list[float], list[float]]:
        objective = ObjectiveConfig(ratio=ratio, equalizer=equalizer, clip_range=spread)
        losses = [drawn(objective, step, moved)[0] for step in steps]
        return [float(loss.ratio.log().std()) for loss in losses], [float(loss.clipped.mean()) for loss in losses]

    stds, clipped = spread_of("normalised")
    assert stds == pytest.approx([spread] * len(steps), rel=0.05)
    assert clipped == pytest.approx([0.317] * len(steps), abs=0.04)  # beyond one standard deviation
    stds, clipped = spread_of("centred")
    assert max(stds) > 2 * min(stds)
    assert max(clipped) > 0.5
    assert min(clipped) < 0.2


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
    strategy: str, velocity_term: str, reduction: str, surrogate: str, ratio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the norms on the velocity by sample, away from rollout and anchor; the KL's terms add in quadrature."""
    config = settings(
        kl__strategy=strategy, kl__velocity_term=velocity_term, kl__lambda_min=0.3, kl__lambda_max=0.3,
        kl__beta_pos=0.7, objective__log_prob=reduction, objective__ratio=ratio, objective__clip_range=10.0,
        objective__surrogate=surrogate, objective__kl_limit=10.0, sampling__steps=3, train__group_size=2,
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
    loss, policy, kl = trainer._loss(batch, transitions)
    v, _, kl_anchor, kl_old, *_ = seen[-1]

    def norm(value: Tensor) -> Tensor:
        return torch.autograd.grad(value.sum(), v, retain_graph=True)[0].flatten(1).norm(dim=1)

    torch.testing.assert_close(policy, norm(loss.policy), rtol=1e-4, atol=1e-12)
    anchor = norm(0.7 * kl_anchor) if strategy != "stepwise" else torch.zeros_like(kl)
    velocity = norm(0.1 * kl_old) if strategy != "moving" else 0
    torch.testing.assert_close(kl, (anchor**2 + velocity**2).sqrt(), rtol=1e-4, atol=1e-12)
    if strategy != "dual":
        torch.testing.assert_close(0.3 * kl, norm(loss.total - loss.policy), rtol=1e-4, atol=1e-12)


# -- lambda -----------------------------------------------------------------------------------------------------------


def controlled(config: KLConfig, plant: Any, updates: int) -> tuple[KLController, float]:
    """Update a controller by a plant (lambda -> observation); return it and the last observation."""
    controller, seen = KLController(config), 0.0
    for _ in range(updates):
        seen = plant(controller.value)
        controller.update(seen)
    return controller, seen


def penalised(weight: float) -> float:
    """KL as a plant: 1e-2 without a weight, half of it at a weight of 0.01."""
    return 1e-2 / (1 + weight / 0.01)


def test_paper_runs_to_its_floor() -> None:
    controller, kl = controlled(KLConfig(feedback="paper", target=1e-4, warmup_steps=5), penalised, 300)
    assert controller.value == controller.config.lambda_min
    assert kl > 50e-4


@pytest.mark.parametrize("strength", [1e-3, 3.0, 200.0])
def test_share_goes_to_its_target_and_stays(strength: float) -> None:
    """`strength` is the KL's gradient at lambda 1; the share scatters, and sags as lambda grows."""
    generator = torch.Generator().manual_seed(0)

    def plant(weight: float) -> float:
        noise = math.exp(0.1 * float(torch.randn((), generator=generator)))
        relative = weight * strength * noise / (1 + 0.5 * weight * strength)
        return relative / (1 + relative)

    config = KLConfig(feedback="share", target_share=0.2)
    controller, _ = controlled(config, plant, 1)
    assert controller.value == pytest.approx(10 * config.lambda_min), "no warm-up, and one factor at a time"
    controller, _ = controlled(config, plant, 80)
    shares = []
    for _ in range(40):
        shares.append(plant(controller.value))
        controller.update(shares[-1])
    assert sum(shares) / len(shares) == pytest.approx(0.2, rel=0.1)
    assert max(shares) < 0.3


def test_share_waits_where_there_is_nothing_to_hold() -> None:
    config = KLConfig(feedback="share")
    assert controlled(config, lambda weight: 0.0, 20)[0].value == config.lambda_min, "no KL has a gradient"
    assert controlled(config, lambda weight: 1.0, 20)[0].value == config.lambda_min, "all of the policy part is clipped"


def test_another_feedback_begins_with_an_empty_history() -> None:
    state = controlled(KLConfig(feedback="paper"), penalised, 3)[0].state_dict()
    for feedback, kept in (("paper", 3), ("share", 0)):
        controller = KLController(KLConfig(feedback=feedback))
        controller.load_state_dict(state)
        assert len(controller.history) == kept


def test_share_is_held_in_training() -> None:
    config = settings(
        kl__strategy="fixed", kl__feedback="share", kl__target_share=0.1, train__optimizer_steps=2,
        sampling__steps=4,
    )  # fmt: skip
    trainer = tiny_trainer(config)
    shares = [trainer.iteration(index)["kl/gradient_share"] for index in range(16)]
    assert sum(shares[-10:]) / 10 == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(("dtype", "counts"), [(torch.float32, True), (torch.bfloat16, False)])
def test_rounding_is_no_kl(dtype: torch.dtype, counts: bool) -> None:
    """Velocities that differ by less than a unit of their dtype: a KL to hold in float32 alone."""
    table = transition_table(sigma_schedule(4, 3.0), "sage", 0.5)
    coefs = table.coefficients("mean").float()[:2]
    steps = StepConstants(equalizer=torch.ones(2), bias=torch.zeros(2), coefs=coefs)
    log_prob = torch.full((2,), -0.5, requires_grad=True)
    kl_anchor = steps.row.m * 0.004**2
    scores = TransitionScores(
        log_prob=log_prob,
        log_prob_old=log_prob.detach(),
        kl_anchor=kl_anchor,
        kl_old=0 * log_prob,
        advantage=torch.ones(2),
    )
    objective = resolved(ObjectiveConfig(), KLConfig(strategy="fixed"))
    loss = sage_loss(objective, scores, steps, 0.1)
    _, kl = gradient_norms(objective, loss, scores, steps.row, 100, torch.finfo(dtype).eps)
    assert ((kl > 0) == counts).all()


def test_the_share_is_that_of_a_pull() -> None:
    """The gradient of logp_old - logp alone is sampling noise: it has no share to control."""
    config = settings(kl__strategy="dual", kl__beta_pos=0.0, kl__lambda_min=1.0, kl__lambda_max=1.0)
    assert tiny_trainer(config).iteration(0)["kl/gradient_share"] == 0


def test_the_kl_of_the_paper_does_nothing(tmp_path: Any) -> None:
    """At its lambda, 1e-7 to 1e-5, the KL has less than 1e-4 of the gradient; without it the rewards are the same."""
    rewards = {}
    for strategy in ("dual", "none"):
        trainer = paper_trainer(tmp_path, kl__strategy=strategy, kl__warmup_steps=1, kl__feedback="paper",
                               kl__lambda_min=1e-7, kl__lambda_max=1e-5, train__prompts_per_iteration=2)  # fmt: skip
        rows = [trainer.iteration(index) for index in range(2)]
        rewards[strategy] = [row["reward/mean"] for row in rows]
        assert (rows[1]["kl/gradient_share"] > 0) == (strategy == "dual")
        assert rows[1]["kl/gradient_share"] < 1e-4
    assert rewards["dual"] == pytest.approx(rewards["none"], abs=5e-5)
