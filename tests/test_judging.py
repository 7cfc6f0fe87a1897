"""`eval` of several sources and `compare`, as a user types them; test_scores.py tests the
intervals."""

import csv
import functools
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sage_fast.cli import main
from sage_fast.commands.sources import labelled
from sage_fast.eval.comparison import compare, format_table, gain_line
from sage_fast.eval.gains import hacking, hacking_in_run, table
from sage_fast.eval.playback import for_browser, read_video
from sage_fast.eval.video_folder import read_folder, write_folder
from sage_fast.eval.videoset import VideoSet, from_evaluation
from sage_fast.report import charts
from sage_fast.rewards import Judge
from sage_fast.util.errors import UserError
from sage_fast.util.videos import save_mp4
from tests.test_report import row, write_rows
from tests.test_scores import evaluation, scores
from tests.tiny import keys_of, settings

PAPER = str(Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml")
SMALL = [
    *(
        "--eval.steps",
        "2",
        "--eval.num_prompts",
        "5",
        "--eval.seeds_per_prompt",
        "1",
        "--eval.num_videos",
        "3",
    ),
]
NASTY = [
    "a \"red\" <b>circle</b> & 'square'",
    "two\nlines, and a comma",
    "an emoji \N{SNOWMAN} = |pipe|",
    "=1+1",
    "plain",
]


@functools.cache
def film(number: int) -> bytes:
    """One of several MP4 files of 17 frames of 32 x 32, enlarged to 128 x 128."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "film.mp4"
        save_mp4(
            file, torch.rand(17, 3, 32, 32, generator=torch.Generator().manual_seed(number)), 8
        )
        return file.read_bytes()


def folder_of_videos(
    folder: Path, prompts: Sequence[str], columns: dict[str, list[object]] | None = None
) -> Path:
    """What another program leaves."""
    folder.mkdir(parents=True)
    with (folder / "videos.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "file", *(columns or {})])
        for i, prompt in enumerate(prompts):
            (folder / f"{i}.mp4").write_bytes(film(i))
            writer.writerow(
                [prompt, f"{i}.mp4", *(values[i] for values in (columns or {}).values())]
            )
    return folder


def run_folder(folder: Path, gain: float = 0.0, **changes: object) -> Path:
    """A finished run of 12 iterations on the nasty prompts."""
    folder.mkdir(parents=True)
    settings = {
        "train": {"iterations": 12},
        "model": {"path": "testbed"},
        "sampling": {"eta": changes.get("eta", 1.0)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    write_rows(folder, [row(i) for i in range(12)])
    (folder / "eval").mkdir()
    for name, more, iteration in (("before", 0.0, 0), ("after", gain, 12)):
        reward = [1.0 + 0.1 * i + more * (1 + 0.1 * i) for i in range(5)]
        found = {
            "iteration": iteration,
            "prompts": NASTY,
            "seeds": list(range(5)),
            "reward": reward,
        }
        (folder / "eval" / f"{name}.json").write_text(json.dumps(found | {"parts": {"vq": reward}}))
        (folder / "videos" / name).mkdir(parents=True)
        for i in range(5):
            (folder / "videos" / name / f"{i:02d}-x.mp4").write_bytes(film(i))
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Base weights, the same with trained ones in two forms, and videos of another program; and
    what was printed."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("eval")
    run = folder / "run"
    train = [
        "--train.iterations",
        "1",
        "--train.prompts_per_iteration",
        "2",
        "--train.group_size",
        "2",
    ]
    train += ["--sampling.num_frames", "9", "--sampling.steps", "4", "--train.batch_size", "16"]
    train += ["--train.learning_rate", "0.02", "--quiet"]
    assert main(["train", PAPER, "--output", str(run), *train, *SMALL]) == 0
    prompts = json.loads((run / "eval" / "before.json").read_text())["prompts"]
    theirs = folder_of_videos(
        folder / "theirs", [prompts[1], "a prompt that is not asked for", *prompts[2:]]
    )
    checkpoint = run / "checkpoints" / "iteration-000001"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        sources = ["base", f"trained={run}", str(checkpoint), str(theirs)]
        options = [
            "--scorer",
            "testbed",
            "--folder",
            str(folder / "out"),
            "--json",
            str(folder / "all.json"),
        ]
        assert main(["eval", *sources, *options]) == 0
    return folder, printed.getvalue()


def test_sources_are_evaluated_alike(evaluated: tuple[Path, str]) -> None:
    folder, printed = evaluated
    result = json.loads((folder / "all.json").read_text())["sources"]
    assert list(result) == ["base", "trained", "iteration-000001", "theirs"]
    before, after = (
        json.loads((folder / "run" / "eval" / f"{n}.json").read_text()) for n in ("before", "after")
    )
    assert result["base"]["reward"] == pytest.approx(before["reward"], rel=1e-4)
    assert result["trained"]["reward"] == pytest.approx(after["reward"], rel=1e-4)
    assert result["base"]["reward"] != pytest.approx(after["reward"], rel=1e-3)
    assert result["trained"]["seeds"] == before["seeds"] == result["base"]["seeds"]
    assert result["trained"]["iteration"] == 1
    # The checkpoint holds the average that is evaluated.
    assert result["iteration-000001"]["reward"] == pytest.approx(after["reward"], rel=1e-4)
    for scores_of in result.values():
        assert scores_of["parts"]["testbed/vq"] == scores_of["parts"]["vq"], (
            "the scorer is the reward"
        )
    assert len(result["theirs"]["reward"]) == 4
    assert "theirs: without 1 video of other prompts" in printed
    assert "theirs has no video of 1 of the prompts" in printed
    assert "videos in folders are compressed, those of other sources are not" in printed


def test_videos_of_another_program_are_scored_as_they_are(evaluated: tuple[Path, str]) -> None:
    from sage_fast.testbed.rewards import TestbedReward

    folder, _ = evaluated
    result = json.loads((folder / "all.json").read_text())["sources"]["theirs"]
    files = [folder / "theirs" / f"{i}.mp4" for i in (0, 2, 3, 4)]
    videos = torch.stack([read_video(file) for file in files])
    assert result["parts"]["vq"] == pytest.approx(
        TestbedReward()(videos, result["prompts"])["vq"].tolist(), rel=1e-4
    )


def test_the_table_is_printed_and_written(evaluated: tuple[Path, str]) -> None:
    folder, printed = evaluated
    out = folder / "out"
    content = json.loads((folder / "all.json").read_text())
    rows = {(line["label"], line["score"]): line for line in content["table"]}
    result = content["sources"]
    mean = sum(result["trained"]["reward"]) / 5
    assert rows["trained", "reward"]["mean"] == pytest.approx(mean)
    gain = [y - x for x, y in zip(result["base"]["reward"], result["trained"]["reward"])]
    assert rows["trained", "reward"]["gain"] == pytest.approx(sum(gain) / 5)
    assert rows["trained", "reward"]["gain_margin"] > 0
    assert rows["base", "reward"]["gain"] is None
    assert rows["theirs", "reward"]["pairs"] == 4
    assert rows["theirs", "reward"]["gain_margin"] is None, "of four prompts"
    text = (out / "evaluation.md").read_text()
    assert text in printed
    means, gains = (line.split("|") for line in text.splitlines() if line.startswith("| reward"))
    assert means[3].split()[:2] == [f"{mean:.4f}", "±"]
    assert gains[2].split()[:2] == [f"{sum(gain) / 5:+.4f}", "±"]
    page = (out / "evaluation.html").read_text()
    assert page.count("<video ") == 4 * 3  # those that all four have
    assert not [a for a in page.split('src="')[1:] if not a.startswith("data:")]


def test_what_eval_leaves_can_be_evaluated_and_compared_again(
    evaluated: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = evaluated
    again = read_folder("x", folder / "out" / "videos" / "trained")
    result = json.loads((folder / "all.json").read_text())["sources"]["trained"]
    assert again.scores["reward"] == result["reward"]
    assert again.seeds == result["seeds"]
    base = str(folder / "out" / "videos" / "base")
    assert (
        main(
            [
                "compare",
                base,
                str(folder / "out" / "videos" / "trained"),
                "--folder",
                str(tmp_path / "c"),
            ]
        )
        == 0
    )
    assert (tmp_path / "c" / "comparison.html").read_text().count("<video ") == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere': no such file or folder; expected a YAML file or a run folder"),
        (["EMPTY"], "nor a folder of videos: videos.csv"),
        (["base"], "'base' is the model of a run or of settings"),
        ([PAPER, PAPER], "two sources are called"),
        (["RUN/checkpoints/iteration-000009"], "iteration-000009': no such file or folder"),
        (["RUN", PAPER, "--model.weights", "x"], "--model.weights goes with one source"),
        (["THEIRS"], "--reward.name NAME"),
        (["RUN", "THEIRS"], "none of its prompts"),
        (["RUN", "--scorer", "no:such"], "--scorer = 'no:such'"),
        (["RUN", "--scorer", ""], "--scorer '': expected LABEL=NAME"),
        (["RUN", "--scorer", "testbed", "--scorer", "testbed"], "two sources are called 'testbed'"),
        (
            ["RUN", "--scorer", "judge=testbed"],
            "--scorer 'testbed': expected LABEL=NAME, and a label other than judge",
        ),
        (["RUN", "--folder", "THEIRS"], "expected a new or an empty folder"),
    ],
)
def test_wrong_sources_are_named(
    arguments: list[str],
    message: str,
    evaluated: tuple[Path, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    theirs = folder_of_videos(tmp_path / "theirs", ["a prompt of another set"])
    places = {"EMPTY": tmp_path / "empty", "RUN": evaluated[0] / "run", "THEIRS": theirs}
    for name, place in places.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]
    assert main(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err


def damage(name: str) -> Callable[[Path], object]:
    def csv_is(text: str) -> Callable[[Path], object]:
        return lambda folder: (folder / "videos.csv").write_text(text)

    def cut(folder: Path) -> None:
        content = (folder / "0.mp4").read_bytes()
        (folder / "0.mp4").write_bytes(content[: len(content) // 2])

    return {
        "no row": csv_is("file,prompt\n"),
        "empty": csv_is(""),
        "no prompt column": csv_is("file,promt\n0.mp4,a\n"),
        "no such file": csv_is("file,prompt\n7.mp4,a\n"),
        "too many": csv_is("file,prompt\n0.mp4,a, b\n"),
        "no prompt": csv_is('file,prompt\n0.mp4,""\n'),
        "no video": csv_is("file,prompt\nvideos.csv,a small red ball moves left slowly\n"),
        "binary": lambda folder: (folder / "videos.csv").write_bytes(b"\xff\xfe\x00"),
        "cut off": cut,
        "text": lambda folder: (folder / "0.mp4").write_text("this is no video"),
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no row", "holds no video"),
        ("empty", "holds no video"),
        ("no prompt column", "did you mean 'promt'?"),
        ("no such file", "'7.mp4': no such file"),
        ("too many", "video 1: expected 2 values"),
        ("no prompt", "'0.mp4' has no prompt"),
        ("no video", "cannot be read as a video"),
        ("binary", "not a CSV file in UTF-8"),
        ("cut off", "0.mp4: cannot be read as a video: it ends after"),
        ("text", "0.mp4: cannot be read as a video"),
    ],
)
def test_damaged_folders_of_videos_are_named(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of_videos(
        tmp_path / "theirs",
        ["a small red ball moves left slowly", "a big blue ball moves up slowly"],
    )
    damage(name)(folder)
    assert main(["eval", str(folder), "--reward.name", "testbed"]) == 2
    assert message in capsys.readouterr().err
    unreadable = "cannot be read as a video" in message
    assert main(["compare", str(folder), "--folder", str(tmp_path / "out")]) == (
        0 if unreadable else 2
    )
    if unreadable:
        assert message in (tmp_path / "out" / "comparison.html").read_text()
    else:
        assert message in capsys.readouterr().err


def test_labels_are_last_parts_of_paths() -> None:
    assert list(labelled(["runs/a", "runs/b"])) == ["a", "b"]
    assert list(labelled(["one/demo/", "ours=two/demo/"])) == ["demo", "ours"]
    assert list(labelled(["runs/a/checkpoints/iteration-000010", "base"])) == [
        "iteration-000010",
        "base",
    ]
    rewards = ["clipscore", "mine:Sharp", "http://one:8000/", "x=http://one:8000"]
    assert labelled(rewards) == dict(
        zip(("clipscore", "mine:Sharp", "one:8000", "x"), [*rewards[:3], rewards[3][2:]])
    )
    with pytest.raises(UserError, match="two sources are called 'a'"):
        labelled(["a=x", "runs/a"])


# -- tables ----------------------------------------------------------------------------------------


def video_set(
    label: str, reward: list[float], prompts: list[str] | None = None, **parts: list[float]
) -> VideoSet:
    prompts = prompts or [str(i) for i in range(len(reward))]
    return VideoSet(
        label=label,
        prompts=prompts,
        files=[None] * len(prompts),
        scores={"reward": reward, **parts},
    )


def test_table_by_hand() -> None:
    """Two videos of each of five prompts, one without a score: its pair does not count."""
    prompts = [prompt for prompt in "abcde" for _ in range(2)]
    first = video_set("x", [0.0, 2.0, *[1.0] * 8], prompts)
    second = video_set("y", [3.0, math.nan, *[2.0] * 8], prompts, vq=[1.0] * 10)
    one, two, part = table([first, second])
    assert (one.mean, one.videos, one.prompts, one.gain) == (1.0, 10, 5, None)
    assert two.mean == pytest.approx((3 + 8 * 2) / 9)
    assert two.gain == pytest.approx((3 + 8 * 1) / 9)
    assert (two.videos, two.pairs) == (9, 9)
    assert two.direction == "up"
    assert (part.label, part.score, part.mean, part.gain) == ("y", "vq", 1.0, None)
    assert "up to" in format_table([one, two])


def test_videos_are_paired_by_prompt_and_not_by_place() -> None:
    first = video_set("x", [1.0, 2.0, 3.0], ["a", "b", "a"])
    second = video_set("y", [30.0, 20.0, 10.0], ["a", "b", "a"][::-1])
    assert table([first, second])[1].gain == pytest.approx((29 + 7 + 18) / 3)


def test_a_source_without_any_score_has_dashes() -> None:
    rows = table([video_set("x", [1.0] * 5), video_set("y", [math.nan] * 5)])
    assert math.isnan(rows[1].mean)
    means, gains = (
        line.split() for line in format_table(rows).splitlines() if line.startswith("| reward")
    )
    assert means == ["|", "reward", "|", "1.0000", "±", "0.0000", "|", "-", "|"]
    assert gains == ["|", "reward", "|", "-", "|"]


def test_one_prompt_has_no_interval() -> None:
    rows = table([video_set("x", [1.0, 2.0], ["a", "a"]), video_set("y", [2.0, 3.0], ["a", "a"])])
    assert [row.margin for row in rows] == [None, None]
    assert format_table(rows).endswith(
        "2 videos of 1 prompt each; no interval from fewer than 5 prompts"
    )


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ([2.0, 3.1, 4.0, 5.1, 6.0], "rose: 3.000 to 4.040, +1.0400 ± 0.0680"),
        ([0.0, 1.1, 2.0, 3.1, 4.0], "fell: 3.000 to 2.040, -0.9600 ± 0.0680"),
        ([2.0, 1.0, 4.0, 3.0, 5.0], "did not clearly change: 3.000 to 3.000, +0.0000 ± 1.2417"),
    ],
)
def test_the_line_of_a_run_says_whether_the_reward_changed(after: list[float], line: str) -> None:
    before = video_set("before", [1.0, 2.0, 3.0, 4.0, 5.0])
    found = gain_line(compare([before, video_set("after", after)]))
    assert found == f"the reward of held-out prompts {line}"


def test_the_line_has_no_ends_that_are_not_those_of_the_gain() -> None:
    before = video_set("before", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    after = video_set("after", [2.0, 3.1, 4.0, 5.1, 6.0, math.nan])
    line = gain_line(compare([before, after]))
    assert line == "the reward of held-out prompts rose: +1.0400 ± 0.0680"


def test_the_line_says_that_there_is_no_interval() -> None:
    line = gain_line(compare([video_set("before", [1.0]), video_set("after", [2.0])]))
    assert line == (
        "the reward of held-out prompts has no interval from fewer than 5 prompts: 1.000 to "
        "2.000, +1.0000"
    )


def test_there_is_no_line_without_a_reward_at_both_ends() -> None:
    before = video_set("before", [1.0, 2.0])
    unscored = VideoSet(
        label="after", prompts=before.prompts, files=before.files, scores={"vq": [1.0, 2.0]}
    )
    assert gain_line(compare([before, unscored])) is None
    lost = video_set("after", [math.nan, math.nan])
    assert gain_line(compare([before, lost])) is None
    assert gain_line(compare([before])) is None


def test_labels_do_not_break_the_markdown() -> None:
    assert "a\\|b \\<i> |" in format_table(table([video_set("a|b\n<i>", [1.0] * 5)]))


def test_prompts_with_line_ends_within_are_read_as_they_were_written(tmp_path: Path) -> None:
    prompts = ["one\rtwo", "one\r\ntwo", "one\ntwo", 'a "b", c']
    (tmp_path / "a.mp4").touch()
    found = VideoSet(
        label="x",
        prompts=prompts,
        files=[tmp_path / "a.mp4"] * 4,
        seeds=None,
        scores={"r": [1.0] * 4},
    )
    write_folder(found, tmp_path)
    again = read_folder("x", tmp_path)
    assert (again.prompts, again.scores) == (prompts, found.scores)


def test_an_index_without_a_name_is_no_score(tmp_path: Path) -> None:
    """As pandas writes it."""
    (tmp_path / "a.mp4").touch()
    (tmp_path / "videos.csv").write_text(",file,prompt,r\n0,a.mp4,one,2\n")
    assert read_folder("x", tmp_path).scores == {"r": [2.0]}


def test_prompts_of_any_kind_survive_the_csv(tmp_path: Path) -> None:
    folder = folder_of_videos(
        tmp_path / "x", NASTY, {"seed": [2**62 + i for i in range(5)], "s": [1.5, "", 3, 4, 5]}
    )
    found = read_folder("x", folder)
    assert found.prompts == NASTY
    assert found.seeds == [2**62 + i for i in range(5)]
    assert math.isnan(found.scores["s"][1])
    (tmp_path / "y").mkdir()
    write_folder(found, tmp_path / "y")
    again = read_folder("x", tmp_path / "y")
    assert (again.prompts, again.seeds, again.scores["s"][2:]) == (
        NASTY,
        found.seeds,
        found.scores["s"][2:],
    )
    assert [file.resolve() for file in again.shown.values()] == [
        file.resolve() for file in found.shown.values()
    ]


@pytest.mark.parametrize("seed", ["9" * 5000, "-1", "1.0", "\u0663", ""])
def test_what_is_no_seed_is_left_out(seed: str, tmp_path: Path) -> None:
    folder = folder_of_videos(tmp_path / "x", NASTY, {"seed": [seed] * 5})
    assert read_folder("x", folder).seeds is None


def test_codecs_that_browsers_do_not_play_are_encoded_again(tmp_path: Path) -> None:
    import imageio_ffmpeg

    save_mp4(tmp_path / "h264.mp4", torch.rand(5, 3, 32, 32), 8)
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    for name, codec in (
        ("mpeg4.mp4", ["mpeg4"]),
        ("full.mp4", ["libx264", "-pix_fmt", "yuv444p"]),
        ("x.avi", ["mjpeg"]),
    ):
        done = subprocess.run(
            [ffmpeg, "-i", tmp_path / "h264.mp4", "-c:v", *codec, tmp_path / name],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-1000:]
        kind, content = for_browser(tmp_path / name)
        assert kind == "video/mp4"
        assert content != (tmp_path / name).read_bytes()
        (tmp_path / "again.mp4").write_bytes(content)
        assert for_browser(tmp_path / "again.mp4") == (kind, content)
        assert read_video(tmp_path / "again.mp4").shape == (5, 3, 128, 128)
    assert for_browser(tmp_path / "h264.mp4")[1] == (tmp_path / "h264.mp4").read_bytes()


# -- reward hacking --------------------------------------------------------------------------------


def judged(iteration: int, reward: float, judge: float) -> dict[str, object]:
    """An evaluation whose differences to another one vary a little from prompt to prompt."""
    wobble = [0.01 * (i * (iteration // 10 + 1) % 5) for i in range(6)]
    found = evaluation([str(i) for i in range(6)], [reward + i + w for i, w in enumerate(wobble)])
    return found | {
        "iteration": iteration,
        "parts": {"judge/x": [judge + i / 10 + w for i, w in enumerate(wobble)]},
    }


def test_judge_that_falls_from_its_best_is_reported_even_above_its_start() -> None:
    run = {
        "before": judged(0, 1.0, 0.5),
        "iteration-000010": judged(10, 1.5, 0.9),
        "after": judged(20, 2.0, 0.7),
    }

    def verdict(run: dict[str, dict[str, object]]) -> str | None:
        return hacking_in_run([from_evaluation(name, scores, {}) for name, scores in run.items()])

    found = verdict(run)
    assert found is not None
    assert found.startswith("since iteration 10: reward rose while judge/x fell")
    assert verdict({name: run[name] for name in ("before", "iteration-000010")}) is None
    assert verdict(run | {"after": judged(20, 1.0, 0.7)}) is None, "the reward fell too"
    assert verdict(run | {"after": judged(20, 2.0, 0.895)}) is None, "within its interval"
    assert verdict({"before": run["before"]}) is None
    assert (
        verdict({name: scores((1, 2), i) for i, name in enumerate(("before", "after"))}) is None
    ), "no judge"


def test_a_judge_that_falls_from_the_start() -> None:
    run = [
        from_evaluation("before", judged(0, 1.0, 0.5), {}),
        from_evaluation("after", judged(20, 2.0, 0.3), {}),
    ]
    assert (
        hacking_in_run(run) == "reward rose while judge/x fell: look at the videos (reward hacking)"
    )


def luck(
    evaluations: int, parts: int, prompts: int, generator: np.random.Generator
) -> list[VideoSet]:
    """The evaluations of an honest run: the composite rises, and the judge's parts scatter about
    what they were."""
    names = [f"prompt {i}" for i in range(prompts)]
    level = generator.normal(size=(parts, prompts))
    sets = []
    for index in range(evaluations):
        judged = level + 0.3 * generator.normal(size=(parts, prompts))
        reward = 5.0 * index + 0.1 * generator.normal(size=prompts)
        scores = {f"judge/{part}": list(map(float, values)) for part, values in enumerate(judged)}
        files: list[Path | None] = [None] * prompts
        found = {"reward": list(map(float, reward))} | scores
        sets.append(VideoSet(label=str(index), prompts=names, files=files, scores=found))
    return sets


@pytest.mark.parametrize(("evaluations", "parts"), [(2, 2), (4, 1), (4, 3), (11, 2)])
def test_honest_runs_are_accused_in_at_most_5_percent(evaluations: int, parts: int) -> None:
    """At 95 % for each look, as for one comparison, 10 % were accused after four evaluations and 28
    % after eleven."""
    generator = np.random.default_rng(7)
    runs = [luck(evaluations, parts, 16, generator) for _ in range(400)]
    accused = sum(hacking_in_run(run) is not None for run in runs)
    assert accused <= 0.05 * len(runs)


def test_honest_sources_are_accused_in_at_most_5_percent() -> None:
    """Of `eval` and `compare`, which test each source against the first."""
    generator = np.random.default_rng(8)
    accused = sum(bool(compare(luck(8, 2, 16, generator)).warnings) for _ in range(300))
    assert accused <= 0.05 * 300


def test_a_fall_that_is_corrected_for_is_that_of_bonferroni() -> None:
    """Six prompts: t is 2.571 for one comparison and 3.163 for two, so a fall of 3 standard errors
    counts once."""
    gains = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    error = float(gains.std(ddof=1)) / math.sqrt(6)
    first = judged(0, 1.0, 0.5)
    base = [0.5 + i / 10 for i in range(6)]
    falls = [b + float(gain) - 3 * error for b, gain in zip(base, gains)]
    before = from_evaluation("before", first | {"parts": {"judge/x": base}}, {})
    later = from_evaluation("after", judged(20, 2.0, 0) | {"parts": {"judge/x": falls}}, {})
    assert hacking(before, later) is not None
    assert hacking(before, later, pairs=2) is None
    assert (
        hacking(
            before, from_evaluation("after", judged(20, 2.0, 0) | {"parts": {"judge/x": base}}, {})
        )
        is None
    )


def test_a_source_that_hacks_the_reward_is_reported_by_eval() -> None:
    spread = [0.01 * i for i in range(8)]
    first = video_set(
        "x", [1 + 3 * s for s in spread], **{"clip/cosine": [0.5 + s for s in spread]}
    )
    second = video_set("y", [2 + s for s in spread], **{"clip/cosine": [0.3 - s for s in spread]})
    assert compare([first, second], ("clip/",)).warnings == [
        "y: reward rose while clip/cosine fell: look at the videos (reward hacking)"
    ]
    assert compare([first, second]).warnings == []
    assert compare([second, first], ("clip/",)).warnings == []


# -- compare and votes -----------------------------------------------------------------------------


def test_compare_lays_runs_over_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "<two>", 0.5, eta=0.5)
    running = run_folder(tmp_path / "running")
    (running / "eval" / "after.json").unlink()
    with (running / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 12, "rew')  # a row that is being written
    out = tmp_path / "out"
    assert main(["compare", str(one), str(two), str(running), "--folder", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == str(out / "comparison.html")
    assert said.endswith(f"{(out / 'comparison.md').read_text()}{out / 'comparison.html'}\n")
    page = (out / "comparison.html").read_text()
    assert '<th scope="col">videos / prompts</th>' in page
    assert page.count("<td>5 / 5</td>") == 2 * 3, "each row says how many videos and prompts it has"
    assert "running is shown before training." in page
    assert "<two>" not in page
    assert "<td>sampling.eta</td><td>1.0</td><td>0.5</td><td>1.0</td>" in page
    assert "train.iterations" not in page, "the same in all"
    assert "+0.600" in page, "0.5 (1 + 0.1 i), mean of five"
    assert page.count("<video ") == 5 * 3
    assert page.count("<svg") == 2 + 13
    assert "&lt;b&gt;circle&lt;/b&gt;" in page


def scored_by(run: Path, weights: object, reward: dict[str, object]) -> Path:
    """Let a run's settings and evaluations say what scored it."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(
        yaml.safe_dump(settings | {"reward": {"weights": weights} | reward})
    )
    for file in (run / "eval").iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"weights": weights}))
    return run


def compared(out: Path, *words: str | Path) -> str:
    """The page of `compare`, of whose charts only those of held-out scores are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "lines", lambda *given, **options: None)
        assert main(["compare", *map(str, words), "--folder", str(out)]) == 0
    return (out / "comparison.html").read_text()


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"name": "testbed", "weights": {"vq": 1.0}}, None),
        ({"name": "testbed", "weights": {"vq": 1.0}, "device": "cpu", "workers": 2}, None),
        ({"name": "testbed", "weights": {"vq": 0.5}}, "reward.weights"),
        ({"name": "mine:other", "weights": {"vq": 1.0}}, "reward.name"),
        ({"name": "testbed", "weights": {"vq": 1.0}, "args": {"path": "x"}}, "reward.args"),
    ],
)
def test_compare_says_that_runs_have_different_rewards(
    other: dict[str, object], differs: str | None, tmp_path: Path
) -> None:
    one = scored_by(run_folder(tmp_path / "one"), {"vq": 1.0}, {"name": "testbed"})
    two = scored_by(run_folder(tmp_path / "two", 0.5), other["weights"], other)
    page = compared(tmp_path / "out", one, two)
    assert ("scored in different ways" in page) == (differs is not None)
    assert (
        differs is None
        or f"The runs are scored in different ways ({differs}): gains of one over another" in page
    )
    assert "since start of training" in page


def test_compare_tells_files_by_what_they_hold(tmp_path: Path) -> None:
    """Prompts that `init` copied are the same prompts; a file that was edited between two runs is
    another one."""
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", 0.5)
    for run, prompts, weights in ((one, "testbed:train", "1"), (two, "prompts.txt", "2")):
        settings = yaml.safe_load((run / "config.yaml").read_text())
        settings |= {"data": {"prompts": prompts}, "model": {"weights": "weights"}}
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        contents = {
            "data.prompts": "72 prompts (SHA-256 ab)",
            "model.weights": f"weights (SHA-256 {weights})",
        }
        (run / "run.json").write_text(json.dumps({"contents": contents}))
    page = compared(tmp_path / "out", one, two)
    assert "prompts.txt" not in page
    assert "<td>model.weights</td><td>weights (SHA-256 1)</td><td>weights (SHA-256 2)</td>" in page
    contents["data.prompts"] = "3 prompts (SHA-256 cd)"
    (two / "run.json").write_text(json.dumps({"contents": contents}))
    assert "<td>data.prompts</td><td>testbed:train</td><td>prompts.txt</td>" in compared(
        tmp_path / "out", one, two
    )
    (one / "run.json").unlink()  # an older run says nothing of its files: their names are compared
    page = compared(tmp_path / "out", one, two)
    assert "prompts.txt" in page
    assert "model.weights" not in page


def test_another_reward_scores_the_videos_that_a_run_has_kept(
    evaluated: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the model, and both sides alike."""
    run = evaluated[0] / "run"
    kept = [read_folder(name, run / "videos" / name) for name in ("before", "after")]
    assert (
        kept[1].scores["reward"] == json.loads((run / "eval" / "after.json").read_text())["reward"]
    )
    folders = [str(run / "videos" / name) for name in ("before", "after")]
    judge = [
        "--reward.name",
        "testbed-judge",
        "--reward.weights",
        "{naturalness: 1}",
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert main(["eval", *folders, *judge]) == 0
    assert "gain over before" in capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())["sources"]["after"]
    videos = torch.stack([read_video(file) for file in kept[1].shown.values()])
    judge_here = Judge("testbed-judge", settings().reward)
    expected = judge_here(videos, keys_of(kept[1].prompts)).parts["naturalness"]
    assert found["reward"] == pytest.approx(expected.tolist(), rel=1e-4)


def test_runs_without_a_video_in_common_show_none(tmp_path: Path) -> None:
    """Rows of which one side is always empty say nothing."""
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", 0.5)
    for run, kept in ((one, {0, 1}), (two, {3, 4})):
        for i in set(range(5)) - kept:
            (run / "videos" / "after" / f"{i:02d}-x.mp4").unlink()
    page = compared(tmp_path / "out", one, two)
    assert "<video " not in page
    assert "no video" not in page
    assert "No videos are shown: no prompt has one of every source." in page


def test_compare_refuses_runs_of_other_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two")
    for file in (two / "eval").iterdir():
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"prompts": [f"other {i}" for i in range(5)]}))
    assert main(["compare", str(one), str(two), "--folder", str(tmp_path / "out")]) == 2
    assert "hold different prompts" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "none"), "--folder", str(tmp_path / "out")]) == 2
    assert (
        "none': no such file or folder; expected a run folder, or a folder with videos.csv"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_from_evaluation_keeps_what_is_known() -> None:
    found = from_evaluation(
        "x", scores((1.0, 2.0)) | {"reward": [1.0, None, 2.0, 1.0, 1.0, 1.0]}, {}
    )
    assert math.isnan(found.scores["reward"][1])
    assert list(found.scores) == ["reward", "vq", "mq"]
    assert found.shown == {}
