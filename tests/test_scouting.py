"""Scouting: which candidates become samples, and that they equal the samples of a run without it."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.iteration_samples import Sample, best_and_worst, draw_samples
from sage_fast.algorithm.metrics import record_agreement
from sage_fast.algorithm.schedule import check_trainable
from sage_fast.rewards.interface import Scores
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.trajectories import Trajectories
from sage_fast.tools.plan import format_plan, plan
from sage_fast.trainer import Trainer
from sage_fast.util.errors import NonFiniteError, Stopped, UserError
from sage_fast.util.metrics import Metrics
from tests.tiny import BrightnessReward, settings, tiny_trainer

SCOUTING: dict[str, Any] = {
    "sampling__scout_candidates": 6,
    "sampling__scout_steps": 2,
    "sampling__batch_size": 1,  # other batches round differently
    "train__group_size": 4,
    "train__prompts_per_iteration": 2,
}

WINDOWS = {"sampling__sde_window": 2, "sampling__window_per_prompt": True}
NFT = {"objective__surrogate": "nft", "train__optimizer_steps": 2, "kl__velocity_term": "closed_form"}


class Rollouts:
    """Samples of the rollouts of an iteration, and what was stored for them."""

    def __init__(self, trainer: Trainer) -> None:
        self.samples: list[Sequence[Sample]] = []
        self.stored: list[Trajectories] = []
        original = trainer._rollout

        def noting(samples: Sequence[Sample], *args: Any) -> tuple[Batch, Scores]:
            batch, scores = original(samples, *args)
            self.samples.append([samples[number] for number in batch.numbers])
            self.stored.append(batch.trajectories)
            return batch, scores

        trainer._rollout = noting  # type: ignore[method-assign]

    def of(self, sample: Sample) -> list[Tensor]:
        """Stored states and log-probs of a sample in the last rollout."""
        i, stored = self.samples[-1].index(sample), self.stored[-1]
        return [entries[key] for entries in (stored.states, stored.log_probs) for key in sorted(entries) if key[0] == i]


@pytest.mark.parametrize(("overrides", "iteration"), [({}, 0), (WINDOWS, 3), (NFT, 3)])
def test_a_chosen_sample_is_to_the_bit_that_of_a_run_without_scouting(
    overrides: dict[str, Any], iteration: int
) -> None:
    scouting = tiny_trainer(settings(**SCOUTING | overrides))
    whole = tiny_trainer(settings(**SCOUTING | overrides | {"sampling__scout_candidates": 0, "train__group_size": 6}))
    chosen, everything = Rollouts(scouting), Rollouts(whole)
    row = scouting.iteration(iteration)
    whole.iteration(iteration)
    candidates, samples = chosen.samples
    assert {*candidates} == {*everything.samples[0]}
    assert not chosen.stored[0].states, "a scouting rollout stores nothing"
    for group in range(2):
        assert sum(sample.group == group for sample in samples) == 4
    for sample in samples:
        for ours, theirs in zip(chosen.of(sample), everything.of(sample), strict=True):
            assert torch.equal(ours, theirs), sample
    assert 0 <= row["scout/agreement"] <= 1  # type: ignore[operator]
    assert row["scout/dropped"] == 0
    assert row["time/scout"] > 0  # type: ignore[operator]


def test_scouting_by_the_steps_of_the_sample_itself_foresees_it() -> None:
    """With the ODE in as many steps, the samples have the rewards that were scouted."""
    trainer = tiny_trainer(settings(**SCOUTING | NFT | {"sampling__sampler": "ode", "sampling__scout_steps": 5}))
    scores = watched_scores(trainer)
    row = trainer.iteration(0)
    scouted, kept = scores[0].view(2, 6).tolist(), scores[1].view(2, 4).tolist()
    for candidates, samples in zip(scouted, kept):
        ranked = sorted(candidates)
        assert sorted(samples) == ranked[:2] + ranked[-2:]
    assert row["scout/agreement"] == 1
    assert row["scout/reward"] == pytest.approx(float(scores[0].mean()))


def watched_scores(trainer: Trainer) -> list[Tensor]:
    """The rewards of each group of rollouts, in the order of their samples."""
    scores: list[Tensor] = []
    original = trainer._rollout

    def noting(*args: Any) -> tuple[Batch, Scores]:
        batch, found = original(*args)
        scores.append(found.rewards)
        return batch, found

    trainer._rollout = noting  # type: ignore[method-assign]
    return scores


def chosen_one_by_one(rewards: Sequence[float], count: int) -> list[int]:
    """Choose in an explicit loop: in turn the best and the worst of the rest, then failed ones."""
    left, chosen = [i for i, reward in enumerate(rewards) if math.isfinite(reward)], []
    failed = [i for i, reward in enumerate(rewards) if not math.isfinite(reward)]
    for turn in range(count):
        if not left:
            chosen.append(failed.pop(0))
            continue
        found = left[0]
        for i in left:
            better, equal = rewards[i] > rewards[found], rewards[i] == rewards[found]
            if (better or equal) if turn % 2 == 0 else not (better or equal):
                found = i
        left.remove(found)
        chosen.append(found)
    return sorted(chosen)


def test_the_choice_is_that_of_an_explicit_loop() -> None:
    drawn = random.Random(0)
    for _ in range(500):
        count = 2 * drawn.randint(1, 4)
        values = [0.0, 1.0, 2.0, 3.0, -1.5, math.nan, math.inf]
        rewards = [drawn.choice(values) for _ in range(count + drawn.randint(0, 6))]
        assert best_and_worst(rewards, count) == chosen_one_by_one(rewards, count), rewards
    assert best_and_worst([1, 5, 3, 4, 2, 0], 4) == [0, 1, 3, 5]
    assert best_and_worst([7, 7, 7, 7], 2) == [0, 3]
    assert best_and_worst([math.nan, 1, math.nan, 2], 2) == [1, 3]


class FailsAtRandom(BrightnessReward):
    """Returns NaN for about half of the videos."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        parts = super().__call__(videos, prompts)
        failed = torch.tensor([int(400 * float(video.mean())) % 2 == 1 for video in videos])
        return {part: value.where(~failed, torch.nan) for part, value in parts.items()}


def test_a_failed_candidate_is_chosen_only_if_too_few_are_left() -> None:
    config = settings(**SCOUTING | {"reward__max_dropped": 1, "reward__retries": 0, "sampling__scout_candidates": 12})
    trainer = tiny_trainer(config, FailsAtRandom())
    scores, rollouts = watched_scores(trainer), Rollouts(trainer)
    row = trainer.iteration(0)
    scouted = scores[0].view(2, 12)
    assert row["scout/dropped"] == int((~scouted.isfinite()).sum()) > 0
    assert (scouted.isfinite().sum(1) >= 4).all()
    order = {sample: i for i, sample in enumerate(rollouts.samples[0])}
    assert all(scores[0][order[sample]].isfinite() for sample in rollouts.samples[1])


class AlwaysFails(BrightnessReward):
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        return {part: value * math.nan for part, value in super().__call__(videos, prompts).items()}


def test_scouting_without_a_single_reward_ends_the_run() -> None:
    config = settings(**SCOUTING | {"reward__max_dropped": 1, "reward__retries": 0})
    with pytest.raises(NonFiniteError, match="every reward of this iteration's scouting failed"):
        tiny_trainer(config, AlwaysFails()).iteration(0)


def test_agreement_by_hand() -> None:
    """Pair each of the two best with each of the two worst: 3 of 4 pairs agree, and 1 of 2 where a reward failed."""
    metrics = Metrics()
    scouted = torch.tensor([[3.0, 1.0, 0.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    rewards = torch.tensor([[1.0, 2.0, 0.0, 4.0], [5.0, math.nan, 4.0, 6.0]])
    record_agreement(metrics, scouted, rewards)
    assert metrics.reduce() == {"scout/agreement": pytest.approx(4 / 6)}


def test_an_iteration_that_is_stopped_after_scouting_is_repeated_exactly() -> None:
    config = settings(**SCOUTING | {"train__optimizer_steps": 2})
    whole, stopped = tiny_trainer(config), tiny_trainer(config)
    paused = 0

    def pause() -> None:
        nonlocal paused
        paused += 1
        if paused == 12 * 2 + 7:  # 12 candidates of 2 steps, then within the second sample
            raise Stopped(2)

    stopped.pause = pause
    with pytest.raises(Stopped):
        stopped.iteration(1)
    assert paused == 31
    stopped.pause = lambda: None
    expected, row = whole.iteration(1), stopped.iteration(1)
    assert {k: v for k, v in row.items() if not k.startswith("time/")} == {
        k: v for k, v in expected.items() if not k.startswith("time/")
    }


def test_the_first_candidates_are_the_samples_of_a_run_without_scouting() -> None:
    prompts = ["a", "b", "c"]
    alone, scouted = (
        draw_samples(settings(**SCOUTING | {"sampling__scout_candidates": n}), prompts, 2) for n in (0, 6)
    )
    assert alone == [sample for sample in scouted if sample.index < 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train__group_size": 5}, r"train.group_size = 5: .*as many best as worst.* nearest is 6"),
        ({"train__group_size": 8}, r"sampling.scout_candidates = 6: expected 0 .*at least train.group_size.* is 8"),
        ({"sampling__scout_steps": 6}, r"sampling.scout_steps = 6: expected at most sampling.steps; the nearest is 5"),
        ({"sampling__scout_steps": 0}, r"sampling.scout_steps = 0: expected at least 1"),
        ({"sampling__shared_initial_noise": True}, r"sampling.shared_initial_noise = True: .*all would be equal"),
    ],
)
def test_what_cannot_be_scouted_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trainable(settings(**SCOUTING | overrides))


def test_scouting_is_priced() -> None:
    """12 candidates cost 2 forwards and a decode each, besides 8 samples of 5 steps."""
    without, priced = (plan(settings(**SCOUTING | {"sampling__scout_candidates": n})) for n in (0, 6))
    assert priced.forwards == {"scout": 24, **without.forwards}
    assert priced.flops["scout"] == 24 * priced.flops["forward"]
    assert priced.flops["decode"] == without.flops["decode"] * 20 / 8
    assert " scout " in format_plan(priced)
    assert " scout " not in format_plan(without)
