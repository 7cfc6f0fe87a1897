"""Groups with shared initial noise: the steps before a window run once per group and rank, and
change no result."""

import dataclasses
import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import Rollouts, assign_to_ranks
from sage_fast.algorithm.resolved import Resolved
from sage_fast.algorithm.transitions import SAMPLERS
from sage_fast.rewards.interface import Scores
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.loop import rollout_runs
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.console import Progress
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown
from tests.ranks import run_ranks, screens
from tests.test_graphs import rerun
from tests.tiny import (
    BrightnessReward,
    settings,
    tiny_model,
    tiny_spec,
    tiny_trainer,
)

SHARED: dict[str, Any] = {
    "sampling__shared_initial_noise": True,
    "sampling__steps": 8,
    "sampling__sde_window": 2,
    "sampling__batch_size": 4,
    "train__prompts_per_iteration": 3,
    "train__group_size": 2,
    "train__parity_gate": False,
}


class OneIsDropped(BrightnessReward):
    """Returns NaN for one video in each batch of several."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        parts = super().__call__(videos, prompts)
        parts["mq"][0] = math.nan
        return parts


def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every step for every sample, as without shared steps."""
    monkeypatch.setattr(
        Rollouts, "prefixes", property(lambda rollouts: [0] * len(rollouts.windows))
    )


def rolled_out(trainer: Trainer, index: int = 0) -> tuple[Batch, Scores]:
    return trainer.rollout(trainer.plan(index))


def starts_of(trainer: Trainer, index: int) -> list[int]:
    """First stochastic step of each group."""
    return [table.first_stochastic for table in trainer.plan(index).tables]


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("surrogate", ["clip", "kl_mask", "nft", "awm"])
def test_no_transition_of_a_rollout_is_trained_before_the_window(
    sampler: str, surrogate: str
) -> None:
    config = settings(
        sampling__sampler=sampler,
        sampling__steps=80,
        sampling__shift=9.0,
        objective__surrogate=surrogate,
    )
    resolved = Resolved(config)  # `sage` has silent steps at the start
    for window in [
        resolved.table,
        *(resolved.table.window(start, start + 7) for start in range(74)),
    ]:
        start = window.first_stochastic
        assert not window.c[:start].any()
        assert window.c[start] > 0 or not window.stochastic_steps
        if resolved.objective.surrogate.scores_rollout and window.stochastic_steps:
            assert min(resolved.trained_steps(window)) >= start


@pytest.mark.parametrize("alone", [False, True], ids=["one window", "windows of their own"])
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="clip"),
        pytest.param(
            {"sampling__guidance_scale": 3.0, "sampling__sampler": "precise"}, id="guidance"
        ),
        pytest.param({"train__timestep_fraction": 0.5, "sampling__sde_window": 4}, id="some steps"),
        pytest.param({"objective__surrogate": "nft", "kl__strategy": "moving"}, id="nft"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_rollout_is_that_without_shared_steps(
    given: dict[str, Any], batch_size: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit if a batch is one sample; other batches round differently."""
    given = (
        SHARED | given | {"sampling__batch_size": batch_size, "sampling__window_per_prompt": alone}
    )
    trainer = tiny_trainer(settings(**given), BrightnessReward())
    batch, scores = rolled_out(trainer, 1)
    assert any(starts_of(trainer, 1))
    unshared(monkeypatch)
    expected, theirs = rolled_out(trainer, 1)
    assert sorted(batch.numbers) == sorted(expected.numbers)
    place = {number: i for i, number in enumerate(expected.numbers)}
    tolerance = {"rtol": 0, "atol": 0} if batch_size == 1 else {"rtol": 1e-4, "atol": 1e-5}
    for name in ("states", "log_probs", "velocities"):
        found, other = (getattr(each.trajectories, name) for each in (batch, expected))
        assert len(found) == len(other)
        assert found or name != "states"
        for (i, t), value in found.items():
            torch.testing.assert_close(value, other[place[batch.numbers[i]], t], **tolerance)
    torch.testing.assert_close(scores.rewards, theirs.rewards, **tolerance)


def test_an_iteration_trains_as_without_shared_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropped sample in each batch, and the parity gate."""
    given = SHARED | {"train__parity_gate": True, "train__group_size": 4, "reward__max_dropped": 1}

    def trained() -> tuple[dict[str, Any], Tensor]:
        trainer = tiny_trainer(settings(**given), OneIsDropped())
        start = trainer.policy.snapshot()
        row = trainer.iteration(1)
        return row, torch.cat(
            [(value - start[name]).flatten() for name, value in trainer.policy.snapshot().items()]
        )

    row, moved = trained()
    unshared(monkeypatch)
    expected, theirs = trained()
    assert row["reward/dropped"] == expected["reward/dropped"] == 3
    assert row["log_prob/parity"] < 1e-5
    for key in ("reward/mean", "grad_norm", "kl/gradient_share", "ratio/mean"):
        assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-9), key
    assert float((moved - theirs).norm() / theirs.norm()) < 1e-3


def test_groups_whose_window_starts_at_once_are_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared noise without a window: the batches and their bits are those of samples with noise of
    their own."""
    trainer = tiny_trainer(settings(**SHARED | {"sampling__sde_window": 0}))
    batch, scores = rolled_out(trainer)
    unshared(monkeypatch)
    expected, theirs = rolled_out(trainer)
    assert batch.numbers == expected.numbers
    assert torch.equal(scores.rewards, theirs.rewards)
    assert all(
        torch.equal(batch.trajectories.states[key], value)
        for key, value in expected.trajectories.states.items()
    )


def test_recorded_steps_start_where_the_shared_steps_end() -> None:
    """Replayed from graphs, a rollout in parts has the bits of one without graphs."""
    found = []
    for graphed in (True, False):
        trainer = tiny_trainer(settings(**SHARED))
        trainer.graphs = StepGraphs(trainer.policy, rerun, max_memory=2**40) if graphed else None
        found.append([rolled_out(trainer, 1) for _ in range(3)][-1])
        assert trainer.graphs is None or len(trainer.graphs) > 0
    (batch, scores), (expected, theirs) = found
    assert torch.equal(scores.rewards, theirs.rewards)
    assert all(
        torch.equal(batch.trajectories.states[key], value)
        for key, value in expected.trajectories.states.items()
    )


# -- what is counted -------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 3])
def test_the_bar_and_the_padding_count_steps(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(settings(**SHARED | {"sampling__window_per_prompt": True}))
    made, asked, bars = [0], [], list[Progress]()
    velocity, enter = trainer.policy.velocity, Progress.__enter__

    def counted(x: Tensor, inputs: Any) -> Tensor:
        made[0] += 1
        return velocity(x, inputs)

    monkeypatch.setattr(trainer.policy, "velocity", counted)
    monkeypatch.setattr(
        trainer.policy.states,
        "padding",
        lambda count, backward=False: asked.append(count) or missing,
    )
    monkeypatch.setattr(Progress, "__enter__", lambda bar: bars.append(bar) or enter(bar))
    batch, _ = rolled_out(trainer, 1)
    assert [bar.total for bar in bars if bar.what == "rollout"] == asked
    assert made == [asked[0] + missing]
    assert all(state.isfinite().all() for state in batch.trajectories.states.values())


def test_a_group_is_denoised_once_up_to_its_window() -> None:
    """Two of three groups with one window and one length share the batch of their first steps."""
    rollouts = Rollouts(steps=10, group_size=2, windows=[4, 4, 0], shared=True)
    alike = ["a", "a", "a", "a", "b"]
    assert rollout_runs(alike, [0, 0, 1, 1, 2], rollouts, 4) == [
        ([0, 2], range(4)),
        ([0, 1, 2, 3], range(4, 10)),
        ([4], range(10)),
    ]
    assert rollouts.count([0, 1, 2, 3, 4]) == 2 * 4 + 4 * 6 + 10
    assert rollouts.count([0, 1, 4], tokens=[7, 7, 5, 5, 3]) == 7 * (4 + 2 * 6) + 3 * 10


def test_the_forwards_of_an_iteration_are_those_of_the_plan() -> None:
    """Windows of 2 of 8 steps start at 0, 2, 4 or 6: the steps before are made for one of two
    samples."""
    config = settings(**SHARED, sampling__guidance_scale=3.0, train__iterations=6)
    trainer = tiny_trainer(config)
    made, counts = set(), []
    for index in range(6):
        (start,) = set(starts_of(trainer, index))
        trainer.iteration(index)
        assert trainer.forwards["rollout"] == 2 * 3 * (start + 2 * (8 - start)) <= 2 * 6 * 8
        counts.append(trainer.forwards["rollout"])
        made.add(start)
    assert len(made) > 1
    assert plan(config, tiny_spec(trainer.policy)).forwards["rollout"] == round(sum(counts) / 6)


# -- ranks -----------------------------------------------------------------------------------------


def longest(rollouts: Rollouts, tokens: list[int], ranks: int) -> int:
    return max(
        rollouts.count(share, tokens) for share in assign_to_ranks(tokens, ranks, 1, rollouts)
    )


def test_no_rank_makes_more_than_without_shared_steps() -> None:
    """Any number of ranks, groups and windows.

    Counts differ by at most one, and every sample has a rank.
    """
    generator = random.Random(0)
    for _ in range(200):
        groups, size, steps = (
            generator.randint(1, 6),
            generator.randint(1, 6),
            generator.randint(2, 20),
        )
        tokens = [1] * (groups * size)
        ranks = generator.randint(1, len(tokens))
        starts = [generator.randrange(steps) for _ in range(groups)]
        rollouts = Rollouts(steps=steps, group_size=size, windows=starts, shared=True)
        shares = assign_to_ranks(tokens, ranks, 4, rollouts)
        assert sorted(itertools.chain(*shares)) == list(range(len(tokens)))
        counts = list(map(len, shares))
        assert max(counts) - min(counts) <= 1
        assert longest(rollouts, tokens, ranks) <= -(-len(tokens) // ranks) * steps


@pytest.mark.parametrize("batch_size", [1, 3, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_with_one_window_a_group_lies_on_one_rank(ranks: int, batch_size: int) -> None:
    rollouts = Rollouts(steps=20, group_size=4, windows=[9] * 8, shared=True)
    shares = assign_to_ranks(
        [32_800 + 30 * (i // 4) for i in range(32)], ranks, batch_size, rollouts
    )
    assert sorted(tuple(share[i : i + 4]) for share in shares for i in range(0, len(share), 4)) == [
        (i, i + 1, i + 2, i + 3) for i in range(0, 32, 4)
    ]


def test_groups_are_split_where_that_helps_the_rank_with_the_most() -> None:
    """A whole group with its window at the start takes 80 steps, one at the end 26; halves of both
    take 62."""
    rollouts = Rollouts(steps=20, group_size=4, windows=[0, 18], shared=True)
    shares = assign_to_ranks([1] * 8, 2, 4, rollouts)
    assert [rollouts.count(share) for share in shares] == [62, 62]
    fewer = Rollouts(steps=20, group_size=8, windows=[10], shared=True)  # more ranks than groups
    assert [fewer.count(share) for share in assign_to_ranks([1] * 8, 4, 1, fewer)] == [
        10 + 2 * 10
    ] * 4


def test_the_plan_prices_the_rank_with_the_most() -> None:
    """Windows of their own, three groups on two ranks: the longest rank saves less than all
    together."""
    config = settings(**SHARED | {"sampling__window_per_prompt": True, "train__group_size": 4})
    spec = tiny_spec(tiny_model(config).policy)
    two = plan(config, spec, ranks=2)
    assert two.busiest["rollout"] > two.busiest["training"] == 0.5
    config = config.replace({"sampling.shared_initial_noise": False})
    assert plan(config, spec, ranks=2).busiest["rollout"] == 0.5


ZERO: dict[str, Any] = SHARED | {"sampling__window_per_prompt": True, "sampling__batch_size": 1}
METRICS = ("reward/mean", "reward/std", "grad_norm", "kl/anchor", "ratio/mean")


def sharded(folder: Path) -> None:
    """Train an iteration with ZeRO-3; its ranks make different numbers of steps."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize(timeout_minutes=2)
    row = tiny_trainer(settings(**ZERO, train__engine="zero3")).iteration(1)
    (folder / f"row-{rank()}.json").write_text(json.dumps({key: row[key] for key in METRICS}))
    shutdown()


def test_sharded_ranks_with_unequal_rollouts_train_as_one_process(tmp_path: Path) -> None:
    trainer = tiny_trainer(settings(**ZERO))
    two = dataclasses.replace(trainer.plan(1), ranks=2)
    first, second = map(two.rollouts.count, two.shares)
    assert first != second
    expected = trainer.iteration(1)
    assert run_ranks(sharded, 2, tmp_path) == [0, 0], screens(tmp_path)
    for number in range(2):
        row = json.loads((tmp_path / f"row-{number}.json").read_text())
        assert row == pytest.approx({key: expected[key] for key in METRICS}, rel=1e-3, abs=1e-9)
