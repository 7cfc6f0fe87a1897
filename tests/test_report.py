"""The report is made from written-out run folders, whole and damaged."""

import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sage_fast.report import charts
from sage_fast.report.page import checks, report_run, write_report
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_metrics
from sage_fast.util.videos import save_mp4
from tests.test_scores import evaluation, gains, scores


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
        "kl/gradient_share": 0.02,
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


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name in ("before", "after"):
        (folder / name).mkdir()
        for i, slug in enumerate(("a-b-red-b-circle", "a-big-blue-ball")):
            save_mp4(folder / name / f"{i:02d}-{slug}.mp4", torch.rand(3, 3, 16, 16), 8)
    return folder


@pytest.fixture
def run(tmp_path, videos) -> Path:
    """A finished run of 12 iterations with two videos on each side."""
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"train": {"iterations": 12}, "model": {"path": "testbed"}})
    )
    facts = {
        "date": "2026-11-21T17:38:16+00:00",
        "commit": "ae1e5df",
        "command": "sage-fast train 'my config.yaml'",
        "resumed": [
            {
                "iteration": 5,
                "date": "2026-11-22T09:00:00+00:00",
                "commit": None,
                "command": "again --resume",
            }
        ],
        "torch": "2.13.0",
        "notes": ["sage: a note"],
        "sigmas": [1.0, 0.8, 0.5, 0.0],
        "parameters": 438123,
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    write_rows(tmp_path, [row(i) for i in range(12)])
    (tmp_path / "eval").mkdir()
    for name, reward, iteration in (("before", (1.0, 2.0), 0), ("after", (1.5, 2.7), 12)):
        (tmp_path / "eval" / f"{name}.json").write_text(json.dumps(scores(reward, iteration)))
    shutil.copytree(videos, tmp_path / "videos")
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


@pytest.mark.charts
def test_the_page_is_whole_and_loads_nothing(run):
    page = write_report(run).read_text()
    tags = Outline(page).tags
    names = [tag for tag, _ in tags]
    assert names.count("video") == 4
    assert names.count("svg") == 15
    loading = ("src", "href", "xlink:href", "data", "action", "poster", "srcset")
    addresses = [value for _, attrs in tags for key, value in attrs.items() if key in loading]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not re.findall(r"@import|url\((?!#)", page)
    assert not re.search(r">\s*nan\b", page, re.IGNORECASE)
    assert "12 iterations in 0.7 min of training" in page
    assert "sage: a note" in page
    assert "0.02 (warns below 1e-3: it does nothing)" in page


def test_every_video_can_be_stopped_and_none_starts_by_itself(run):
    """The script starts them unless the reader asked for less motion."""
    page = write_report(run).read_text()
    videos = [attrs for tag, attrs in Outline(page).tags if tag == "video"]
    for attrs in videos:
        assert {"controls", "loop", "muted", "playsinline"} <= attrs.keys()
        assert "autoplay" not in attrs
    assert {attrs["aria-label"] for attrs in videos} >= {
        "before: a <b>red</b> circle",
        "after: a big blue ball",
    }
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script.index("prefers-reduced-motion: reduce") < script.index(".play()")


def test_no_table_header_is_empty(run):
    headers = re.findall(r"<th[^>]*>(.*?)</th>", write_report(run).read_text())
    assert headers
    assert all(header.strip() for header in headers)


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2 for `#rrggbb`."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("text", ["ink", "soft", "up", "down", "warn"])
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(scheme, text):
    template = Path(charts.__file__).with_name("base.html.j2").read_text()
    roots = re.findall(r":root \{(.*?)\}", template)
    assert len(roots) == 2
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", roots[scheme]))
    for ground in ("paper", "card"):
        low, high = sorted((luminance(colors[text]), luminance(colors[ground])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, ground


def test_environment_says_how_to_repeat_the_run(run):
    page = write_report(run).read_text()
    section = page[page.index("<h2>Environment</h2>") :]
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section))
    assert facts == {
        "started": (
            "2026-11-21T17:38:16+00:00, commit ae1e5df<code>sage-fast train &#39;my "
            "config.yaml&#39;</code>"
        ),
        "resumed": "after 5 iterations, 2026-11-22T09:00:00+00:00<code>again --resume</code>",
        "parameters": "438,123",
        "versions": "torch 2.13.0",
    }


def test_fewer_than_five_prompts_are_not_judged(run):
    before, after = scores((1.0, 2.0), prompts=4), scores((1.5, 2.7), 12, prompts=4)
    assert not {
        "One part bought with another (held-out)",
        "Training reward against held-out reward",
    } & {check.name for check in checks([row(i) for i in range(12)], gains(before, after))}
    for name, content in (("before", before), ("after", after)):
        (run / "eval" / f"{name}.json").write_text(json.dumps(content))
    page = write_report(run).read_text()
    assert "±" not in page
    assert "no interval from fewer than 5 prompts: no gain is judged" in page


def test_small_numbers_keep_their_digits(run):
    before, after = scores((1e-5, 3e-5)), scores((4e-5, 7e-5), 12)
    for name, content in (("before", before), ("after", after)):
        (run / "eval" / f"{name}.json").write_text(json.dumps(content))
    page = write_report(run).read_text()
    assert ">0.000" not in page
    assert "<td>2e-05</td><td>5.5e-05</td>".replace("-", "\N{MINUS SIGN}") in page
    assert "+3.5e-05 ±&nbsp;5.7e-06".replace("-", "\N{MINUS SIGN}") in page


@pytest.mark.charts
def test_ids_of_inline_pictures_are_distinct(run):
    ids = re.findall(r'<(\w+)[^>]*? id="([^"]+)"', write_report(run).read_text())
    clips = [name for tag, name in ids if tag == "clipPath"]
    assert len(clips) == len(set(clips)) > 0


def test_prompts_are_escaped_and_rewards_shown(run):
    page = write_report(run).read_text()
    assert "a &lt;b&gt;red&lt;/b&gt; circle" in page
    assert "<b>red</b>" not in page
    assert "<b>2.700</b>" in page
    assert "+0.600 ±&nbsp;0.115" in page
    assert "gain ± 95 %" in page


@pytest.mark.charts
def test_the_judge_stands_in_table_chart_and_captions(run):
    for name, reward, iteration, judge in (
        ("before", (1.0, 2.0), 0, 0.8),
        ("iteration-000005", (1.2, 2.3), 5, 0.7),
        ("after", (1.5, 2.7), 12, 0.3),
    ):
        found = scores(reward, iteration)
        found["parts"]["judge/alignment"] = [judge + 0.01 * i * iteration / 12 for i in range(6)]
        (run / "eval" / f"{name}.json").write_text(json.dumps(found))
    page = write_report(run).read_text()
    assert "<td>judge/alignment</td>" in page
    assert "Held-out judge/alignment" in page
    assert "<span>judge/alignment 0.80</span>" in page
    assert "+0.70:" in page  # two videos of six: nothing is the largest
    assert "+0.50:" in page
    assert (
        '<li class="warning"><span class="mark">▲ warning</span><span>Held-out reward against the '
        "judge<" in page
    )
    assert "reward rose while judge/alignment fell" in page


@pytest.mark.charts
def test_names_of_reward_parts_reach_the_charts_escaped(run):
    write_rows(run, [row(i) | {"reward_part/<x>$y": 1.0} for i in range(3)])
    page = write_report(run).read_text()
    Outline(page)
    assert "&lt;x&gt;$y" in page


def drawn(run):
    return set(
        re.findall(
            r'aria-label="([^"]*)"', re.sub(r"<video.*?>", "", write_report(run).read_text())
        )
    )


KL = {
    "KL to the anchor",
    "KL to the rollout policy",
    "The KL&#x27;s share of the gradient",
    "KL weight",
}


@pytest.mark.charts
def test_what_is_off_is_not_drawn(run):
    """A KL that is off is logged as zeros beside a weight that may climb; the same holds for a
    clip."""
    everything = drawn(run)
    assert everything >= KL | {"Clipped ratios", "Time by phase"}
    off = {
        "kl/anchor": 0.0,
        "kl/velocity": 0.0,
        "kl/gradient_share": 0.0,
        "ratio/clip_fraction": 0.0,
    }
    write_rows(
        run, [row(i) | off | {"kl/lambda": 1e-7 * (i + 1), "time/anchor": 1e-5} for i in range(12)]
    )
    assert everything - drawn(run) == KL | {"Clipped ratios"}
    page = write_report(run).read_text()
    assert "<span>Clipped ratios</span>" not in page
    assert ">anchor<" not in page, "a phase that is off"
    surrogate = off | {"kl/velocity": 1e-4}  # as nft logs it
    write_rows(run, [row(i) | surrogate for i in range(12)])
    assert everything - drawn(run) == KL - {"KL to the rollout policy"} | {"Clipped ratios"}


@pytest.mark.charts
def test_no_text_of_a_chart_is_cut(run, monkeypatch):
    """Every title, label and legend lies within its figure; a legend of many runs leaves the axes
    little height."""
    for name, reward, iteration in (
        ("before", (1.0, 2.0), 0),
        ("iteration-000005", (1.2, 2.3), 5),
        ("after", (1.5, 2.7), 12),
    ):
        (run / "eval" / f"{name}.json").write_text(json.dumps(scores(reward, iteration)))
    figures = []
    original = charts.themed_svg
    monkeypatch.setattr(
        charts,
        "themed_svg",
        lambda figure, *rest: figures.append(figure) or original(figure, *rest),
    )
    write_report(run)
    runs = {f"a run with a long name {i}": {0: (1.0, 0.1), 5: (1.5, 0.1)} for i in range(6)}
    charts.held_out(runs, least=1)
    assert len(figures) == 17
    for figure in figures:
        figure.draw_without_rendering()
        (axes,) = figure.axes
        legends = [text for legend in figure.legends for text in legend.get_texts()]
        for text in (axes.xaxis.label, axes.yaxis.label, axes._left_title, *legends):
            box = text.get_window_extent()
            assert box.x0 >= 0, text.get_text()
            assert box.y0 >= 0, text.get_text()
            assert box.x1 <= figure.bbox.width, text.get_text()
            assert box.y1 <= figure.bbox.height, text.get_text()


@pytest.mark.charts
def test_the_same_run_gives_the_same_page(run):
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


@pytest.mark.charts
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
    assert page.count("<svg") == 13
    assert "KL weight" not in page
    assert not re.search(r"[ML] ?nan", page)


def test_a_run_that_has_not_begun_to_iterate(run):
    (run / "metrics.jsonl").unlink()
    (run / "eval" / "after.json").unlink()
    page = write_report(run).read_text()
    assert "No iteration has been completed yet" in page
    assert "There are no two evaluations to compare yet" in page
    assert "<svg" not in page


def test_a_run_without_evaluation(run):
    for file in (run / "eval").iterdir():
        file.unlink()
    assert "There are no two evaluations" in write_report(run).read_text()


def test_a_run_that_was_stopped_is_compared_at_its_last_evaluation(run):
    write_rows(run, [row(i) for i in range(7)])
    (run / "eval" / "after.json").rename(run / "eval" / "iteration-000005.json")
    (run / "eval" / "iteration-000005.json").write_text(json.dumps(scores((1.1, 2.2), 5)))
    page = write_report(run).read_text()
    assert "7 of 12 iterations" in page
    assert "before and at iteration 5" in page
    assert page.count("no video") == 2


def test_a_cut_off_last_line_is_dropped_and_others_are_errors(run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-40])
    assert len(read_metrics(run / "metrics.jsonl")) == 11
    lines = text.splitlines()
    lines[4] = lines[4][:20]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5"):
        write_report(run)


def test_folders_that_are_no_run_are_named(tmp_path, run):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"config\.yaml is missing"):
        write_report(empty)
    (empty / "config.yaml").write_text("seed: 0")
    with pytest.raises(ValueError, match=r"run\.json and metrics\.jsonl are missing"):
        write_report(empty)
    for text, why in (
        ("seed: !!bool x", "cannot read a value: 'x'"),
        ("a: " + "[" * 50_000, "nested too deeply"),
    ):
        (empty / "config.yaml").write_text(text)
        (empty / "run.json").write_text("{}")
        with pytest.raises(UserError, match=rf"config\.yaml: not valid YAML: .*{why}"):
            write_report(empty)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", "- a", "expected a mapping of settings"),
        ("run.json", '{"a": ', "not valid JSON"),
        ("run.json", '{"notes": 3}', "'notes' does not hold what it should"),
        ("run.json", '{"sigmas": [1.0, NaN]}', "'sigmas' does not hold what it should"),
        (
            "run.json",
            '{"transition_std": [Infinity]}',
            "'transition_std' does not hold what it should",
        ),
        ("run.json", '{"equalizer": [1e999]}', "'equalizer' does not hold what it should"),
        ("metrics.jsonl", "[]\n", "line 1: not a row of metrics: .*; put a copy of the file there"),
    ],
)
def test_a_damaged_file_is_named(run, name, content, message):
    (run / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}.*{message}"):
        write_report(run)


@pytest.mark.fault(
    "a damaged evaluation or video in a run that ends", "left out of the report, with a note", 3
)
def test_a_damaged_side_file_does_not_cost_the_report(run, caplog):
    video = next((run / "videos" / "after").glob("00-*"))
    video.write_bytes(video.read_bytes()[:500])
    report_run(run, complete=True)
    page = (run / "report.html").read_text()
    Outline(page)
    assert page.count("<video") == 3
    assert f"left out: {video}: cannot be read as a video" in page
    (run / "eval" / "folder.json").mkdir()
    os.mkfifo(run / "eval" / "pipe.json")
    report_run(run, complete=True)
    page = (run / "report.html").read_text()
    for name in ("folder", "pipe"):
        assert f"left out, since it is damaged: {run}/eval/{name}.json: no regular file" in page
    for name in ("after", "before"):
        (run / "eval" / f"{name}.json").write_text('{"iteration": 12')
        report_run(run, complete=True)
        assert (
            f"left out, since it is damaged: {run / 'eval' / name}.json: not valid JSON"
            in (run / "report.html").read_text()
        )
        assert "note: left out, since it is damaged" in caplog.text


# -- charts and checks -----------------------------------------------------------------------------


def warnings(rows, table=()):
    return {check.name for check in checks(rows, list(table)) if check.warning}


def test_a_healthy_run_warns_of_nothing():
    assert warnings([row(i) for i in range(12)], gains(scores((1, 2)), scores((1.5, 2.7)))) == set()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"reward__zero_std_groups": 0.5}, "Groups whose rewards are all equal"),
        ({"ratio__clip_fraction": 0.6}, "Clipped ratios"),
        ({"reward__std": 0.01}, "Reward spread within a group"),
        ({"reward__dropped": 2}, "Samples dropped for a failed reward"),
        ({"kl__gradient_share": 2e-5}, "The KL's share of the gradient"),
        ({"grad_norm": None}, "Iterations with a value that is not finite"),
    ],
)
def test_signs_in_the_last_quarter_are_warned_of(changes, name):
    rows = [row(i) for i in range(9)] + [row(i, **changes) for i in range(9, 12)]
    assert warnings(rows) == {name}


def test_a_part_that_is_bought_with_another_is_warned_of():
    prompts = [str(i) for i in range(5)]
    risen = [1.0, 1.1, 0.9, 1.0, 1.0]
    before = evaluation(prompts, [0.0] * 5) | {"parts": {"vq": [0.0] * 5, "ta": [0.0] * 5}}
    after = evaluation(prompts, [0.0] * 5) | {
        "parts": {"vq": risen, "ta": [-value for value in risen]}
    }
    assert warnings([row(0)], gains(before, after)) == {"One part bought with another (held-out)"}


def test_training_reward_up_and_held_out_reward_down_is_warned_of():
    fallen = gains(scores((1.0, 2.0)), scores((0.5, 1.4)))
    assert warnings([row(i) for i in range(12)], fallen[:1]) == {
        "Training reward against held-out reward"
    }


def test_running_mean_skips_gaps():
    values = np.array([1.0, math.nan, 3.0, 5.0])
    np.testing.assert_allclose(charts.smooth(values, 3), [1.0, math.nan, 4.0, 4.0])


def test_a_chart_without_data_is_none():
    assert (
        charts.lines(
            {"x": ([row(0)], charts.column([row(0)], "nothing"))}, name="a", title="A", ylabel="y"
        )
        is None
    )
    assert charts.ratio([{"iteration": 0}]) is None
    assert charts.phases([{"iteration": 0}]) is None
    assert charts.held_out({"x": {0: (1.0, 0.1), 10: (1.1, 0.1)}}) is None


@pytest.mark.charts
def test_gradient_by_noise_level_first_and_last_quarter():
    rows = [row(i, velocity_grad_norm=[4.0 - 0.5 * (i // 4), None, 1.0]) for i in range(8)]
    rows.append(row(8, velocity_grad_norm=[9.0, 9.0]))  # before a resume changed the steps
    rows = [rows[-1], *rows[:-1]]
    chart = charts.gradient_by_noise(rows, [1.0, 0.9, 0.5, 0.0])
    assert chart.startswith("<svg")
    assert "Gradient by noise level" in chart
    assert chart != charts.gradient_by_noise(rows, [1.0, 0.8, 0.4, 0.0])

    mean = charts._mean_over_rows(np.array([[4.0, math.nan, 1.0], [2.0, math.nan, math.nan]]))
    np.testing.assert_allclose(mean, [3.0, math.nan, 1.0])
    assert charts.gradient_by_noise(rows, [1.0]) is None
    assert charts.gradient_by_noise([row(0, velocity_grad_norm=None)], [1.0, 0.5]) is None
    assert charts.gradient_by_noise([row(0, velocity_grad_norm=[None, None])], [1.0, 0.5]) is None
    assert charts.gradient_by_noise([], [1.0, 0.5]) is None


def test_held_out_chart_without_standard_errors():
    points = {0: (1.0, math.nan), 10: (1.1, math.nan), 20: (1.2, math.nan)}
    bars, plain = (
        charts.held_out({"x": course})
        for course in ({i: (mean, 0.1) for i, (mean, _) in points.items()}, points)
    )
    assert bars is not None
    assert plain is not None
    assert len(plain) < len(bars)
    assert not re.search(r"[ML] ?nan", plain)
