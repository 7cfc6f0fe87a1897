"""Surrogates on noised samples: losses by hand in float64, the noise, and training with the ODE."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.objective import Loss, StepConstants, TransitionScores, sage_loss
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.algorithm.transitions import forward_table, sigma_schedule
from sage_fast.config.schema import ObjectiveConfig, Reduction
from sage_fast.ops import transition_score
from sage_fast.ops.philox import STREAM_TRANSITION, philox_normal
from sage_fast.rewards import Reward
from sage_fast.rollout.trajectories import NoisedSamples
from sage_fast.util.errors import UserError
from tests.test_objective import rolled_out
from tests.tiny import CPU, BrightnessReward, perturb, resolved, settings, tiny_trainer

TABLE = forward_table(sigma_schedule(4, 3.0))
NFT = {"objective__surrogate": "nft", "sampling__sampler": "ode", "kl__strategy": "none"}


def constants_of(reduction: str, coefs: Tensor) -> StepConstants:
    return StepConstants(
        equalizer=TABLE.equalizer(reduction), bias=TABLE.log_ratio_bias(reduction), coefs=coefs
    )


class Noised:
    """Four noised samples in float64, one at each step of TABLE, and our loss on them."""

    def __init__(self, size: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        x0, z, v_old, direction = (
            torch.randn(4, size, dtype=torch.float64, generator=generator) for _ in range(4)
        )
        self.s = TABLE.sigmas[:-1].view(4, 1)
        self.x, self.x0, self.target = (1 - self.s) * x0 + self.s * z, x0, z - x0
        self.v_old, self.direction = v_old, direction
        self.advantage = torch.tensor([-5.0, -0.7, 1.3, 5.0], dtype=torch.float64)

    def moved(self, by: float) -> torch.Tensor:
        return (self.v_old + by * self.direction).requires_grad_()

    def loss(self, v: torch.Tensor, objective: ObjectiveConfig) -> Loss:
        coefs, steps = TABLE.coefficients(objective.log_prob), torch.arange(4)
        log_prob, kl_anchor, kl_old, *errors = transition_score(
            self.x, self.x0, v, coefs, steps, v_old=self.v_old, beta=objective.nft_beta
        )
        old, *_ = transition_score(self.x, self.x0, self.v_old, coefs, steps)
        scores = TransitionScores(
            log_prob=log_prob, log_prob_old=old, kl_anchor=kl_anchor, kl_old=kl_old,
            advantage=self.advantage,
            errors=errors,
        )  # fmt: skip
        return sage_loss(resolved(objective), scores, constants_of(objective.log_prob, coefs), 1.0)

    def error(self, v: torch.Tensor) -> torch.Tensor:
        """The flow-matching loss of each sample, `[4]`."""
        return (v - self.target).square().mean(1)


def check_gradient(
    ours: torch.Tensor, expected: torch.Tensor, v: torch.Tensor, rtol: float = 1e-5
) -> None:
    gradients = [
        torch.autograd.grad(value.sum(), v, retain_graph=True)[0] for value in (ours, expected)
    ]
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(
        gradients[0].double(), gradients[1], rtol=rtol, atol=rtol * float(gradients[1].std())
    )


@pytest.mark.parametrize("by", [0.0, 0.3])
@pytest.mark.parametrize(
    ("reduction", "equalizer"), [("mean", True), ("unscaled", True), ("unscaled", False)]
)
def test_matching_by_hand(reduction: Reduction, equalizer: bool, by: float) -> None:
    """`awm` is A times the flow-matching loss; `unscaled` without the equalizer takes that loss on
    x0."""
    noised = Noised()
    v = noised.moved(by)
    loss = noised.loss(v, ObjectiveConfig(surrogate="awm", log_prob=reduction, equalizer=equalizer))
    weight = (
        noised.s.flatten().square()
        if reduction == "unscaled"
        else torch.ones(4, dtype=torch.float64)
    )
    if equalizer:
        weight = weight * TABLE.equalizer(reduction)
    expected = weight * noised.advantage * (noised.error(v) - noised.error(noised.v_old))
    torch.testing.assert_close(loss.total.double(), expected, rtol=1e-5, atol=1e-5)
    check_gradient(loss.total, expected, v)
    assert not loss.clipped.any()


def adaptive(
    x: Tensor,
    x0: Tensor,
    s: Tensor,
    v: Tensor,
    v_old: Tensor,
    advantage: Tensor,
    objective: ObjectiveConfig,
) -> Tensor:
    """Loss of DiffusionNFT's code, float64 `[B]`: each branch's x0_hat, weighed by its own mean
    absolute error."""
    x, x0, v, v_old, advantage = (value.double() for value in (x, x0, v, v_old, advantage))
    beta, s, over = (
        objective.nft_beta,
        s.double().view(-1, *[1] * (x.ndim - 1)),
        tuple(range(1, x.ndim)),
    )
    positive, negative = beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v

    def branch(prediction: Tensor) -> Tensor:
        x0_hat = x - s * prediction
        with torch.no_grad():
            weight = (x0_hat - x0).abs().mean(over, keepdim=True).clip(min=1e-5)
        return ((x0_hat - x0).square() / weight).mean(over)

    clamp = objective.advantage_clamp
    r = advantage / clamp / 2 + 0.5
    return clamp / beta * (r * branch(positive) + (1 - r) * branch(negative))


@pytest.mark.parametrize("by", [0.0, 0.3])
@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "unscaled"])
def test_adaptive_weighting_by_hand(reduction: Reduction, beta: float, by: float) -> None:
    """The loss is the same with every reduction."""
    noised = Noised()
    v, objective = (
        noised.moved(by),
        ObjectiveConfig(surrogate="nft", nft_beta=beta, log_prob=reduction),
    )
    loss = noised.loss(v, objective)
    expected = adaptive(noised.x, noised.x0, noised.s, v, noised.v_old, noised.advantage, objective)
    torch.testing.assert_close(loss.total.double(), expected, rtol=1e-5, atol=1e-5)
    check_gradient(loss.total, expected, v, rtol=1e-4)


def test_a_branch_without_an_error_is_finite() -> None:
    """With beta 1 and v = v_old = target both predictions are x0; the weight is 1e-5, as in the
    published code."""
    noised = Noised()
    noised.v_old = noised.target
    v, objective = noised.moved(1e-7), ObjectiveConfig(surrogate="nft", log_prob="unscaled")
    expected = adaptive(noised.x, noised.x0, noised.s, v, noised.v_old, noised.advantage, objective)
    loss = noised.loss(v, objective)
    torch.testing.assert_close(loss.total.double(), expected, rtol=0, atol=1e-6)
    assert torch.autograd.grad(loss.total.sum(), v)[0].isfinite().all()


@pytest.mark.parametrize("updates", [1, 2])
def test_training_has_the_loss_of_the_published_code(updates: int) -> None:
    """Loss of an iteration's transitions from the velocities that the policy and the rollout's
    policy give there."""
    overrides = NFT | {"objective__nft_beta": 0.3, "sampling__steps": 3}
    trainer = tiny_trainer(
        settings(**overrides, train__group_size=2, train__optimizer_steps=updates)
    )
    perturb(trainer, 0.02, seed=8)
    batch, transitions = rolled_out(trainer)
    v_old = trainer.replay.velocity(batch, transitions).detach()
    if trainer.objective.scores_noised:
        trainer.replay.score_noised(batch)
        perturb(trainer, 0.1, seed=9)
    stored = batch.trajectories
    x, x0 = stored.gather(stored.states, transitions), stored.next_states(transitions)
    samples, steps = (torch.tensor(indices) for indices in zip(*transitions))
    v = trainer.replay.velocity(batch, transitions)
    s, advantage = trainer.resolved.table.sigmas[steps], batch.advantages[samples]
    expected = adaptive(x, x0, s, v, v_old, advantage, trainer.config.objective)
    ours = trainer._loss(batch, transitions)[0].total
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss.sum(), trainer.engine.parameters)])
        for loss in (ours, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4 * float(gradients[1].abs().max()))
    assert v.equal(v_old) == (updates == 1)


def test_final_samples_are_noised_by_their_own_seeds() -> None:
    """The noise of a seed is the same in any batch, new at each level, and not the noise of the
    rollout."""
    shape, seeds, sigmas = (2, 3, 4, 4), torch.tensor([3, 5, 7]), torch.tensor([1.0, 0.7, 0.4, 0.0])
    x0 = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    trained = list(itertools.product(range(3), [0, 2]))
    whole, parts = (NoisedSamples(shape, trained, 3, CPU) for _ in range(2))
    for rows, batches in ((whole, [slice(0, 3)]), (parts, [slice(0, 1), slice(1, 3)])):
        for batch in batches:
            rows.finish(batch, x0[batch], seeds[batch], sigmas)
    assert sorted(whole.states) == list(itertools.product(range(3), [0, 2, 3]))
    assert all(torch.equal(whole.states[key], parts.states[key]) for key in whole.states)
    assert torch.equal(whole.next_states([(1, 0), (2, 2)]), x0[1:])
    states = {t: torch.stack([whole.states[i, t] for i in range(3)]) for t in (0, 2)}
    noise = {t: (state - (1 - sigmas[t]) * x0) / sigmas[t] for t, state in states.items()}
    rolled = {t: philox_normal(seeds, torch.tensor(t), shape, STREAM_TRANSITION) for t in (0, 2)}
    every = torch.stack([*noise.values(), *rolled.values()]).flatten(1)
    torch.testing.assert_close(every.corrcoef(), torch.eye(4), rtol=0, atol=0.3)
    assert noise[0].mean().abs() < 0.2
    assert noise[0].std().item() == pytest.approx(1, abs=0.15)


class DarknessReward(BrightnessReward):
    def __call__(self, videos: torch.Tensor, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        return {part: -values for part, values in super().__call__(videos, prompts).items()}


@pytest.mark.parametrize(
    ("reward", "surrogate"),
    [
        pytest.param(BrightnessReward(), "nft", id="bright"),
        pytest.param(DarknessReward(), "nft", id="dark", marks=pytest.mark.soak),
        pytest.param(DarknessReward(), "awm", id="matching"),
    ],
)
def test_training_with_the_ode_raises_the_reward(reward: Reward, surrogate: str) -> None:
    """Compare the reward on the first prompt and noise before and after training; it may favour
    bright or dark."""
    overrides = {
        "train__prompts_per_iteration": 1,
        "train__group_size": 16,
        "train__optimizer_steps": 3,
    }
    batches = {"train__batch_size": 16, "sampling__batch_size": 16, "sampling__steps": 3}
    which = NFT | {"objective__surrogate": surrogate, "objective__clip_range": 0.1}
    trainer = tiny_trainer(
        settings(**which, **overrides, **batches, train__learning_rate=2e-2), reward
    )
    first, *_, again = (trainer.iteration(index) for index in (0, 1, 2, 0))
    # The weights of the second update differ from the rollout's, which `awm` does not compare.
    assert (first["ratio/max"] > 1) == (surrogate != "awm")
    gain = again["reward/mean"] - first["reward/mean"]
    print(f"gain {gain:.1e}, of a standard deviation of {first['reward/std']:.1e}")
    assert gain > 5e-5


@pytest.mark.parametrize("strategy", ["fixed", "dual"])
def test_the_rollout_policy_is_scored_at_the_noised_samples(strategy: str) -> None:
    """Weights that hardly move keep its log-probs and velocities, and those of the anchor."""
    overrides = NFT | {
        "kl__strategy": strategy,
        "kl__velocity_term": "closed_form",
        "train__optimizer_steps": 2,
    }
    trainer = tiny_trainer(settings(**overrides, train__learning_rate=1e-12))
    for index in range(2):  # in the second iteration the anchor counts as another policy
        row = trainer.iteration(index)
        assert row["log_prob/max_delta"] < 1e-5
        assert row["kl/velocity"] < 1e-9 > row["kl/anchor"]
        assert row["grad_norm"] > 1e-5
    assert "log_prob/parity" not in row  # no step of the rollout is scored


def test_the_anchor_is_scored_where_no_velocity_of_the_rollout_is_stored() -> None:
    """Each iteration starts with the rollout policy as the anchor; the second update has moved away
    from it."""
    overrides = NFT | {
        "objective__surrogate": "awm",
        "kl__strategy": "moving",
        "kl__anchor_interval": 1,
    }
    overrides |= {"train__optimizer_steps": 2, "train__parity_gate": False}
    row = tiny_trainer(settings(**overrides, train__learning_rate=1e-3)).iteration(0)
    assert row["kl/anchor"] > 0


def test_what_goes_with_it_and_what_does_not() -> None:
    check_trainable(settings(**NFT))
    check_trainable(settings(**NFT | {"sampling__sampler": "sage", "kl__strategy": "moving"}))
    with pytest.raises(UserError, match=r"'ode'.*no stochastic step.*objective.surrogate = nft"):
        check_trainable(settings(**NFT | {"objective__surrogate": "clip"}))
    with pytest.raises(
        UserError, match=r"kl.velocity_term = 'rollout'.*nearest choice is closed_form, or .*moving"
    ):
        check_trainable(settings(**NFT | {"kl__strategy": "dual"}))
    with pytest.raises(
        UserError, match=r"shared_initial_noise = True.*adds no noise.*nearest choice is false"
    ):
        check_trainable(settings(**NFT, sampling__shared_initial_noise=True))
    with pytest.raises(UserError, match=r"objective.nft_beta = 0.*above 0"):
        settings(**NFT, objective__nft_beta=0)
