"""The report is made from written-out run folders, whole and damaged."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sage_fast.report import charts
from sage_fast.report.comparison import format_paired_table, format_scores, paired_table
from sage_fast.report.page import checks, read_metrics, read_run, write_report
from sage_fast.report.videos import save_mp4


def row(i, **changes):
    keys = {
        "iteration": i,
        "optimizer_step": i + 1,
        "reward/mean": 1 + 0.01 * i,
        "reward/std": 0.3,
        "reward_part/vq": 0.5,
        "reward_part/mq": 0.3,
        "reward/zero_std_groups": 0.0,
        "reward/dropped": 0,
        "loss": 1e-4,
        "kl/anchor": 1e-6,
        "kl/velocity": -1e-6,
        "kl/lambda": 1e-7,
        "ratio/mean": 1.0,
        "ratio/min": 0.999,
        "ratio/max": 1.001,
        "ratio/clip_fraction": 0.1,
        "log_prob/max_delta": 1e-3,
        "grad_norm": 0.1,
        "velocity_grad_norm": [1e-3, None, 2e-3],
        "time/rollout": 1.0,
        "time/train": 2.0,
        "time/total": 3.5,
    }
    return keys | {key.replace("__", "/"): value for key, value in changes.items()}


def scores(reward, iteration=0, prompts=("a <b>red</b> circle", "a blue square")):
    half = [value / 2 for value in reward]
    parts = {"vq": half, "mq": half}
    return {"iteration": iteration, "prompts": list(prompts), "seeds": [7, 8], "reward": list(reward), "parts": parts}


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of 12 iterations with two videos on each side."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"train": {"iterations": 12}, "model": {"path": "testbed"}}))
    facts = {"torch": "2.13.0", "notes": ["sage: a note"], "sigmas": [1.0, 0.8, 0.5, 0.0], "parameters": 438123}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    write_rows(tmp_path, [row(i) for i in range(12)])
    (tmp_path / "eval").mkdir()
    for name, reward, iteration in (("before", (1.0, 2.0), 0), ("after", (1.5, 2.7), 12)):
        (tmp_path / "eval" / f"{name}.json").write_text(json.dumps(scores(reward, iteration)))
        (tmp_path / "videos" / name).mkdir(parents=True)
        for i, slug in enumerate(("a-b-red-b-circle", "a-blue-square")):
            save_mp4(tmp_path / "videos" / name / f"{i:02d}-{slug}.mp4", torch.rand(3, 3, 16, 16), 8)
    return tmp_path


def write_rows(run, rows):
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


class Outline(HTMLParser):
    """Tags and attributes; fails on a tag that is not closed."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, page):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(run):
    page = write_report(run).read_text()
    tags = Outline(page).tags
    names = [tag for tag, _ in tags]
    assert names.count("video") == 4
    assert all({"loop", "autoplay", "muted", "playsinline"} <= attrs.keys() for tag, attrs in tags if tag == "video")
    assert names.count("svg") == 13
    loading = ("src", "href", "xlink:href", "data", "action", "poster", "srcset")
    addresses = [value for _, attrs in tags for key, value in attrs.items() if key in loading]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not re.findall(r"@import|<script|url\((?!#)", page)
    assert not re.search(r">\s*nan\b", page, re.IGNORECASE)
    assert "12 iterations in 42 s of training" in page
    assert "438,123" in page
    assert "sage: a note" in page


def test_ids_of_inline_pictures_are_distinct(run):
    ids = re.findall(r'<(\w+)[^>]*? id="([^"]+)"', write_report(run).read_text())
    clips = [name for tag, name in ids if tag == "clipPath"]
    assert len(clips) == len(set(clips)) > 0


def test_prompts_are_escaped_and_rewards_shown(run):
    page = write_report(run).read_text()
    assert "a &lt;b&gt;red&lt;/b&gt; circle" in page
    assert "<b>red</b>" not in page
    assert "<b>2.700</b>" in page
    assert "+0.600 ± 0.100" in page


def test_names_of_reward_parts_reach_the_charts_escaped(run):
    write_rows(run, [row(i) | {"reward_part/<x>$y": 1.0} for i in range(3)])
    page = write_report(run).read_text()
    Outline(page)
    assert "&lt;x&gt;$y" in page


def test_the_same_run_gives_the_same_page(run):
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_gaps_nulls_and_missing_keys_do_not_break_it(run):
    rows = [row(i) for i in range(12)]
    rows[3]["grad_norm"] = None
    rows[4]["reward/mean"] = math.nan
    rows[5]["kl/anchor"] = math.inf
    rows[6]["velocity_grad_norm"] = None
    rows[7] = {"iteration": 7}
    for r in rows:
        r.pop("kl/lambda", None)
        r.pop("time/total", None)
    write_rows(run, rows)
    page = write_report(run).read_text()
    assert page.count("<svg") == 12
    assert "KL weight" not in page
    assert not re.search(r"[ML] ?nan", page)


def test_a_run_that_has_not_begun_to_iterate(run):
    (run / "metrics.jsonl").unlink()
    (run / "eval" / "after.json").unlink()
    page = write_report(run).read_text()
    assert "No iteration has been completed yet" in page
    assert "has not been evaluated again yet" in page
    assert "<svg" not in page


def test_a_run_without_evaluation(run):
    for file in (run / "eval").iterdir():
        file.unlink()
    assert "There is no evaluation" in write_report(run).read_text()


def test_a_run_that_was_stopped_is_compared_at_its_last_evaluation(run):
    write_rows(run, [row(i) for i in range(7)])
    (run / "eval" / "after.json").rename(run / "eval" / "iteration-000005.json")
    (run / "eval" / "iteration-000005.json").write_text(json.dumps(scores((1.1, 2.2), 5)))
    page = write_report(run).read_text()
    assert "7 of 12 iterations" in page
    assert "before and at iteration 5" in page
    assert page.count("no video") == 2


def test_a_cut_off_last_line_is_left_out_and_others_are_errors(run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-40])
    assert len(read_metrics(run / "metrics.jsonl")) == 11
    lines = text.splitlines()
    lines[4] = lines[4][:20]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5"):
        write_report(run)


def test_folders_that_are_no_run_are_named(tmp_path, run):
    with pytest.raises(ValueError, match="no such folder"):
        write_report(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"config\.yaml is missing"):
        write_report(empty)
    (empty / "config.yaml").write_text("seed: 0")
    with pytest.raises(ValueError, match=r"run\.json and metrics\.jsonl are missing"):
        write_report(empty)
    (run / "eval" / "after.json").write_text("{")
    with pytest.raises(ValueError, match=r"after\.json: not valid JSON"):
        read_run(run)


# -- paired comparison ------------------------------------------------------------------------------------------------


def evaluation(prompts, reward):
    return {"iteration": 0, "prompts": prompts, "seeds": list(range(len(prompts))), "reward": reward, "parts": {}}


def test_paired_table_by_hand():
    (line,) = paired_table(evaluation(["a", "b", "c"], [1, 2, 3]), evaluation(["a", "b", "c"], [2, 2, 5]))
    assert (line.before, line.after, line.difference) == (2, 3, 1)
    assert line.standard_error == pytest.approx(1 / math.sqrt(3))  # differences 1, 0, 2: std 1
    assert line.standard_errors == pytest.approx(math.sqrt(3))
    assert (line.pairs, line.prompts) == (3, 3)


def test_seeds_of_a_prompt_are_averaged_before_the_standard_error():
    prompts = ["a", "a", "b", "b", "c", "c"]
    after = np.array([1.0, 3.0, 0.0, 0.0, 5.0, 3.0])
    (line,) = paired_table(evaluation(prompts, [0.0] * 6), evaluation(prompts, after.tolist()))
    means = after.reshape(3, 2).mean(1)
    assert line.standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(3))
    assert (line.pairs, line.prompts) == (6, 3)


def test_one_prompt_is_compared_over_its_seeds():
    (line,) = paired_table(evaluation(["a", "a"], [0.0, 0.0]), evaluation(["a", "a"], [1.0, 3.0]))
    assert line.standard_error == pytest.approx(1.0)


def test_one_pair_has_no_standard_error_and_identical_ones_no_ratio():
    (line,) = paired_table(evaluation(["a"], [0.0]), evaluation(["a"], [1.0]))
    assert line.standard_error is None
    assert line.standard_errors is None
    (line,) = paired_table(evaluation(["a", "b"], [0.0, 1.0]), evaluation(["a", "b"], [0.0, 1.0]))
    assert line.standard_error == 0
    assert line.standard_errors is None
    assert "±" in format_paired_table([line])


def test_pairs_with_a_failed_score_are_left_out():
    before, after = evaluation(["a", "b", "c"], [1.0, None, 3.0]), evaluation(["a", "b", "c"], [2.0, 9.0, math.nan])
    (line,) = paired_table(before, after)
    assert (line.pairs, line.before, line.after) == (1, 1.0, 2.0)


def test_different_prompts_or_seeds_are_refused():
    with pytest.raises(ValueError, match="different prompts"):
        paired_table(evaluation(["a"], [0]), evaluation(["b"], [0]))
    other = evaluation(["a"], [0]) | {"seeds": [5]}
    with pytest.raises(ValueError, match="different seeds"):
        paired_table(evaluation(["a"], [0]), other)


def test_tables_for_the_terminal():
    text = format_paired_table(paired_table(scores((1.0, 2.0)), scores((1.5, 2.7))))
    assert text.splitlines()[1].split() == ["reward", "1.5000", "2.1000", "+0.6000", "±", "0.1000", "+6.0"]
    assert len({len(line) for line in text.splitlines()[:-1]}) == 1
    assert format_scores(scores((1.0, 2.0))).splitlines()[0].split() == ["reward", "1.5000", "±", "0.5000"]


# -- charts and checks ------------------------------------------------------------------------------------------------


def warnings(rows, table=()):
    return {check.name for check in checks(rows, list(table)) if check.warning}


def test_a_healthy_run_warns_of_nothing():
    assert warnings([row(i) for i in range(12)], paired_table(scores((1, 2)), scores((1.5, 2.7)))) == set()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"reward__zero_std_groups": 0.5}, "Groups whose rewards are all equal"),
        ({"ratio__clip_fraction": 0.6}, "Clipped ratios"),
        ({"reward__std": 0.01}, "Reward spread within a group"),
        ({"reward__dropped": 2}, "Samples dropped for a failed reward"),
        ({"grad_norm": None}, "Iterations with a value that is not finite"),
    ],
)
def test_signs_in_the_last_quarter_are_warned_of(changes, name):
    rows = [row(i) for i in range(9)] + [row(i, **changes) for i in range(9, 12)]
    assert warnings(rows) == {name}


def test_a_part_that_is_bought_with_another_is_warned_of():
    prompts = [str(i) for i in range(4)]
    before = evaluation(prompts, [0.0] * 4) | {"parts": {"vq": [0.0] * 4, "ta": [0.0] * 4}}
    after = evaluation(prompts, [0.0] * 4) | {"parts": {"vq": [1.0, 1.1, 0.9, 1.0], "ta": [-1.0, -1.1, -0.9, -1.0]}}
    assert warnings([row(0)], paired_table(before, after)) == {"One part bought with another (held-out)"}


def test_training_reward_that_rises_while_the_held_out_reward_falls_is_warned_of():
    table = paired_table(scores((1.0, 2.0)), scores((0.5, 1.4)))
    assert warnings([row(i) for i in range(12)], table[:1]) == {"Training reward against held-out reward"}


def test_running_mean_leaves_gaps_out():
    values = np.array([1.0, math.nan, 3.0, 5.0])
    np.testing.assert_allclose(charts.smooth(values, 3), [1.0, math.nan, 4.0, 4.0])


def test_step_gradients_of_untrained_steps_are_gaps():
    rows = [row(0), row(1, velocity_grad_norm=None), row(2, velocity_grad_norm=[None, math.inf, 5.0])]
    grid = charts.step_gradients(rows)
    np.testing.assert_array_equal(grid, [[1e-3, math.nan, 2e-3], [math.nan] * 3, [math.nan, math.nan, 5.0]])


def test_a_chart_without_data_is_none():
    assert charts.curves([row(0)], {"nothing": "x"}, name="a", title="A", ylabel="y") is None
    assert charts.ratio([{"iteration": 0}]) is None
    assert charts.phases([{"iteration": 0}]) is None
    assert charts.gradient_map([row(0, velocity_grad_norm=[None, None])]) is None
    assert charts.held_out({0: (1.0, 0.1), 10: (1.1, 0.1)}) is None
