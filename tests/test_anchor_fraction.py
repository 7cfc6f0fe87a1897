"""`kl.anchor_fraction`: the KL to the anchor at a fraction of the trained transitions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import IterationPlan, plan_iteration
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.ops import transition_score
from sage_fast.trainer import Trainer
from tests.test_objective import rolled_out
from tests.tiny import keys_of, perturb, planned, settings, tiny_trainer

PROMPTS = keys_of(["a", "b", "c"])
MANY_STEPS: dict[str, Any] = {"sampling__steps": 9, "train__group_size": 4}


def drawn(plan: IterationPlan) -> list[tuple[int, int]]:
    return plan.anchored([True for _ in plan.samples])


@pytest.mark.parametrize("fraction", [0.25, 0.3, 0.9])
def test_each_transition_is_drawn_with_the_same_probability(fraction: float) -> None:
    """Every step of every sample, so that the weight 1 / fraction leaves the mean as it is."""
    config = settings(**MANY_STEPS, kl__anchor_fraction=fraction)
    plans = [planned(config, PROMPTS, index) for index in range(600)]
    counts = Counter(transition for plan in plans for transition in drawn(plan))
    trained = plans[0].transitions(range(len(plans[0].samples)))
    error = (fraction * (1 - fraction) / len(plans)) ** 0.5
    for transition in trained:
        assert counts[transition] / len(plans) == pytest.approx(fraction, abs=5 * error)
    assert all(plan.anchor_weight == pytest.approx(1 / fraction) for plan in plans)


def test_the_forwards_are_spread_evenly_over_the_samples() -> None:
    config = settings(**MANY_STEPS, kl__anchor_fraction=0.25)
    for index in range(20):
        plan = planned(config, PROMPTS, index)
        by_sample = Counter(number for number, _ in drawn(plan))
        of_each = [by_sample[number] for number in range(len(plan.samples))]
        steps = len(plan.orders[0])
        assert {*of_each} <= {int(steps / 4), int(steps / 4) + 1}
        assert abs(sum(of_each) - steps * len(plan.samples) / 4) < 1
        assert plan.forwards()["anchor"] == sum(of_each)


def test_ranks_that_take_samples_in_turn_share_the_forwards() -> None:
    """Drawn in the order of the samples, every fourth would be that of the same two ranks."""
    config = settings(
        kl__anchor_fraction=0.25,
        sampling__sde_window=1,
        sampling__batch_size=1,
        train__group_size=8,
        train__prompts_per_iteration=8,
        train__optimizer_steps=1,
    )
    resolved = ResolvedConfig(config)
    of_rank: Counter[int] = Counter()
    for index in range(40):
        plan = plan_iteration(resolved, PROMPTS, lambda prompt: 1, index, ranks=8)
        drawn_here = {number for number, _ in drawn(plan)}
        busiest = max(len(drawn_here.intersection(share)) for share in plan.shares)
        of_rank[busiest] += 1
        assert len(drawn_here) == 16
    mean_of_busiest = sum(busiest * count for busiest, count in of_rank.items()) / 40
    assert mean_of_busiest < 5, "two each, were they even; eight, were they on two ranks"


def test_other_ranks_draw_the_same() -> None:
    resolved = ResolvedConfig(settings(**MANY_STEPS, kl__anchor_fraction=0.4))
    one, three = (
        plan_iteration(resolved, PROMPTS, lambda prompt: 1, 5, ranks=ranks) for ranks in (1, 3)
    )
    assert drawn(one) == drawn(three)


def test_a_free_anchor_is_used_everywhere() -> None:
    resolved = ResolvedConfig(settings(**MANY_STEPS, kl__anchor_fraction=0.25))
    plan = plan_iteration(resolved, PROMPTS, lambda prompt: 1, 5, anchor_is_free=True)
    assert plan.anchor_weight == 1
    assert plan.forwards()["anchor"] == 0
    assert all([*steps] == [*order] for steps, order in zip(plan.anchor_steps, plan.orders))


def trainer_away_from_its_anchor(monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Trainer:
    """A float64 trainer whose weights have left the anchor, and whose rollouts are in float64."""
    config = settings(
        sampling__steps=4,
        train__group_size=3,
        train__optimizer_steps=2,
        kl__lambda_min=0.3,
        kl__lambda_max=0.3,
        kl__beta_pos=0.7,
        kl__velocity_term="closed_form",
        kl__anchor_fraction=0.4,
        **overrides,
    )
    trainer = tiny_trainer(config, dtype=torch.float64)
    monkeypatch.setattr(
        "sage_fast.rollout.samples.initial_latents",
        lambda seeds, shape, device: torch.randn(len(seeds), *shape, dtype=torch.float64),
    )
    perturb(trainer, 0.02, seed=8)
    trainer.anchor_is_current = False
    return trainer


def test_loss_and_gradient_are_those_of_own_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The term is lambda beta_pos / fraction times m mean((v - v_anchor)^2) where it was drawn, and
    nothing elsewhere, in one micro-batch with both."""
    trainer = trainer_away_from_its_anchor(monkeypatch)
    plan = trainer.plan(0)
    batch, transitions = rolled_out(trainer)
    anchored = batch.own(plan.anchored([True for _ in plan.samples]))
    batch.anchor_velocities = trainer.anchor_velocities(batch, anchored)
    batch.anchor_weight = plan.anchor_weight
    perturb(trainer, 0.02, seed=9)
    assert 0 < len(anchored) < len(transitions)

    velocities: list[Tensor] = []

    def watched(x: Tensor, x_next: Tensor, v: Tensor, *others: Any) -> Any:
        velocities.append(v)
        return transition_score(x, x_next, v, *others)

    monkeypatch.setattr("sage_fast.rollout.replay.transition_score", watched)
    loss, _ = trainer._loss(batch, transitions)
    [v] = velocities
    m = trainer.constants.row.m.double()
    velocities_old = batch.trajectories.velocities
    own_anchor, own_velocity = [], []
    for (i, t), of_row in zip(transitions, v):
        moved = of_row.double() - velocities_old[i, t].double()
        own_velocity.append(m[t] * moved.square().mean())
        if (i, t) in anchored:
            away = of_row.double() - batch.anchor_velocities[i, t].double()
            own_anchor.append(m[t] * away.square().mean() / 0.4)
        else:
            own_anchor.append(0 * of_row.double().sum())
    anchor, velocity = torch.stack(own_anchor), torch.stack(own_velocity)
    torch.testing.assert_close(loss.kl_anchor.double(), anchor.detach(), rtol=1e-5, atol=1e-12)

    expected = 0.3 * (0.7 * anchor + 0.1 * velocity)
    found = loss.total - loss.policy
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-9)
    gradients = [
        torch.autograd.grad(terms.sum(), v, retain_graph=True)[0] for terms in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


def test_a_run_makes_a_fraction_of_the_forwards_and_its_metric_is_weighted() -> None:
    overrides: dict[str, Any] = {**MANY_STEPS, "train__optimizer_steps": 2}
    whole = tiny_trainer(settings(**overrides))
    part = tiny_trainer(settings(**overrides, kl__anchor_fraction=0.25))
    for trainer in (whole, part):
        trainer.iteration(0)
        trainer.anchor_is_current = False
    rows = [trainer.iteration(1) for trainer in (whole, part)]
    assert whole.forwards["anchor"] == whole.forwards["training"]
    assert part.forwards["anchor"] == pytest.approx(part.forwards["training"] / 4, abs=1)
    assert float(rows[1]["kl/anchor"]) > 0  # type: ignore[arg-type]
    # the same policies but for a first iteration that hardly moved: means over a quarter
    ratio = float(rows[1]["kl/anchor"]) / float(rows[0]["kl/anchor"])  # type: ignore[arg-type]
    assert 0.5 < ratio < 2
