"""Advantages, surrogates, KL and lambda by hand; the gradient of the whole loss by finite
differences."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.advantages import balanced_rewards, group_advantages
from sage_fast.algorithm.kl_weight import KLController
from sage_fast.algorithm.objective import (
    KL_STRATEGIES,
    SURROGATES,
    Scored,
    StepConstants,
    TransitionScores,
    sage_loss,
)
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.config.loader import build
from sage_fast.config.schema import AdvantageStd, KLConfig, ObjectiveConfig
from sage_fast.ops import Coefficients
from sage_fast.rollout.batch import Batch
from sage_fast.trainer import Trainer
from sage_fast.util.errors import UserError
from tests.tiny import BASE_SETTINGS, perturb, resolved, settings, tiny_trainer


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]])
    advantages, equal = group_advantages(rewards, torch.ones(2, 4, dtype=torch.bool), eps=0.0)
    std = math.sqrt((4 + 1 + 0 + 9) / 4)  # of the population
    assert advantages[0].tolist() == pytest.approx([-2 / std, -1 / std, 0, 3 / std])
    assert advantages[1].tolist() == [0, 0, 0, 0]
    assert equal.tolist() == [False, True]


def test_advantages_leave_failed_samples_out() -> None:
    rewards = torch.tensor([[1.0, math.nan, 3.0], [math.nan, math.nan, 2.0]])
    advantages, equal = group_advantages(rewards, rewards.isfinite(), eps=0.0)
    assert advantages.tolist() == [[-1, 0, 1], [0, 0, 0]]
    assert equal.tolist() == [False, True]


def test_advantages_in_units_of_the_batch() -> None:
    """All groups share one scale, from the valid samples of unequal groups: a nearly equal one has
    small advantages."""
    rewards = torch.tensor([[1.0, 3.0, math.nan], [2.0, 2.2, 2.1], [math.nan, 7.0, math.nan]])
    advantages, equal = group_advantages(rewards, rewards.isfinite(), std="batch", eps=0.0)
    std = math.sqrt((1 + 1 + 0.1**2 + 0.1**2) / 5)
    assert advantages.flatten().tolist() == pytest.approx(
        [-1 / std, 1 / std, 0, -0.1 / std, 0.1 / std, 0, 0, 0, 0], abs=1e-6
    )
    assert equal.tolist() == [False, False, True]


def test_equal_groups_do_not_change_the_scale_of_the_batch() -> None:
    """They are left out of the mean over an update, so counting them in the deviation would raise
    it a second time."""
    rewards = torch.tensor([[1.0, 3.0, 4.0], [2.0, 2.2, 5.1]])
    alone, _ = group_advantages(rewards, torch.ones(2, 3, dtype=torch.bool), std="batch")
    beside, _ = group_advantages(
        torch.cat([rewards, torch.full((6, 3), 7.0)]),
        torch.ones(8, 3, dtype=torch.bool),
        std="batch",
    )
    torch.testing.assert_close(beside[:2], alone, rtol=1e-6, atol=0)
    assert not beside[2:].any()


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    rewards = torch.tensor([[3.0, 3.0 + 2.4e-7, 3.0], [1e-9, 2e-9, 1e-9]])
    advantages, equal = group_advantages(rewards, torch.ones(2, 3, dtype=torch.bool), eps=0.0)
    assert equal.tolist() == [True, False]
    assert not advantages[0].any()


def test_advantages_of_an_equal_batch_are_zero() -> None:
    rewards = torch.full((2, 3), 0.1)
    for valid in (torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)):
        advantages, equal = group_advantages(rewards, valid, std="batch")
        assert not advantages.any()
        assert equal.all()


def test_advantages_are_clamped() -> None:
    rewards = torch.zeros(1, 101)
    rewards[0, 0] = 1.0
    advantages, _ = group_advantages(rewards, torch.ones(1, 101, dtype=torch.bool), clamp=5.0)
    assert float(advantages.max()) == 5.0


def test_balanced_rewards_by_hand() -> None:
    """A plain loop centres each part in its group, divides it by its standard deviation and weights
    it."""
    generator = torch.Generator().manual_seed(0)
    parts = {
        "sharp": torch.rand(6, generator=generator),
        "bright": 100 * torch.rand(6, generator=generator),
    }
    parts["even"] = torch.full((6,), 0.1)  # equal everywhere: nothing to compare
    parts["unused"] = torch.rand(6, generator=generator)
    weights = {"sharp": 1.0, "bright": -0.5, "even": 2.0, "absent": 0.0}
    valid = torch.tensor([[True, True, True], [True, False, True]])
    parts["bright"][4] = math.nan  # the reward of this part has failed
    expected = [[0.0] * 3, [0.0] * 3]
    for name in ("sharp", "bright"):
        groups = [
            [float(parts[name][3 * p + g]) for g in range(3) if valid[p, g]] for p in range(2)
        ]
        centred = [[value - sum(group) / len(group) for value in group] for group in groups]
        for p, group in enumerate(centred):
            deviation = math.sqrt(sum(value**2 for value in group) / len(group))
            for g, value in zip([g for g in range(3) if valid[p, g]], group):
                expected[p][g] += weights[name] * value / deviation
    found = balanced_rewards(parts, weights, valid)
    assert found.flatten().tolist() == pytest.approx(
        [value for group in expected for value in group], rel=1e-4
    )


@pytest.mark.parametrize("std", ["group", "batch"])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_that_cancel_give_no_advantage(size: int, std: AdvantageStd) -> None:
    """Two parts that rank a group in opposite order cancel, whatever their scales; other groups are
    not affected."""
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(200, size, generator=generator)
    scales = 10 ** (4 * torch.rand(200, 1, generator=generator) - 2)
    second = 3 - scales * first
    second[0] = first[0]  # these two agree
    valid = torch.ones(200, size, dtype=torch.bool)
    total = balanced_rewards(
        {"a": first.flatten(), "b": second.flatten()}, {"a": 0.5, "b": 0.5}, valid
    )
    advantages, equal = group_advantages(total, valid, std=std)
    assert equal.tolist() == [False] + [True] * 199
    assert advantages[0].abs().max() > 0.9
    assert not advantages[1:].any()


def test_balanced_rewards_over_the_batch_are_gdpo() -> None:
    """GDPO (arXiv 2601.05242): parts are normalised by group, their sum over the batch."""
    generator = torch.Generator().manual_seed(0)
    parts = {name: torch.rand(3, 4, generator=generator) for name in "ab"}
    valid = torch.ones(3, 4, dtype=torch.bool)
    total = sum(
        2 * (p - p.mean(1, keepdim=True)) / p.std(1, correction=0, keepdim=True)
        for p in parts.values()
    )
    expected = (total - total.mean()) / total.std(correction=0)
    balanced = balanced_rewards(
        {name: p.flatten() for name, p in parts.items()}, {"a": 2.0, "b": 2.0}, valid
    )
    found, _ = group_advantages(balanced, valid, std="batch")
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6)


def test_equal_groups_change_the_scale_of_gdpo_and_not_its_direction() -> None:
    """Two of three groups are equal: GDPO counts their zeros in the deviation over the batch, and
    we do not."""
    varied = torch.tensor([[0.1, 0.5, 0.9, 0.2], [0.4] * 4, [0.7] * 4])
    other = torch.tensor([[0.3, 0.1, 0.2, 0.8], [0.6] * 4, [0.2] * 4])
    total = torch.zeros(3, 4, dtype=torch.float64)
    for part in (varied.double(), other.double()):
        total[0] += (part[0] - part[0].mean()) / part[0].std(correction=0)
    gdpo = (total - total.mean()) / total.std(correction=0)
    balanced = balanced_rewards(
        {"a": varied.flatten(), "b": other.flatten()},
        {"a": 1.0, "b": 1.0},
        torch.ones(3, 4, dtype=torch.bool),
    )
    found, equal = group_advantages(balanced, torch.ones(3, 4, dtype=torch.bool), std="batch")
    assert equal.tolist() == [False, True, True]
    torch.testing.assert_close(found, gdpo / 3**0.5, rtol=1e-5, atol=1e-6)


def test_balanced_rewards_do_not_follow_the_scale_of_a_part() -> None:
    """Scaling a part changes the advantages of the sum, but not those of balanced parts."""

    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
            return {"vq": videos.mean((1, 2, 3, 4)), "mq": self.by * videos[:, -1].std((1, 2, 3))}

    def norm(by: float, balanced: bool) -> float:
        weights = {"reward.weights": {"vq": 1, "mq": 1}, "sampling.num_frames": 17}
        config = build(BASE_SETTINGS | weights | {"objective.balanced_rewards": balanced})
        return tiny_trainer(config, Scaled(by)).iteration(0)["grad_norm"]

    assert norm(100.0, True) == pytest.approx(norm(0.01, True), rel=1e-3)
    assert norm(100.0, False) != pytest.approx(norm(0.01, False), rel=1e-2)


def test_one_part_cannot_be_balanced() -> None:
    config = build(
        BASE_SETTINGS | {"reward.weights": {"vq": 1, "mq": 0}, "objective.balanced_rewards": True}
    )
    with pytest.raises(
        UserError, match=r"balanced_rewards = True: .* one part with a weight, vq.* choice is false"
    ):
        check_trainable(config)


def test_the_mask_of_the_kl_by_hand() -> None:
    """Mask samples above the limit that move away, for either sign of the advantage.

    The value is always ratio x A.
    """
    log_ratio = torch.tensor([0.1, 0.1, -0.1, -0.1] * 2, requires_grad=True)
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0] * 2)
    kl = torch.tensor([0.3] * 4 + [0.1] * 4)
    scored = Scored(log_ratio=log_ratio, kl_old=kl, advantage=advantage)
    row, objective = SURROGATES["kl_mask"], ObjectiveConfig(kl_limit=0.2)
    value = row.value(scored, objective)
    assert value.tolist() == pytest.approx((log_ratio.exp() * advantage).tolist())
    assert row.clipped(scored, objective).tolist() == [True, False, False, True] + [False] * 4
    (gradient,) = torch.autograd.grad(value.sum(), log_ratio)
    kept = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1])
    assert gradient.tolist() == pytest.approx((kept * log_ratio.exp() * advantage).tolist())


def test_a_run_masks_by_its_limit() -> None:
    """From the second update on, a limit that is never reached masks none, one that is always
    passed about half."""
    masked = [
        tiny_trainer(
            settings(
                train__optimizer_steps=2, objective__surrogate="kl_mask", objective__kl_limit=limit
            )
        ).iteration(0)["ratio/clip_fraction"]
        for limit in (1e3, 1e-12)
    ]
    assert masked[0] == 0
    assert 0.1 < masked[1] <= 0.5  # none in the first update


def test_only_a_gradient_that_is_removed_counts_as_clipped() -> None:
    """Ratios on both sides of the range and within it, with advantages of either sign and none: a
    row of the table is the ratio, a column the advantage."""
    ratio = torch.tensor([1.5, 1.1, 1.0, 0.9, 0.5]).repeat_interleave(3)
    log_ratio = ratio.log().requires_grad_()
    advantage = torch.tensor([2.0, -2.0, 0.0]).repeat(5)
    scored = Scored(log_ratio=log_ratio, kl_old=torch.zeros(15), advantage=advantage)
    row, objective = SURROGATES["clip"], ObjectiveConfig(clip_range=0.2)
    clipped = row.clipped(scored, objective)
    expected = [[True, False, False], [False] * 3, [False] * 3, [False] * 3, [False, True, False]]
    assert clipped.view(5, 3).tolist() == expected


@pytest.mark.parametrize("name", [*SURROGATES])
def test_what_counts_as_clipped_has_no_gradient_and_nothing_else(name: str) -> None:
    """Of every surrogate, by autograd, on random ratios, KLs and advantages."""
    generator = torch.Generator().manual_seed(2)
    draws = torch.randn(3, 500, generator=generator, dtype=torch.float64)
    log_ratio, kl = (0.3 * draws[0]).requires_grad_(), draws[1].square()
    coefs = torch.tensor([[1.0, -0.5, 1.0, -0.5, 0.0, 0.125]], dtype=torch.float64).expand(500, 6)
    scores = TransitionScores(
        log_prob=log_ratio - 1, log_prob_old=-torch.ones(500, dtype=torch.float64), kl_anchor=kl,
        kl_old=kl,
        advantage=draws[2], errors=(torch.ones(500), torch.ones(500)),
    )  # fmt: skip
    scored = Scored(
        log_ratio=log_ratio,
        kl_old=kl,
        advantage=draws[2],
        noised=(scores, Coefficients(*coefs.unbind(1))),
    )
    row, objective = SURROGATES[name], ObjectiveConfig(surrogate=name, clip_range=0.2, kl_limit=0.5)
    (gradient,) = torch.autograd.grad(row.value(scored, objective).sum(), log_ratio)
    clipped = row.clipped(scored, objective).bool()
    assert torch.equal(gradient == 0, clipped)
    assert bool(clipped.any()) == (row.uses_ratio or row.uses_kl)


def test_surrogates_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    new = ratio.log()
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0])
    kl, objective = (
        torch.full_like(ratio, 0.3),
        ObjectiveConfig(clip_range=0.2, nft_beta=0.5, advantage_clamp=4.0),
    )
    scored = Scored(log_ratio=new, kl_old=kl, advantage=advantage)
    clipped = SURROGATES["clip"].value(scored, objective)
    assert clipped.tolist() == pytest.approx([1.2 * 2, 1.5 * -2, 0.5 * 2, 0.8 * -2])
    plain = SURROGATES["log_prob"].value(scored, objective)
    assert plain.tolist() == pytest.approx((new * advantage).tolist())


def test_loss_by_hand() -> None:
    """The loss is -S A ratio + lambda (beta_pos KL_anchor + beta_vel (logp_old - logp)) inside the
    clip range."""
    scores = TransitionScores(
        log_prob=torch.tensor([0.1005]), log_prob_old=torch.tensor([0.1]),
        kl_anchor=torch.tensor([0.7]),
        kl_old=torch.tensor([0.2]), advantage=torch.tensor([2.0]),
    )  # fmt: skip
    ones = torch.ones(1)
    constants = StepConstants(equalizer=torch.tensor([3.0]), bias=ones, coefs=torch.ones(1, 6))

    def total(strategy: str, velocity_term: str = "rollout") -> float:
        kl = KLConfig(strategy=strategy, velocity_term=velocity_term, beta_pos=1.5, beta_vel=0.5)
        return float(
            sage_loss(resolved(ObjectiveConfig(clip_range=0.1), kl), scores, constants, 0.01).total
        )

    policy = -3.0 * 2.0 * math.exp(0.0005)
    assert total("none") == pytest.approx(policy, rel=1e-6)
    assert total("fixed") == pytest.approx(policy + 0.01 * 1.5 * 0.7, rel=1e-6)
    assert total("moving") == pytest.approx(policy + 0.01 * 1.5 * 0.7, rel=1e-6)
    assert total("stepwise") == pytest.approx(policy + 0.01 * 0.5 * -0.0005, rel=1e-6)
    assert total("stepwise", "closed_form") == pytest.approx(policy + 0.01 * 0.5 * 0.2, rel=1e-6)
    assert total("dual", "closed_form") == pytest.approx(
        policy + 0.01 * (1.5 * 0.7 + 0.5 * 0.2), rel=1e-6
    )


def test_lambda_warm_up_and_feedback() -> None:
    config = KLConfig(
        lambda_min=1.0, lambda_max=11.0, warmup_steps=10, target=1.0, history=2, feedback="paper"
    )
    controller = KLController(config)
    assert controller.value == 1.0
    for k in range(1, 11):
        controller.update(1.0)
        assert controller.value == pytest.approx(1.0 + k)
    controller.update(2.5)  # mean of (1, 2.5) = 1.75 > 1.5: Eq. 42 relaxes
    assert controller.value == pytest.approx(11.0 * 0.9)
    controller.update(0.4)  # mean 1.45: within the band
    assert controller.value == pytest.approx(11.0 * 0.9)
    controller.update(0.2)  # mean 0.3 < 0.5: tightens
    assert controller.value == pytest.approx(11.0 * 0.9 * 1.1)
    for _ in range(100):
        controller.update(0.0)
    assert controller.value == 11.0  # bounded
    restored = KLController(config)
    restored.load_state_dict(controller.state_dict())
    assert (restored.value, restored.step, restored.history) == (11.0, 113, controller.history)


@pytest.mark.parametrize(("feedback", "expected"), [("paper", 0.9), ("none", 1.0)])
def test_lambda_feedback_directions(feedback: str, expected: float) -> None:
    """If the KL is too large, `paper` lowers lambda."""
    controller = KLController(
        KLConfig(
            lambda_min=0.1, lambda_max=1.0, warmup_steps=1, target=1.0, history=1, feedback=feedback
        )
    )
    controller.update(9.0)
    controller.update(9.0)
    assert controller.value == pytest.approx(expected)


def rolled_out(trainer: Trainer) -> tuple[Batch, list[tuple[int, int]]]:
    """A batch whose stored transitions are float64, and its transitions."""
    batch, _ = trainer.rollout(trainer.plan(0))
    rows = batch.trajectories
    rows.states, rows.log_probs = (
        {key: x.double() for key, x in tensors.items()} for tensors in (rows.states, rows.log_probs)
    )
    batch.coefs = batch.coefs.double()
    batch.advantages = torch.linspace(-1.5, 1.5, len(batch.samples), dtype=torch.float64)
    return batch, sorted(rows.trained)


LOSSES = itertools.product(
    KL_STRATEGIES,
    (("clip", "plain"), ("clip", "normalised"), ("log_prob", "plain")),
    ("rollout", "closed_form"),
)
"""KL strategy, kind of loss and ratio, velocity term. `make test` has each strategy with one loss
and `dual` with all, `make soak` the rest."""


@pytest.mark.parametrize(
    ("strategy", "kind", "ratio", "velocity_term"),
    [
        pytest.param(
            strategy, *loss, term,
            marks=[pytest.mark.soak] * (strategy != "dual" and loss != ("clip", "normalised")),
        )
        for strategy, loss, term in LOSSES
    ],
)  # fmt: skip
def test_gradient_of_the_whole_loss(
    strategy: str, kind: str, ratio: str, velocity_term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the directional derivative of the loss in the weights with central differences, in
    float64.

    The weights first move away from rollout and anchor, so that no term or gradient is zero.
    """
    config = settings(
        kl__strategy=strategy, kl__velocity_term=velocity_term, kl__lambda_min=0.3,
        kl__lambda_max=0.3,
        objective__surrogate=kind, objective__ratio=ratio, objective__clip_range=0.05,
        sampling__steps=3,
        sampling__num_frames=17, train__group_size=2, train__optimizer_steps=2,
    )  # fmt: skip
    trainer = tiny_trainer(config, dtype=torch.float64)
    monkeypatch.setattr(
        "sage_fast.rollout.samples.initial_latents",
        lambda seeds, shape, device: torch.randn(len(seeds), *shape, dtype=torch.float64),
    )
    equalizer, bias = trainer.constants.equalizer.double(), trainer.constants.bias.double()
    trainer.constants = dataclasses.replace(trainer.constants, equalizer=equalizer, bias=bias)
    perturb(trainer, 0.02, seed=8)
    batch, transitions = rolled_out(trainer)
    if trainer.anchor is not None:
        trainer.anchor_is_current = False
        batch.anchor_velocities = trainer.anchor_velocities(batch, transitions)
    perturb(trainer, 0.02, seed=9)

    def loss() -> Tensor:
        return trainer._loss(batch, transitions)[0].total.sum()

    parameters = trainer.engine.parameters
    gradients = torch.autograd.grad(loss(), parameters)
    generator = torch.Generator().manual_seed(2)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    expected = float(sum((g * d).sum() for g, d in zip(gradients, direction)))

    def shift(by: float) -> None:
        with torch.no_grad():
            for p, d in zip(parameters, direction):
                p.add_(d, alpha=by)

    def moved(by: float) -> float:
        shift(by)
        value = float(loss().detach())
        shift(-by)
        return value

    step = 1e-6
    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(expected, rel=2e-5)
    assert abs(expected) > 1e-3


def test_advantages_of_rewards_that_hardly_differ_are_exact() -> None:
    """In float32 the differences of 1e-2 around 2 would be off by 1e-5."""
    rewards = 2 + 1e-2 * torch.tensor([[0.1, 0.2, 0.7, -0.4], [0.3, 0.1, -0.2, 0.4]])
    exact = rewards.double()
    expected = (exact - exact.mean(1, keepdim=True)) / (
        exact.std(1, correction=0, keepdim=True) + 1e-6
    )
    found, _ = group_advantages(rewards, torch.ones_like(rewards, dtype=torch.bool))
    torch.testing.assert_close(found.double(), expected, rtol=1e-12, atol=1e-12)
