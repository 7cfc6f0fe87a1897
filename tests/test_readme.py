"""Every number of README is recomputed here from the file or the plan that it comes from."""

import csv
import dataclasses
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_fast.cli import main
from sage_fast.config.loader import load
from sage_fast.data.prompts import read_prompts
from sage_fast.tools.plan import plan, reward_sizes
from sage_fast.tools.plan_text import format_plan
from tests.test_docs import Block, blocks
from tests.tiny import FEW_STEPS, arguments

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
TEXT = README.read_text(encoding="utf-8")
RESULTS = REPOSITORY / "docs" / "results"
OFFLOADED = {"train.engine": "zero3", "train.offload_shards": True}


def table(first_cell: str, text: str = TEXT, column: str = "") -> list[list[str]]:
    """Return the cells, without bold type, of each row of the first table whose heading begins with
    `first_cell` and names `column`."""
    heading = rf"^\| {re.escape(first_cell)} \|.*{re.escape(column)}.*\n\|---.*\n((?:\|.*\n)+)"
    rows = re.findall(heading, text, re.M)[0]
    return [
        [cell.strip().replace("**", "") for cell in row.strip("|").split(" | ")]
        for row in rows.splitlines()
    ]


def measured(name: str) -> Any:
    return json.loads((REPOSITORY / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def planned(name: str, ranks: int, gigabytes: float, **settings: Any) -> str:
    """Return what `sage-fast train NAME --dry-run` prints of memory and time."""
    config = load(REPOSITORY / "configs" / f"{name}.yaml", overlays=[settings])
    heldout = len(read_prompts(config.data.eval_prompts))
    evaluation = dataclasses.replace(config.eval, num_prompts=min(heldout, config.eval.num_prompts))
    config = dataclasses.replace(config, eval=evaluation)
    sizes = reward_sizes(config.named_rewards)
    return format_plan(plan(config, ranks=ranks, gpu_memory=1e9 * gigabytes, rewards=sizes))


def between(text: str, line: str) -> str:
    """Return the two last cells of a line of a plan as a range: `5.91 to 7.79 min`."""
    (found,) = re.findall(rf"^  {line}  .*(?<! GiB)$", text, re.M)
    if not found.endswith(("min", "h", "days")):  # GPU-hours, in the last two columns
        least, most = found.split()[-2:]
        return f"{least} to {most}"
    least, unit, most, same_unit = found.split()[-4:]
    assert unit == same_unit
    return f"{least} to {most} {unit}"


def gibibytes(text: str, line: str) -> str:
    (size,) = re.findall(rf"^  {line} +([\d.]+) GiB$", text, re.M)
    return f"{float(size):.1f}"


def row_of(rows: Any, **cells: Any) -> Any:
    (found,) = (row for row in rows if cells.items() <= row.items())
    return found


def work_of(name: str) -> str:
    """Return what an iteration of a configuration has, as the table says it."""
    config = load(REPOSITORY / "configs" / f"{name}.yaml")
    frames, steps = config.sampling.num_frames, config.sampling.steps
    trained = config.sampling.sde_window or steps
    return f"{config.train.samples} videos of {frames} frames, {trained} of {steps} steps trained"


@pytest.mark.parametrize("row", table("GPUs"), ids=lambda row: f"{row[0]} {row[1]}")
def test_a_row_of_the_plan_is_planned(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    gpus, name, trains, work, memory, iteration, whole_run, hours = row
    ranks, gigabytes = re.fullmatch(r"(\d+) x (\d+) GB", gpus).groups()  # type: ignore[union-attr]
    text = planned(name.strip("`"), int(ranks), float(gigabytes))
    together = gibibytes(text, "together")
    assert f"{trains.split(', ')[1]} = " in text
    assert work == work_of(name.strip("`"))
    assert re.search(rf"^  fits: .* GiB of a card of {gigabytes} GB$", text, re.M)
    assert memory == f"{together} GiB"
    assert iteration == between(text, "together")
    assert "the run: 200 iterations" in text
    assert whole_run == between(text, "all of the run")
    assert hours == between(text, "GPU-hours")


def test_the_host_memory_of_a_small_card_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (paragraph,) = re.findall(r"^On a card of 24 GB .*?\n\n", TEXT, re.M | re.S)
    (host,) = re.findall(r"([\d.]+)\s+GiB", paragraph)
    streamed = planned("hunyuanvideo15-24gb", 1, 24)
    assert host == gibibytes(streamed, "host memory of each rank, for blocks and what is parked")


def test_times_of_the_model_are_those_measured() -> None:
    result = measured("2026-11-27-h200-rollout-480p.json")
    forward, trained, _ = table("one video")
    paths = ("eager", "eager cudnn", "tuned compiled", "stock")
    for cells, part in ((forward, "forward"), (trained, "train")):
        row = row_of(result["rows"], size="480p 81 frames", part=part, rounds=3)
        assert row["attention"] == "flash4"
        assert cells[1:] == [f"{row['seconds'][path]:.2f} s" for path in paths]


def test_times_of_the_kernels_are_those_measured() -> None:
    rows = measured("2026-11-25-h100-operators.json")["rows"]
    for first, *cells in table("kernel"):
        operator = re.findall(r"`(\w+)`", first)[0]
        seconds = row_of(rows, operator=operator, size="720p batch 4")["seconds"]
        paths = (seconds[path]["p50"] for path in ("fused", "compiled", "eager"))
        assert cells == [f"{1e6 * value:.0f} us" for value in paths]


def test_the_iteration_is_of_the_demo_and_the_profile_of_the_shipped_configuration() -> None:
    """tests/test_claims.py has the numbers of this section."""
    *_, iteration = table("other measurements")
    (file,) = re.findall(r"benchmarks/results/([\w.-]+\.json)", iteration[3])
    assert measured(file)["source"] == "configs/demo.yaml"
    profiled = measured("2026-11-27-h200-iteration.json")
    assert profiled["source"] == "configs/hunyuanvideo15-480p.yaml"
    steps = load(REPOSITORY / profiled["source"]).sampling.steps
    assert f"a sample of `hunyuanvideo15-480p` has {steps} of them" in TEXT
    assert profiled["settings"]["sampling.steps"] == "3"
    assert profiled["settings"]["train.group_size"] == "2"
    assert profiled["settings"]["train.prompts_per_iteration"] == "1"
    assert "an iteration of 2 samples and 3 steps" in TEXT


def ends_of(runs: list[dict[str, str]], score: str) -> list[str]:
    """Return the means of a score before and after, as a table has them."""
    return [
        f"{statistics.fmean(float(run[f'{score} {end}']) for run in runs):.3f}"
        for end in ("before", "after")
    ]


def runs_of(claim: str) -> list[dict[str, str]]:
    with (RESULTS / f"{claim}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_gains_of_each_word_are_those_of_the_demo_s_study() -> None:
    page = (RESULTS / "demo.md").read_text(encoding="utf-8")
    runs = runs_of("demo-words")
    assert len(runs) == 10
    studied = {cells[0]: cells[1:] for cells in table("score", page)}
    shown = {cells[0]: cells[1:] for cells in table("SAGE-GRPO")}
    for name, cells in shown.items():
        score = name.removeprefix("judge: ").replace("colour", "color")
        most, before, after, gain, interval, seeds, *_ = studied.pop(score)
        assert [before, after] == ends_of(runs, score)
        assert cells == [most, before, after, f"{gain} {interval}"]
        assert int(seeds) == len(runs)
    assert not studied
    reaching = [name.removeprefix("judge: ") for name, cells in shown.items() if "[-" in cells[-1]]
    assert f"For {' and '.join(reaching)} the interval still includes 0" in " ".join(TEXT.split())


def test_the_pictured_run_is_compared_with_those_of_the_study() -> None:
    picture = measured("2026-11-29-cpu-demo-picture.json")
    gained = [
        float(run["reward after"]) - float(run["reward before"]) for run in runs_of("demo-words")
    ]
    pictured = picture["after"] - picture["before"]
    assert pictured > max(gained)
    ends = f"({min(gained):.3f} to {max(gained):.3f})"
    words = f"It gains {pictured:.3f}, more than each of the ten runs above {ends}"
    assert words in " ".join(TEXT.split())


def test_gains_of_the_two_methods_are_those_of_the_demo_s_study() -> None:
    page = (RESULTS / "demo.md").read_text(encoding="utf-8")
    runs = runs_of("demo-gain")
    studied = {cells[0].strip("`"): cells for cells in table("configuration", page)}
    for name, cells in zip(("demo", "demo-nft"), table("method"), strict=True):
        made = [run for run in runs if run["configuration"] == name]
        assert len(made) == 10
        gain, interval, judge, of_judge = studied[name][4:8]
        assert cells[1:3] == studied[name][2:4] == ends_of(made, "reward")
        assert cells[3:] == [f"{gain} {interval}", f"{judge} {of_judge}"]
    value, low, high = re.findall(
        r"The difference of the gains is -(\S+) \[-(\S+), -(\S+)\]; DiffusionNFT ends ahead on "
        r"10 of 10 seeds",
        page,
    )[0]
    ahead = f"DiffusionNFT ends ahead on each of the ten seeds, by {value} [{high}, {low}]"
    assert ahead in " ".join(TEXT.split())


def test_gains_of_the_race_are_those_of_its_study() -> None:
    page = (RESULTS / "race.md").read_text(encoding="utf-8")
    reference, *rows = table("method", column="compute at 8.3 B")
    for (_, gain, compute), recipe in zip(rows, ("sage_best", "nft_full"), strict=True):
        # the first world's comes first on the page
        found = re.findall(rf"{recipe} ends (\S+ \[[^]]+\]) above paper on 10 seeds(.*)", page)[0]
        assert gain == found[0]
        spent = re.findall(r"for (\d+\.\d) exaFLOPs against \S+ \[[^]]+\] for (\d+\.\d)", found[1])[
            0
        ]
        assert (compute, reference[2]) == spent


def test_claims_of_the_paper_are_counted_as_on_their_page() -> None:
    page = (RESULTS / "paper.md").read_text(encoding="utf-8")
    held, of, not_held, open_ = re.findall(
        r"## Claims of the paper\n\n(\d+) of (\d+) held, (\d+) not held, (\d+) not decidable", page
    )[0]
    assert of == "10"
    words = "ten claims of the paper on that earlier model"
    counts = f"{held} held, {not_held} did not hold, and {open_} could not be decided"
    assert f"{words}: {counts}" in " ".join(TEXT.split())


def test_the_first_picture_leaves_room_for_text() -> None:
    """A picture is at most 420 pixels high."""
    from PIL import Image

    shown = re.findall(r'<img src="([^"]+)" width="(\d+)"', TEXT)
    assert len(shown) == TEXT.count("<img ")
    for file, width in shown:
        with Image.open(REPOSITORY / file) as picture:
            assert int(width) * picture.height / picture.width <= 420, file


def test_the_python_example_trains_on_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run it in a folder of `sage-fast init`, with few steps."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    settings = Path("config.yaml")
    few = [*FEW_STEPS, *arguments(train__prompts_per_iteration=2, train__group_size=2)]
    overlay = {name.removeprefix("--"): yaml.safe_load(value) for name, value in pairs(few)}
    small = load(settings, overlays=[overlay])
    sections = {
        name: dataclasses.asdict(getattr(small, name)) for name in ("sampling", "train", "eval")
    }
    (section,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.M | re.S)
    tree = yaml.safe_load(settings.read_text(encoding="utf-8")) | sections
    tree |= yaml.safe_load(section)
    settings.write_text(yaml.safe_dump(tree), encoding="utf-8")

    reward, example = python_blocks()
    Path("my_rewards.py").write_text(reward.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))  # where a script of one's own is
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(reward.text, str(reward), "exec"), names)
    exec(compile(example.text, str(example), "exec"), names)
    assert names["run"].config.reward.weights == {"bright": 1.0}
    assert Path("runs/second/weights").is_dir()


def pairs(options: list[str]) -> list[tuple[str, str]]:
    return list(zip(options[::2], options[1::2], strict=True))


def python_blocks() -> list[Block]:
    """Return the reward's block and that of the Python API."""
    found = [block for block in blocks(README) if block.kind == "python"]
    return [block for block in found if block.key != "needs"]
