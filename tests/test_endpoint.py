"""`objective.direction: endpoint`: the direction in which the samples of a group are trained."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import IterationPlan, Sample
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.ops.philox import philox_normal
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.endpoint import turn_to_endpoints
from sage_fast.rollout.trajectories import Trajectories
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown
from tests.ranks import run_ranks, screens
from tests.tiny import settings, tiny_trainer

ENDPOINT: dict[str, Any] = {
    "objective__direction": "endpoint",
    "sampling__shared_initial_noise": True,
    "sampling__sde_window": 2,
    "sampling__window_per_prompt": True,
    "train__group_size": 4,
}


def turned(jacobian: Tensor, samples: int, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the noise of a group whose endpoints are `jacobian` times it, and its turned noise,
    both `[N, D]`."""
    size, shape = len(jacobian), (1, 1, 1, len(jacobian))
    stored = Trajectories(
        shape,
        [(i, 0) for i in range(samples)],
        1,
        torch.device("cpu"),
        endpoint_transitions=[(i, 0) for i in range(samples)],
    )
    seeds = torch.arange(samples)
    noise = 0.3 * philox_normal(seeds, torch.tensor(0), shape)
    stored.states |= {(i, 1): value for i, value in enumerate(noise)}
    stored.finish(
        slice(0, samples),
        (noise.view(samples, size) @ jacobian.T.float()).view(samples, *shape),
        seeds,
        seeds,
    )
    rows = [
        Sample(group=0, index=i, prompt=PromptKey(""), seed=i, latent_seed=0)
        for i in range(samples)
    ]
    plan = SimpleNamespace(
        rollouts=SimpleNamespace(group_size=samples),
        endpoint_share=share,
        tables=[SimpleNamespace(c=torch.tensor([0.3]))],
    )
    turn_to_endpoints(SimpleNamespace(trajectories=stored, samples=rows), plan)  # type: ignore[arg-type]
    scored = stored.next_states([(i, 0) for i in range(samples)])
    return noise.view(samples, size), scored.view(samples, size)


def directions(jacobian: Tensor) -> tuple[float, float]:
    """Return the cosines of (mean of A x noise, mean of A x turned noise) with the gradient of a
    linear reward."""
    slope = torch.linspace(1, 2, len(jacobian))
    noise, scored = turned(jacobian, 2000)
    advantage = noise @ jacobian.T.float() @ slope
    exact = jacobian.T.float() @ slope
    return tuple(
        float(torch.cosine_similarity((advantage[:, None] * d).mean(0), exact, dim=0))
        for d in (noise, scored)
    )  # type: ignore[return-value]


def test_turned_noise_keeps_its_length_and_points_to_the_centred_endpoint() -> None:
    jacobian = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    noise, scored = turned(jacobian, 8)
    torch.testing.assert_close(scored.norm(dim=1), noise.norm(dim=1))
    ends = noise @ jacobian.T
    expected = ends - ends.mean(0)
    torch.testing.assert_close(torch.cosine_similarity(scored, expected), torch.ones(8))


def test_where_the_endpoint_is_an_ascent_direction() -> None:
    """In expectation it is J J^T g in place of J^T g: an ascent where J keeps the half-space of the
    gradient."""
    sharp = torch.diag(torch.tensor([1.0, 0.8, 0.05, 0.05, 0.0, 0.0]))
    for value in directions(sharp):
        assert value > 0.95
    angle = math.radians(80)
    rotation = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )
    noise, endpoint_direction = directions(rotation)
    assert noise > 0.95
    assert endpoint_direction == pytest.approx(math.cos(angle), abs=0.1)
    noise, endpoint_direction = directions(-torch.eye(4))  # a model that mirrors the noise
    assert noise > 0.95
    assert endpoint_direction < -0.95


def test_where_the_endpoint_of_two_noisy_steps_is_an_ascent_direction() -> None:
    """In expectation it is (J1 J1^T + J2 J2^T) g, the second step's noise included; with one step
    J1 J1^T g.

    A second step that spreads along one axis turns the direction towards it, here so far that it
    descends.
    """
    first = torch.tensor([[1.0, 0.0], [0.9, -0.2]])
    second = torch.tensor([[0.0, 0.0], [0.0, 12.0]])
    slope = torch.tensor([1.0, -0.2])
    noises = torch.randn(2, 200_000, 2, generator=torch.Generator().manual_seed(3))
    ends = noises[0] @ first.T + noises[1] @ second.T
    direction = ends - ends.mean(0)
    mean = ((direction @ slope)[:, None] * direction).mean(0)
    expected = (first @ first.T + second @ second.T) @ slope
    torch.testing.assert_close(mean, expected, rtol=0.05, atol=0.1)
    climb = slope @ first
    assert float(climb @ first @ first.T @ slope) > 0, "one step alone climbs"
    assert float(climb @ expected) < 0
    assert float(climb @ mean) < 0


def test_less_noise_where_few_dimensions_reach_the_endpoint() -> None:
    jacobian = torch.zeros(64, 64)
    jacobian[0, 0] = 1
    noise, scored = turned(jacobian, 1000)
    advantage = noise[:, :1]
    for_noise, for_endpoint = (
        (advantage * d).var(0).sum() / (advantage * d).mean(0).square().sum()
        for d in (noise, scored)
    )
    assert for_noise > 20 * for_endpoint


def test_only_the_step_that_a_group_enters_together_is_turned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings(**ENDPOINT, train__parity_gate=True)
    trainer = tiny_trainer(config)
    plan = trainer.plan(0)
    batch, _ = trainer.rollout(plan)  # the gate has replayed the turned steps
    firsts = {(i, plan.rollouts.windows[sample.group]) for i, sample in enumerate(batch.samples)}
    stored = batch.trajectories
    assert set(stored.endpoints) == firsts
    for i, t in stored.trained:
        changed = not torch.equal(stored.next_states([(i, t)])[0], stored.states[i, t + 1])
        assert changed == ((i, t) in firsts)
    with torch.no_grad():
        scores = trainer.replay.score(batch, stored.trained)
    torch.testing.assert_close(scores.log_prob, scores.log_prob_old, rtol=0, atol=2e-5)


def test_ranks_without_such_a_step_sum_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def watched(batch: Batch, plan: IterationPlan) -> None:
        called.append(len(batch.trajectories.endpoints))
        turn_to_endpoints(batch, plan)

    monkeypatch.setattr("sage_fast.trainer.turn_to_endpoints", watched)
    trainer = tiny_trainer(
        settings(**ENDPOINT, train__timestep_fraction=0.5, train__parity_gate=False)
    )
    for index in range(6):
        trainer.rollout(trainer.plan(index))
    assert len(called) == 6
    assert 0 in called
    assert max(called) > 0


def endpoints() -> dict[tuple[int, int], Tensor]:
    trainer = tiny_trainer(settings(**ENDPOINT, train__parity_gate=False))
    batch, _ = trainer.rollout(trainer.plan(0))
    return {
        (batch.numbers[i], t): value.clone()
        for (i, t), value in batch.trajectories.endpoints.items()
    }


def save_endpoints(folder: Path) -> None:
    initialize(timeout_minutes=5)
    torch.save(endpoints(), folder / f"{rank()}.pt")
    shutdown()


def test_a_group_spread_over_ranks(tmp_path: Path) -> None:
    alone = endpoints()
    assert run_ranks(save_endpoints, 2, tmp_path) == [0, 0], screens(tmp_path)
    shares = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(2)]
    assert {key for share in shares for key in share} == set(alone)
    # of every group on each
    assert all({n // 4 for n, _ in alone} == {n // 4 for n, _ in share} for share in shares)
    for share in shares:
        for key, value in share.items():
            torch.testing.assert_close(value, alone[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"sampling__shared_initial_noise": False},
            "direction = 'endpoint': expected sampling.shared_initial_noise",
        ),
        (
            {"objective__surrogate": "nft", "kl__strategy": "none"},
            "direction = 'endpoint': expected sampling",
        ),
    ],
)
def test_what_it_needs(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trainable(settings(**{**ENDPOINT, **overrides}))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_the_hand_over_mixes_directions_of_one_length(share: float) -> None:
    """(1 - w) n + w e in float64, both as long as the noise, and brought to its length."""
    jacobian = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    noise, scored = turned(jacobian, 8, share)
    ends = noise.double() @ jacobian.T.double()
    for row in range(8):
        n = noise[row].double()
        e = ends[row] - ends.mean(0)
        e = e * n.norm() / e.norm()
        mixed = (1 - share) * n + share * e
        expected = mixed * n.norm() / mixed.norm()
        torch.testing.assert_close(scored[row].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_hand_over_ends_in_the_noise() -> None:
    config = settings(**ENDPOINT, objective__hand_over_iterations=4, train__parity_gate=True)
    trainer = tiny_trainer(config)
    shares = [trainer.plan(index).endpoint_share for index in range(6)]
    assert shares == [1, 0.75, 0.5, 0.25, 0, 0]
    assert tiny_trainer(settings(**ENDPOINT)).plan(100).endpoint_share == 1

    batch, _ = trainer.rollout(trainer.plan(4))
    assert not batch.trajectories.endpoints
    noisy = tiny_trainer(settings(**{**ENDPOINT, "objective__direction": "noise"}))
    plain, _ = noisy.rollout(noisy.plan(4))
    for transition in batch.trajectories.trained:
        found = batch.trajectories.next_states([transition])
        assert torch.equal(found, plain.trajectories.next_states([transition]))


def test_the_log_prob_stays_during_the_hand_over() -> None:
    config = settings(**ENDPOINT, objective__hand_over_iterations=2, train__parity_gate=True)
    trainer = tiny_trainer(config)
    batch, _ = trainer.rollout(trainer.plan(1))
    assert batch.trajectories.endpoints
    with torch.no_grad():
        scores = trainer.replay.score(batch, batch.trajectories.trained)
    torch.testing.assert_close(scores.log_prob, scores.log_prob_old, rtol=0, atol=2e-5)


def test_there_is_nothing_to_hand_over_from_the_noise() -> None:
    with pytest.raises(UserError, match=r"hand_over_iterations = 20: objective.direction = noise"):
        check_trainable(settings(objective__hand_over_iterations=20))
