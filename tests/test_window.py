"""Windows of SDE steps: their draws, the rollouts by them, and what is trained."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import IterationPlan
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.parallel.stored_rollouts import trajectory_bytes
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.parity import check_parity
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.errors import UserError
from tests.tiny import keys_of, planned, settings, tiny_trainer

ALONE: dict[str, Any] = {
    # its last step adds no noise, so the last window trains one step less
    "sampling__sampler": "precise",
    "sampling__steps": 7,
    "sampling__sde_window": 3,
    "sampling__window_per_prompt": True,
    "sampling__batch_size": 1,  # other batches round differently
    "train__prompts_per_iteration": 4,
    "train__group_size": 2,
}


def steps_of(trainer: Trainer, iteration: int) -> list[list[int]]:
    """Trained steps of each group."""
    return trainer.plan(iteration).trained


def rolled_out(trainer: Trainer, planned: IterationPlan) -> Batch:
    return trainer.rollout(planned)[0]


def test_a_window_is_contiguous_and_that_of_all_prompts() -> None:
    trainer = tiny_trainer(settings(sampling__steps=8, sampling__sde_window=3))
    starts = set()
    for index in range(6):
        steps, same = steps_of(trainer, index)
        assert steps == same == list(range(steps[0], steps[0] + 3))
        starts.add(steps[0])
    assert len(starts) > 1
    norms = trainer.iteration(0)["velocity_grad_norm"]
    assert [t for t, value in enumerate(norms) if value is not None] == steps_of(trainer, 0)[0]


@pytest.mark.parametrize(
    ("steps", "length", "each"), [(20, 2, 1), (8, 4, 1), (6, 6, 1), (5, 2, None)]
)
def test_every_step_is_in_equally_many_windows(steps: int, length: int, each: int | None) -> None:
    """Where the length divides the steps, windows do not overlap; elsewhere an end step is in fewer
    of them."""
    config = settings(sampling__steps=steps, sampling__sde_window=length)
    resolved = ResolvedConfig(config)
    trained = [resolved.trained_steps(window) for window in resolved.windows]
    counts = Counter(step for window in trained for step in window)
    assert [len(window) for window in trained] == [length] * len(trained)
    assert [counts[step] for step in range(steps)] == ([each] * steps if each else [1, 2, 2, 2, 1])


def test_each_prompt_has_a_window_of_its_own() -> None:
    trainer = tiny_trainer(settings(**ALONE))
    draws = [steps_of(trainer, index) for index in range(8)]
    assert draws == [steps_of(trainer, index) for index in range(8)]
    drawn = {tuple(steps) for groups in draws for steps in groups}
    assert drawn == {(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5)}
    assert any(len({tuple(steps) for steps in groups}) > 2 for groups in draws)
    norms = trainer.iteration(1)["velocity_grad_norm"]
    trained = sorted({t for steps in draws[1] for t in steps})
    assert [t for t, value in enumerate(norms) if value is not None] == trained


def test_each_prompt_is_rolled_out_as_if_its_window_were_that_of_all() -> None:
    """To the bit."""
    trainer = tiny_trainer(settings(**ALONE))
    several = trainer.plan(0)
    tables = several.tables
    assert len(set(tables)) > 1
    batch = rolled_out(trainer, several)
    assert len(batch.trajectories.trained) == 2 * sum(map(len, steps_of(trainer, 0)))
    group = {place: number // 2 for place, number in enumerate(batch.numbers)}
    for table in set(tables):
        trainer.resolved.windows = [table]  # each group draws this one
        alone = rolled_out(trainer, trainer.plan(0))
        # samples with one window lie side by side
        place = [alone.numbers.index(number) for number in batch.numbers]
        for name in ("states", "log_probs"):
            found, expected = (getattr(each.trajectories, name) for each in (batch, alone))
            keys = [key for key in found if tables[group[key[0]]] is table]
            assert keys
            assert all(torch.equal(found[i, t], expected[place[i], t]) for i, t in keys)


def test_training_scores_every_stored_transition_as_the_rollout_did() -> None:
    """Also where a batch would hold prompts with different windows."""
    trainer = tiny_trainer(settings(**ALONE | {"sampling__batch_size": 8}))
    batch = rolled_out(trainer, trainer.plan(0))
    assert set(batch.trajectories.log_probs) == set(batch.trajectories.trained)
    with torch.no_grad():
        for transition in batch.trajectories.trained:
            log_prob = trainer.replay.score(batch, [transition]).log_prob
            torch.testing.assert_close(
                log_prob[0], batch.trajectories.log_probs[transition], rtol=1e-5, atol=1e-5
            )


def test_the_gate_on_rounding_sees_the_steps_of_all_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = tiny_trainer(settings(**ALONE, train__optimizer_steps=2))
    seen: set[int] = set()
    score = trainer.replay.score

    def noting(batch: Batch, micro: Any, *others: Any) -> Any:
        seen.update(t for _, t in micro)
        return score(batch, micro, *others)

    monkeypatch.setattr(trainer.replay, "score", noting)
    batch = rolled_out(trainer, trainer.plan(0))
    check_parity(trainer.replay, batch, trainer.constants, trainer.config.train, seed=0)
    assert seen == {t for steps in steps_of(trainer, 0) for t in steps}
    assert len(seen) > 3


def test_the_anchor_runs_in_the_windows_alone() -> None:
    values = itertools.cycle([0.0, 1.0])

    def in_turn(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return dict.fromkeys(("vq", "mq", "ta"), torch.tensor([next(values) for _ in prompts]))

    # of a group with equal rewards nothing is trained, so the anchor does not run for it either
    trainer = tiny_trainer(settings(**ALONE, train__parity_gate=False), in_turn)
    trainer.anchor_is_current = False
    seen: list[Batch] = []
    update = trainer.update

    def noting(batch: Batch, *others: Any) -> None:
        seen.append(batch)
        update(batch, *others)

    trainer.update = noting  # type: ignore[method-assign]
    trainer.iteration(1)
    batch, steps = seen[0], steps_of(trainer, 1)
    own = {(place, t) for place, number in enumerate(batch.numbers) for t in steps[number // 2]}
    assert set(batch.anchor_velocities) == own
    assert trainer.forwards["anchor"] == len(batch.anchor_velocities)


def test_windows_of_unequal_length_are_spread_over_all_updates() -> None:
    of_iteration = planned(settings(**ALONE, train__optimizer_steps=2), keys_of(["a", "b", "c"]), 0)
    steps, updates = of_iteration.trained, of_iteration.updates([True] * 8)
    assert {len(of_group) for of_group in steps} == {2, 3}
    assert [{sample for sample, _ in update} for update in updates] == [set(range(8))] * 2
    assert sorted(updates[0] + updates[1]) == [
        (sample, t) for sample in range(8) for t in steps[sample // 2]
    ]


def test_the_plan_has_room_for_the_longest_window() -> None:
    """The first iteration of this seed has short windows alone."""
    config = settings(
        **ALONE | {"sampling__sde_window": 2, "train__prompts_per_iteration": 2, "seed": 22}
    )
    trainer = tiny_trainer(config)
    lengths = [[len(steps) for steps in steps_of(trainer, iteration)] for iteration in range(20)]
    assert lengths[0] == [1, 1]
    longest = max(max(of_groups) for of_groups in lengths)
    assert longest == plan(config).trained_steps == 2
    assert trajectory_bytes(trainer.resolved, numel=10, samples=4)[
        "trajectories (fp32 latents)"
    ] == 4 * 10 * 4 * (longest + 1)


def test_a_window_for_each_prompt_needs_a_window() -> None:
    with pytest.raises(
        UserError, match=r"window_per_prompt = True: .*no window with .*sde_window = 0; .* is false"
    ):
        settings(sampling__window_per_prompt=True)
    with pytest.raises(UserError, match=r"optimizer_steps = 3: .*gives 2 trained transition"):
        check_trainable(settings(**ALONE, train__optimizer_steps=3))
