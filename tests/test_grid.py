"""`python -m studies.grid`: the cells of a file, runs that are stopped and go on, a broken one, the
Slurm array."""

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

import sage_fast.report.page  # noqa: F401  for conftest.py, which leaves out the charts
from sage_fast.cli import main as sage_fast_main
from sage_fast.config.fields import settings_of
from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics
from studies import grid
from studies.grid import is_finished, main, read_grid
from tests.test_cluster import RECORDER, SCANCEL, SCONTROL, SRUN
from tests.test_docs import blocks, commands
from tests.waits import HANG, wait_until

pytestmark = pytest.mark.soak

REPOSITORY = Path(__file__).parent.parent
PAPER = REPOSITORY / "studies" / "paper" / "table2.yaml"
TINY: dict[str, Any] = {
    "base": str(REPOSITORY / "configs" / "recipes" / "paper.yaml"),
    "sampling": {"num_frames": 5, "steps": 2},
    "train": {"iterations": 500, "prompts_per_iteration": 2, "group_size": 2, "optimizer_steps": 1,
              "checkpoint_interval": 1, "parity_gate": False},
    "eval": {"steps": 1, "num_prompts": 5, "seeds_per_prompt": 1, "num_videos": 1, "interval": 0},
    "tracking": {"trackers": []},
}  # fmt: skip
TWO_BY_TWO = {
    "base": "tiny.yaml",
    "output": "runs/g",
    "axes": {
        "method": {
            "flow": {"sampling": {"sampler": "flow"}},
            "exact": {"sampling": {"sampler": "precise"}},
        },
        "reward": {"good": None, "broken": {"reward": {"weights": {"no_such_part": 1.0}}}},
    },
}
NAMES = ["flow-good", "flow-broken", "exact-good", "exact-broken"]


def write(folder: Path, tree: Any, name: str = "grid.yaml") -> Path:
    (folder / name).write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder / name


# -- the file --------------------------------------------------------------------------------------


def test_the_grid_of_the_paper() -> None:
    """Methods x KL x rewards, each cell with what its names say, and everything else as in the
    base."""
    cells = read_grid(PAPER, {"train.iterations": "7"})
    axes = (("dance", "flow", "cps", "sage", "precise"), ("none", "fixed", "dual"), ("A", "B"))
    assert list(cells) == [f"{'-'.join(names)}-seed0" for names in itertools.product(*axes)]
    weights = {"A": {"vq": 1.0, "mq": 1.0, "ta": 1.0}, "B": {"vq": 0.5, "mq": 0.5, "ta": 1.0}}
    for name, config in cells.items():
        method, kl, reward, _ = name.split("-")
        assert (config.sampling.sampler, config.kl.strategy, config.reward.weights) == (
            method,
            kl,
            weights[reward],
        )
        assert config.objective.equalizer == (method in ("sage", "precise"))
        assert config.objective.surrogate == ("log_prob" if config.objective.equalizer else "clip")
        assert (config.objective.log_prob == "unscaled") == (method == "cps")
        assert (config.train.iterations, config.eval.steps) == (7, 40)
        assert config.output == f"runs/paper-grid/{name}"
    sage = cells["sage-dual-B-seed0"]
    paper = load(REPOSITORY / "configs" / "paper-480p.yaml")
    unlike = [key for key in settings_of(Config) if attrgetter(key)(sage) != attrgetter(key)(paper)]
    assert unlike == ["output", "train.iterations"]


def test_seeds_and_the_folder(tmp_path: Path) -> None:
    write(tmp_path, TINY, "tiny.yaml")
    file = write(tmp_path, TWO_BY_TWO | {"seeds": [3, 5]})
    cells = read_grid(file, {"output": "elsewhere"})
    assert list(cells)[:2] == ["flow-good-seed3", "flow-good-seed5"]
    assert [config.seed for config in cells.values()][:2] == [3, 5]
    assert cells["flow-good-seed3"].output == "elsewhere/flow-good-seed3"


@pytest.mark.parametrize(
    ("changes", "overrides", "expected"),
    [
        (
            {"axis": {}},
            {},
            "unknown key 'axis'; expected one of base, output, seeds, axes; did you mean 'axes'?",
        ),
        ({"base": None}, {}, "base = None: expected a YAML file"),
        ({"base": "none.yaml"}, {}, "flow-good: config .*none.yaml: no such file"),
        ({"output": 3}, {}, "output = 3: expected a folder"),
        ({"seeds": [1, 1]}, {}, r"seeds = \[1, 1\]: expected a list of different whole numbers"),
        ({"seeds": ["x"]}, {}, r"flow-good-seedx: seed = 'x': expected a whole number"),
        ({"axes": {}}, {}, "axes: expected axes of named settings"),
        ({"axes": {"a": {"one": 3}}}, {}, r"axes.a.one = 3: expected settings"),
        ({"axes": {"a": {False: {}}}}, {}, r"axes.a: False: expected a name"),
        ({"axes": {"a": {"../x": {}}}}, {}, r"axes.a: '../x': expected a name"),
        ({"axes": {"a": {"b-c": {}}}}, {}, r"axes.a: 'b-c': expected a name"),
        ({"axes": {"a": {"x": {"samplng": {"eta": 1}}}}}, {}, r"x: unknown setting 'samplng"),
        (
            {"axes": {"a": {"x": {"seed": 1}}}, "seeds": [1]},
            {},
            "seed is set by axis a and by axis seeds",
        ),
        ({"axes": {"a": {"x": {"output": "y"}}}}, {}, "output is set by the grid and by axis a"),
        ({}, {"sampling.sampler": "cps"}, "--sampling.sampler: axis method of .* sets it"),
        ({}, {"sampling.eta": "-1"}, "flow-good: sampling.eta = -1"),
    ],
)
def test_a_broken_grid_is_named(
    changes: Any, overrides: dict[str, str], expected: str, tmp_path: Path
) -> None:
    write(tmp_path, TINY, "tiny.yaml")
    file = write(tmp_path, TWO_BY_TWO | changes)
    with pytest.raises(UserError, match=expected):
        read_grid(file, overrides)


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, TINY, "tiny.yaml")
    file = str(write(tmp_path, TWO_BY_TWO))
    assert main([file, "--cell", "flow-god"]) == 2
    assert "did you mean 'flow-good'?" in capsys.readouterr().err
    assert main([file, "--gpus", "0"]) == 2
    assert "--gpus 0: expected at least 1" in capsys.readouterr().err


# -- runs ------------------------------------------------------------------------------------------


def run_here(
    cells: list[str],
) -> Callable[[Iterable[tuple[str, Sequence[str]]], Callable[[str, int], object]], None]:
    """Return a `run_many` that runs the commands in this process and adds their names to
    `cells`."""

    def run(jobs: Iterable[tuple[str, Sequence[str]]], ended: Callable[[str, int], object]) -> None:
        for name, command in jobs:
            assert command[:3] == [sys.executable, "-m", "studies.grid"]
            cells.append(name)
            ended(name, main(command[3:]))

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A 2 x 2 grid, stopped within the first run, gone on with, and run once more; half of its
    cells are broken."""
    folder = tmp_path_factory.mktemp("grid")
    write(folder, TINY, "tiny.yaml")
    file = write(folder, TWO_BY_TWO)
    first = folder / "runs" / "g" / NAMES[0]
    found: dict[str, Any] = {"folder": folder}
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "studies.grid", "grid.yaml"], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_until(
        lambda: process.poll() is not None or len(read_metrics(first / "metrics.jsonl")) >= 2
    )
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    found["stopped"] = process.communicate(timeout=300)[0], process.returncode
    found["done"] = len(read_metrics(first / "metrics.jsonl"))
    write(folder, TINY | {"train": TINY["train"] | {"iterations": found["done"] + 1}}, "tiny.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("second", "third"):
            cells: list[str] = []
            patch.setattr(grid, "run_many", run_here(cells))
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                status = main([str(file), *(["--quiet"] if name == "second" else [])])
            found[name] = status, cells, errors.getvalue()
        yield found


def test_a_signal_stops_the_run_and_the_grid(place: dict[str, Any]) -> None:
    out, status = place["stopped"]
    assert status == 0, out  # as a run that a scheduler stops
    assert "run 1 of 4: flow-good" in out
    assert "continue with --resume" in out
    assert "run 2 of 4" not in out
    assert "are finished" not in out


def test_the_grid_goes_on_and_no_cell_ends_the_others(place: dict[str, Any]) -> None:
    status, cells, errors = place["second"]
    assert (status, cells) == (1, NAMES)
    folder = place["folder"] / "runs" / "g"
    for name in ("flow-good", "exact-good"):
        rows = read_metrics(folder / name / "metrics.jsonl")
        assert [row["iteration"] for row in rows] == list(range(place["done"] + 1))
    assert [
        start["iteration"] for start in read_json(folder / "flow-good" / "run.json")["resumed"]
    ] == [place["done"]]
    assert "no_such_part" in errors
    assert (folder / "flow-good" / "config.yaml").read_text().count("sampler: flow") == 1


def test_what_is_finished_is_left_alone(place: dict[str, Any]) -> None:
    assert place["third"][:2] == (1, ["flow-broken", "exact-broken"])


def test_a_damaged_run_is_not_finished(place: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(place["folder"], tmp_path / "copy")
    config = read_grid(tmp_path / "copy" / "grid.yaml", {})["flow-good"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "copy")
        Path(
            config.output, "report.html"
        ).unlink()  # drawing it may have failed: `sage-fast report` does it later
        assert is_finished(config)
        Path(config.output, "eval", "after.json").write_text("{")
        assert not is_finished(config)


def test_several_gpus_are_torchruns(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place["folder"])
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(
        grid, "run_many", lambda jobs, ended: commands.extend(command for _, command in jobs)
    )
    # no such setting: before any run
    assert main(["grid.yaml", "--gpus", "8", "--train.seed", "1"]) == 2
    assert main(["grid.yaml", "--gpus", "8", "--train.eps", "1e-9"]) == 0
    out = capsys.readouterr().out
    assert "\nrun 4 of 4: exact-broken\n" in out
    (line,) = [line for line in out.splitlines() if "are finished" in line]
    summary, _, command = line.partition("; to compare them: ")
    assert summary == "2 of 4 runs are finished"
    assert sage_fast_main(shlex.split(command)[1:]) == 0  # which has the table
    assert [command[-1] for command in commands] == ["flow-broken", "exact-broken"]
    python, *module = commands[0][:3]
    assert (python, module) == (sys.executable, ["-m", "torch.distributed.run"])
    options = get_args_parser().parse_args(commands[0][3:])
    assert (options.nproc_per_node, options.module, options.training_script) == (
        "8",
        True,
        "studies.grid",
    )
    assert options.training_script_args == [
        "grid.yaml",
        "--train.eps",
        "1e-9",
        "--cell",
        "flow-broken",
    ]


def test_the_commands_of_the_page(
    place: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(shutil.copytree(place["folder"], tmp_path / "copy"))
    monkeypatch.setattr(grid, "run_many", lambda jobs, ended: None)
    here, paper = blocks(REPOSITORY / "docs" / "how-to" / "grid.md")
    for words in [*commands(here), *commands(paper)]:
        assert words[:3] == ["python", "-m", "studies.grid"]
        assert main([str(REPOSITORY / word) if "/" in word else word for word in words[3:]]) == 0, (
            words
        )
    assert "paper.sbatch: 30 runs; submit it here" in capsys.readouterr().out


# -- Slurm -----------------------------------------------------------------------------------------


def test_an_element_of_the_array_is_a_run(
    place: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script that is written passes shellcheck; under a pretend Slurm each task starts the
    command of its cell."""
    folder = shutil.copytree(place["folder"], tmp_path / "a copy")
    monkeypatch.chdir(folder)
    given = ["grid.yaml", "--train.learning_rate", "2e-3", "--output", "runs/more of it"]
    assert main([*given, "--slurm", "array.sbatch", "--gpus", "2"]) == 0
    text = Path("array.sbatch").read_text()
    assert "#SBATCH --array=0-3\n" in text
    assert text.count("per-node=2\n") == 2
    assert re.findall(r"@[A-Z]+@", text) == []
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is not None:
        done = subprocess.run([program, "array.sbatch"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    (folder / "bin").mkdir()
    for name, program_text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "scancel": SCANCEL,
        "recorder": RECORDER,
    }.items():
        (folder / "bin" / name).write_text(program_text)
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "70123", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NTASKS": "2",
             "SLURM_NTASKS_PER_NODE": "2", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "1",
             "PYTHON": "recorder",
             "SCONTROL_LOG": str(folder / "scontrol.log"),
             "PATH": f"{folder}/bin:{os.environ['PATH']}"}  # fmt: skip
    process = subprocess.Popen(["bash", "array.sbatch"], env=os.environ | slurm | {"WAITS": "600"})
    wait_until(
        lambda: (
            process.poll() is not None or all(Path(f"started.{rank}").exists() for rank in range(2))
        )
    )
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)  # the time limit
    assert process.wait(HANG) == 0
    assert Path("scontrol.log").read_text() == "requeue 70123\n"
    started = Path("started.0").read_text().splitlines()
    assert started[0].startswith("0/2 0/2 127.0.0.1:")
    assert started[1:3] == ["-m", "studies.grid"]
    file, *settings = given
    assert started[3:-1] == [
        file,
        "--train.grace_seconds",
        "1700",
        *settings,
        "--cell",
        "exact-good",
    ]
    assert started[-1] == "TERM"
    # What the task would have done, on one rank.
    capsys.readouterr()
    assert main([*started[3:-1], "--output", str(place["folder"] / "runs" / "g")]) == 0
    assert capsys.readouterr() == ("", "")  # it was finished
    assert main([*started[3:-1], "--output", "runs/new"]) == 0
    assert is_finished(read_grid(Path("grid.yaml"), {"output": "runs/new"})["exact-good"])
