"""Means, intervals and paired differences: by hand, against scipy, by how often they cover the
truth, and as text."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from sage_fast.eval.comparison import compare, format_table
from sage_fast.eval.gains import GainRow, hacking, table
from sage_fast.eval.scores import format_number, mean_and_margin
from sage_fast.eval.videoset import VideoSet, from_evaluation
from sage_fast.report.html import choose
from studies.differences import means_by_prompt


def scores(reward, iteration=0, prompts=6):
    """An evaluation whose rewards alternate between the two in `reward`."""
    names = ["a <b>red</b> circle", "a big blue ball", *(f"prompt {i}" for i in range(2, prompts))][
        :prompts
    ]
    rewards = [reward[i % 2] for i in range(prompts)]
    half = [value / 2 for value in rewards]
    parts = {"vq": half, "mq": half}
    found = {"iteration": iteration, "prompts": names, "seeds": list(range(prompts)), "weights": {}}
    return found | {"reward": rewards, "parts": parts}


def pair(before, after) -> list[VideoSet]:
    """Two evaluations of a run, under the weights of the second."""
    return [
        from_evaluation(label, scores, {}, after["weights"])
        for label, scores in (("before", before), ("after", after))
    ]


def gains(before, after) -> list[GainRow]:
    return [row for row in table(pair(before, after)) if row.gain is not None]


def repeated(evaluation, times):
    """The same prompts with `times` as many seeds."""
    lists = {key: evaluation[key] * times for key in ("prompts", "seeds", "reward")}
    return (
        evaluation
        | lists
        | {"parts": {part: values * times for part, values in evaluation["parts"].items()}}
    )


def evaluation(prompts, reward):
    found = {"iteration": 0, "prompts": prompts, "seeds": list(range(len(prompts))), "weights": {}}
    return found | {"reward": reward, "parts": {}}


def test_composites_are_compared_under_the_same_weights():
    """A resume may change reward.weights; the composite must then change by the videos alone, not
    by the weights."""
    before = scores((1, 2)) | {"weights": {"vq": 1, "mq": 1}}
    after = scores((1.2, 2.2)) | {"weights": {"vq": 3, "mq": 0}}
    after["reward"] = [3 * value for value in after["parts"]["vq"]]
    first, last = table(pair(before, after))[:2]
    assert first.mean == pytest.approx(3 * 0.75)
    assert last.gain == pytest.approx(3 * 0.1)
    unknown = gains(before, after | {"weights": {"new": 1}})[0]
    assert unknown.pairs == 0
    assert math.isnan(unknown.gain or 0)


def test_gains_by_hand():
    prompts = ["a", "b", "c", "d", "e"]
    first, line = table(
        pair(evaluation(prompts, [1, 2, 3, 4, 5]), evaluation(prompts, [1, 3, 5, 7, 9]))
    )
    assert (first.mean, line.mean, line.gain) == (3, 5, 2)
    # variance 2.5; t with 4
    assert line.gain_margin == pytest.approx(2.776445 * math.sqrt(2.5 / 5))
    assert (line.pairs, line.prompts) == (5, 5)


def test_seeds_of_a_prompt_are_averaged_before_the_standard_error():
    prompts = [prompt for prompt in "abcde" for _ in range(2)]
    after = np.array([1.0, 3.0, 0.0, 0.0, 5.0, 3.0, 2.0, 7.0, 1.0, 1.0])
    (line,) = gains(evaluation(prompts, [0.0] * 10), evaluation(prompts, after.tolist()))
    means = after.reshape(5, 2).mean(1)
    # t with 4 degrees of freedom
    assert line.gain_margin == pytest.approx(2.776445 * means.std(ddof=1) / math.sqrt(5))
    assert line.direction == ("up" if line.gain > line.gain_margin else "")
    assert (line.pairs, line.prompts) == (10, 5)


def test_identical_evaluations_have_a_margin_of_zero():
    (line,) = gains(scores((1.0, 2.0)), scores((1.0, 2.0)))[:1]
    assert line.gain_margin == 0
    assert line.direction == ""
    assert "±" in format_table([line])


def test_fewer_than_five_prompts_have_no_margin():
    """More seeds do not replace prompts."""
    before, after = (repeated(scores(reward, prompts=4), 3) for reward in ((1.0, 2.0), (1.5, 2.7)))
    rows = table(pair(before, after))
    assert all(line.margin is None and line.gain_margin is None for line in rows)
    text = format_table(rows)
    assert "±" not in text
    assert text.endswith("12 videos of 4 prompts each; no interval from fewer than 5 prompts")
    assert one_source(before).endswith("no interval from fewer than 5 prompts")
    assert "±" not in one_source(before)


def test_pairs_with_a_failed_score_are_skipped():
    before, after = (
        evaluation(["a", "b", "c"], [1.0, None, 3.0]),
        evaluation(["a", "b", "c"], [2.0, 9.0, math.nan]),
    )
    (line,) = gains(before, after)
    assert (line.pairs, line.gain) == (1, 1.0)


def test_different_prompts_are_refused_and_different_seeds_are_said():
    with pytest.raises(ValueError, match="different prompts"):
        compare(pair(evaluation(["a"], [0]), evaluation(["b"], [0])))
    other = evaluation(["a"], [0]) | {"seeds": [5]}
    assert compare(pair(evaluation(["a"], [0]), other)).notes == [
        "before and after have different seeds: pairs share only the prompt."
    ]


def one_source(evaluation):
    return format_table(table([from_evaluation("base", evaluation, {})]))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_for_the_terminal():
    text = format_table(table(pair(scores((1.0, 2.0)), scores((1.5, 2.7)))))
    head, rule, first, *_ = text.splitlines()[6:]
    assert cells(head) == ["gain over before", "after"]
    assert cells(first) == ["reward", "+0.6000 ± 0.1150"]  # t = 2.5706
    assert set(rule) == {"|", "-", ":", " "}
    assert len({len(line) for line in text.splitlines()[6:11]}) == 1
    text = one_source(scores((1.0, 2.0)))
    assert text.endswith("6 videos of 6 prompts each; ± is a 95 % interval")
    assert [cells(line) for line in text.splitlines()[::2][:2]] == [
        ["mean", "base"],
        ["reward", "1.5000 ± 0.5748"],
    ]


def judged(reward, alignment):
    """An evaluation of six prompts with a judge of one part."""
    found = scores(reward)
    return found | {
        "parts": found["parts"] | {"judge/alignment": [alignment + 0.01 * i for i in range(6)]}
    }


def test_a_reward_that_rises_while_the_judge_falls_is_called_hacking():
    def verdict(before, after):
        return hacking(*pair(before, after))

    before, fallen = judged((1.0, 2.0), 0.8), judged((1.5, 2.7), 0.8)
    fallen["parts"]["judge/alignment"] = [0.5, 0.5, 0.6, 0.5, 0.4, 0.5]
    line = "reward rose while judge/alignment fell: look at the videos (reward hacking)"
    assert verdict(before, fallen) == line
    assert " ".join(compare(pair(before, fallen)).text.split()).endswith(f"after: {line}")
    assert verdict(fallen, before) is None  # the reward fell and the judge rose
    assert verdict(before, judged((1.5, 2.7), 0.8)) is None  # the judge stayed
    assert verdict(scores((1.0, 2.0)), scores((1.5, 2.7))) is None  # nobody judges
    fallen["parts"]["judge/alignment"] = [0.1, 0.8, 0.9, 0.8, 0.8, 0.8]  # within its interval
    assert verdict(before, fallen) is None


def test_the_parts_of_the_judge_stand_in_the_tables():
    before, after = judged((1.0, 2.0), 0.5), judged((1.5, 2.7), 0.6)
    lines = compare(pair(before, after)).text.splitlines()
    assert cells(lines[5])[0] == "judge/alignment"
    assert [cell.split()[0] for cell in cells(lines[5])[1:]] == ["0.5250", "0.6250"]
    assert max(map(len, lines)) <= 80
    assert "judge/alignment" in one_source(before)


def test_gains_medians_and_losses_are_shown():
    names = [str(i) for i in range(9)]
    before, after = (
        evaluation(names, [1.0] * 9),
        evaluation(names, [1.5, 0.2, 1.1, 1.2, 3.0, 0.9, None, 1.3, 1.4]),
    )

    def shown(count, available=range(9), sides=(before, after)):
        files = {number: Path(str(number)) for number in available}
        sets = [from_evaluation(str(i), side, files) for i, side in enumerate(sides)]
        return [(int(prompt), why) for (prompt, _), why in choose(sets, count).items()]

    assert shown(6) == [
        (4, "reward +2.00"),
        (0, "reward +0.50"),
        (7, "reward +0.30"),
        (3, "reward +0.20"),
        (5, "reward -0.10"),
        (1, "reward -0.80"),
    ]
    assert [i for i, _ in shown(3)] == [4, 7, 1]
    assert [i for i, _ in shown(1)] == [7]
    assert shown(2, [0, 3, 8]) == [(0, "reward +0.50"), (3, "reward +0.20")]
    assert [i for i, _ in shown(20)] == [4, 0, 8, 7, 3, 2, 5, 1]
    unknown = evaluation(names, [None] * 9)
    assert shown(6, [3, 1], (unknown, unknown)) == [(1, ""), (3, "")]
    assert shown(3, sides=(after,)) == [(4, ""), (7, ""), (1, "")], "best, median and worst"


def test_small_numbers_keep_their_digits():
    lines = format_table(table(pair(scores((1e-5, 3e-5)), scores((4e-5, 7e-5))))).splitlines()
    assert [cell.split()[0] for cell in cells(lines[2])] == ["reward", "2e-05", "5.5e-05"]
    assert cells(lines[8]) == ["reward", "+3.5e-05 ± 5.7e-06"]
    numbers = [format_number(x, 3) for x in (0, 0.0004, -0.0006, 0.001, math.nan)]
    assert numbers == ["0.000", "0.0004", "-0.0006", "0.001", "nan"]


# -- intervals -------------------------------------------------------------------------------------


def clustered(generator: np.random.Generator, prompts: int) -> tuple[list[str], list[float]]:
    """Four videos per prompt with mean 0; most of the variance is between prompts, and it is
    skewed."""
    difficulty = generator.gamma(4.0, size=(prompts, 1)) / 2 - 2
    values = difficulty + 0.5 * generator.normal(size=(prompts, 4))
    return [str(i) for i in range(prompts) for _ in range(4)], values.flatten().tolist()


@pytest.mark.parametrize("prompts", [8, 24])
def test_the_interval_over_prompts_holds_the_truth_as_often_as_it_says(prompts: int) -> None:
    """Intervals that take videos as independent, and percentiles of resamples of few prompts, cover
    it less often."""
    generator = np.random.default_rng(0)
    held, of_videos, percentile = [], [], []
    for _ in range(400):
        names, values = clustered(generator, prompts)
        means = list(means_by_prompt(names, values).values())
        mean, margin = mean_and_margin(names, values)
        assert margin is not None
        for intervals, interval in (
            (held, (mean - margin, mean + margin)),
            (of_videos, stats.norm.interval(0.95, np.mean(values), stats.sem(values))),
            (
                percentile,
                np.quantile(generator.choice(means, (500, prompts)).mean(1), (0.025, 0.975)),
            ),
        ):
            intervals.append(interval[0] <= 0 <= interval[1])
    assert 0.925 <= np.mean(held) <= 0.975
    assert np.mean(of_videos) < 0.75
    assert prompts > 8 or np.mean(percentile) < 0.92


def test_no_interval_from_few_prompts_and_no_width_without_spread() -> None:
    assert mean_and_margin(list("abcd"), [1.0, 2.0, 3.0, 4.0]) == (2.5, None)
    assert mean_and_margin([], [])[1] is None
    assert mean_and_margin(list("abcdef"), [0.5] * 6) == (0.5, 0.0)


def test_prompts_count_once_and_scores_that_are_missing_do_not() -> None:
    assert means_by_prompt(["a", "b", "a", "c"], [1.0, 5.0, 3.0, math.nan]) == {"a": 2.0, "b": 5.0}
