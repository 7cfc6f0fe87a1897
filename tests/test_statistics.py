"""Intervals against scipy, and against how often they hold the truth."""

import math

import numpy as np
import pytest
from scipy import stats

from sage_fast.report import statistics
from sage_fast.report.statistics import bootstrap_interval, means_by_prompt, share_interval


def test_with_many_prompts_the_bootstrap_is_that_of_scipy() -> None:
    values = np.random.default_rng(1).gamma(2.0, size=400)
    ours = bootstrap_interval(values)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=2).confidence_interval
    assert ours is not None
    error = values.std() / math.sqrt(len(values))
    assert np.abs(np.subtract(ours, theirs)).max() < 0.08 * error  # of 10,000 resamples


def clustered(generator: np.random.Generator, prompts: int) -> tuple[list[str], list[float]]:
    """Four videos of each prompt, of mean 0; most of the variance is the prompts', and skewed."""
    difficulty = generator.gamma(4.0, size=(prompts, 1)) / 2 - 2
    values = difficulty + 0.5 * generator.normal(size=(prompts, 4))
    return [str(i) for i in range(prompts) for _ in range(4)], values.flatten().tolist()


@pytest.mark.parametrize("prompts", [8, 24])
def test_the_interval_over_prompts_holds_the_truth_as_often_as_it_says(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That over videos, as if they were independent, and scipy's over few prompts hold it more seldom."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    generator = np.random.default_rng(0)
    held, of_videos, percentile = [], [], []
    for _ in range(400):
        names, values = clustered(generator, prompts)
        means = list(means_by_prompt(names, values).values())
        for intervals, interval in (
            (held, bootstrap_interval(means)),
            (of_videos, stats.norm.interval(0.95, np.mean(values), stats.sem(values))),
            (percentile, np.quantile(generator.choice(means, (500, prompts)).mean(1), (0.025, 0.975))),
        ):
            assert interval is not None
            intervals.append(interval[0] <= 0 <= interval[1])
    assert 0.925 <= np.mean(held) <= 0.975
    assert np.mean(of_videos) < 0.75
    assert prompts > 8 or np.mean(percentile) < 0.92


def test_no_interval_from_few_prompts_and_no_width_without_spread() -> None:
    assert bootstrap_interval([1.0, 2.0, 3.0, 4.0]) is None
    assert bootstrap_interval([]) is None
    assert bootstrap_interval([0.5] * 6) == (0.5, 0.5)


def test_the_same_values_give_the_same_interval() -> None:
    values = [0.1, 0.5, 0.2, 0.9, 0.4, 0.3]
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_prompts_count_once_and_scores_that_are_missing_do_not() -> None:
    assert means_by_prompt(["a", "b", "a", "c"], [1.0, 5.0, 3.0, math.nan]) == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(("wins", "votes"), [(0, 10), (7, 10), (32, 32), (1, 1)])
def test_one_vote_on_each_prompt_has_the_interval_of_wilson(wins: int, votes: int) -> None:
    theirs = stats.binomtest(wins, votes).proportion_ci(method="wilson")
    ours = share_interval([str(i) for i in range(votes)], [1.0] * wins + [0.0] * (votes - wins))
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_votes_of_several_voters_are_clustered_by_prompt() -> None:
    """Beta-binomial: 20 prompts of 10 votes. Wilson's own interval takes them for 200 independent votes."""
    generator = np.random.default_rng(0)
    held, independent = [], []
    names = [str(i) for i in range(20) for _ in range(10)]
    for _ in range(600):
        agreed = generator.beta(1.4, 0.6, size=20)  # mean 0.7
        votes = generator.binomial(1, agreed.repeat(10)).astype(float).tolist()
        ours = share_interval(names, votes)
        theirs = stats.binomtest(int(sum(votes)), 200).proportion_ci(method="wilson")
        assert ours is not None
        held.append(ours[0] <= 0.7 <= ours[1])
        independent.append(theirs.low <= 0.7 <= theirs.high)
    assert 0.925 <= np.mean(held) <= 0.975
    assert np.mean(independent) < 0.8


def test_voters_who_all_agree_count_as_one() -> None:
    prompts = [str(i) for i in range(8) for _ in range(5)]
    interval = share_interval(prompts, [1.0] * 40)
    alone = share_interval([str(i) for i in range(8)], [1.0] * 8)
    assert interval is not None
    assert alone is not None
    assert interval[0] < alone[0], "Student's t is wider than the normal distribution"
    assert interval[1] == 1.0
    assert share_interval(["a", "a", "b", "c"], [1.0, 0.0, 1.0, 1.0]) is None, "of three prompts"
