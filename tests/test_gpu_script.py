"""scripts/gpu.sh rehearsed: the same script and parts at sizes for a CPU, in a copy of the checkout.

The tests run the calls on the pages, `scripts/gpu.sh wheels` and `scripts/gpu.sh --seconds`.
"""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest

from sage_fast import cli
from sage_fast.config.command_line import split_settings
from sage_fast.config.loader import load
from sage_fast.rewards.load import load_reward
from sage_fast.util.files import read_metrics

REPOSITORY = Path(__file__).parent.parent
PARTS = ["install", "tests", "doctor", "sanitizer", "memcheck", "racecheck", "ncu-block", "rollout", "operators"]
PARTS += ["rollout-480p", "full", "nft", "iteration", "engines", "testbed", "nft-zero3", "testbed-bf16", "decode-480p"]
PARTS += ["variables", "ncu-step"]
PROFILES = ["iteration", "full", "nft", "nft-zero3"]
LONGER = ["doctor", "tests", "operators", "rollout-480p", *PROFILES, "engines", "testbed", "testbed-bf16",
          "decode-480p", "variables", "racecheck", "rollout", "ncu-block"]  # fmt: skip
"""Parts that other tests run too, that differ from a rehearsed one in a word, or that start three processes: rehearsed
by `make soak`."""
REHEARSED = PARTS if "SAGE_FAST_SOAK" in os.environ else [part for part in PARTS if part not in LONGER]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Prints its arguments and runs the program that follows its options.
PRETEND_SANITIZER = """#!/bin/bash
echo "compute-sanitizer $*, caching ${PYTORCH_NO_CUDA_MEMORY_CACHING-on}"
while [[ $1 == --* ]]; do [[ $1 == --*-* || $1 == --tool || $1 == --padding ]] && shift; shift; done
exec "$@"
"""
# Copies the operators that this checkout has built: the rehearsal is not about compiling.
CACHED_COMPILER = """#!/bin/bash
for ((i = 1; i <= $#; i++)); do
    [[ ${!i} == -MF ]] && { j=$((i + 1)); : > "${!j}"; }
    [[ ${!i} == -o ]] && { j=$((i + 1)); target=${!j}; }
done
[[ -z ${target-} ]] && exec c++ "$@"
cp "$BUILT" "$target"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the checkout and a wheel of a package that the machine lacks."""
    folder = tmp_path_factory.mktemp("machine")
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__", "wheels")
    shutil.copytree(REPOSITORY, folder / "checkout", ignore=ignored)
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / "wheels" / "rehearsed-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("rehearsed.py", "WHERE = __file__\n")
        wheel.writestr("rehearsed-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: rehearsed\nVersion: 1.0\n")
        wheel.writestr(
            "rehearsed-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("rehearsed-1.0.dist-info/RECORD", "")
    for name, text in {"c++": CACHED_COMPILER, "bin/compute-sanitizer": PRETEND_SANITIZER}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def gpu(machine: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"PYTHON": sys.executable, "GPU_VENV": str(machine / "venv"), "OMP_NUM_THREADS": "1"}
    variables |= {"COMMIT": COMMIT, "PATH": f"{machine / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(machine / "checkout" / "scripts" / "gpu.sh"), *arguments],
        cwd=machine, env=variables | environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip


def table(machine: Path) -> dict[str, str]:
    """Map each part to its verdict."""
    lines = (machine / "out" / "table.txt").read_text().splitlines()[1:]
    found = (re.match(r"(\S+)\s+(ok|failed|timed out|skipped|not run)", line) for line in lines)
    return {row[1]: row[2] for row in found if row}


@pytest.fixture(scope="module")
def rehearsed(machine: Path) -> Path:
    """Run all parts in two calls, as on a machine; return the output folder."""
    compiler = str(machine / "c++")
    built = next((REPOSITORY / "sage_fast").glob("_C.*so"), None)
    if built is None:
        pytest.skip("the C++ operators are not built")
    first = gpu(machine, "--tiny", "wheels", "out", "install", CXX=compiler, CC=compiler, BUILT=str(built))
    assert first.returncode == 0, (machine / "out" / "install.log").read_text()[-3000:]
    done = gpu(machine, "--tiny", "wheels", "out", *REHEARSED[1:])
    logs = {part: (machine / "out" / f"{part}.log").read_text()[-1500:] for part in REHEARSED}
    verdicts = {part: verdict for part, verdict in table(machine).items() if verdict != "not run"}
    assert verdicts == dict.fromkeys(REHEARSED, "ok"), "\n".join(
        f"== {part}\n{logs[part]}" for part, verdict in verdicts.items() if verdict != "ok"
    )
    assert done.returncode == 0
    return machine / "out"


def test_every_part_runs_and_leaves_its_numbers(rehearsed: Path) -> None:
    leave = {"doctor": "doctor.json", "operators": "operators.json", "rollout": "rollout.json",
             "rollout-480p": "rollout-480p.json", "decode-480p": "decode-480p.json",
             **{part: f"{part}/profile.json" for part in PROFILES}}  # fmt: skip
    for part in leave.keys() & set(REHEARSED):
        assert json.loads((rehearsed / leave[part]).read_text())["environment"]["commit"] == COMMIT
    if "doctor" in REHEARSED:
        doctor = json.loads((rehearsed / "doctor.json").read_text())
        assert not [check for check in doctor["checks"] if check["verdict"] == "wrong"]
    if "engines" in REHEARSED:
        engines = (rehearsed / "engines.log").read_text()
        assert (
            len(re.findall(r"^iteration [01], (?:reward/mean|grad_norm) of plain, zero2, zero3: ", engines, re.M)) == 4
        )
    for part in {"testbed", "testbed-bf16"} & set(REHEARSED):
        assert json.loads((rehearsed / part / "run.json").read_text())["commit"] == COMMIT
        assert len(read_metrics(rehearsed / part / "metrics.jsonl")) == 1
    if "rollout-480p" in REHEARSED:
        rows = {
            part: json.loads((rehearsed / leave[part]).read_text())["rows"] for part in ("rollout-480p", "decode-480p")
        }
        assert [row["part"] for row in rows["rollout-480p"]] == ["forward", "step", "train"]
        assert [list(row["seconds"]) for row in rows["decode-480p"]] == [["contiguous", "channels last"]]
    for tool in {"memcheck", "racecheck"} & set(REHEARSED):
        log = (rehearsed / f"{tool}.log").read_text()
        assert re.match(rf"compute-sanitizer --tool {tool} .*caching 1\n", log)
    for part in {"sanitizer", "memcheck", "racecheck"} & set(REHEARSED):
        assert "100%" in (rehearsed / f"{part}.log").read_text()
    if "variables" in REHEARSED:
        variables = (rehearsed / "variables.log").read_text()
        assert re.findall(r"^with (.*)$", variables, re.M) == [
            "neither",
            "TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1",
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
        ]
        assert len(re.findall(r" tokens: first \d+ ms, again \d+ ms$", variables, re.M)) == 6
    assert "transition_step of" in (rehearsed / "ncu-step.log").read_text()
    if "ncu-block" in REHEARSED:
        assert "two blocks of" in (rehearsed / "ncu-block.log").read_text()
    if "tests" in REHEARSED:
        assert "passed" in (rehearsed / "tests.log").read_text()


def test_all_results_are_one_file_of_a_size_that_travels(rehearsed: Path, machine: Path) -> None:
    """If all results are too much, the largest file is left out and named. The part in this call has nothing to do."""
    with tarfile.open(rehearsed / "results.tar.gz") as packed:
        names = set(packed.getnames())
    assert {"table.txt", "status.tsv", *(f"{part}.log" for part in REHEARSED)} <= names
    large = rehearsed / "of a profiler.ncu-rep"
    large.write_bytes(os.urandom(17 * 2**20))
    done = gpu(machine, "--tiny", "wheels", "out", "memcheck", PATH=os.environ["PATH"])
    large.unlink()
    assert done.returncode == 0
    assert "left out of results.tar.gz, which has room for 16 MiB: of a profiler.ncu-rep" in done.stdout
    with tarfile.open(rehearsed / "results.tar.gz") as packed:
        assert set(packed.getnames()) == names


def test_without_compute_sanitizer_its_parts_say_so(rehearsed: Path, machine: Path) -> None:
    done = gpu(machine, "--tiny", "wheels", "out", "memcheck", PATH=os.environ["PATH"])
    assert done.returncode == 0
    assert re.search(r"^memcheck +ok +\d+  compute-sanitizer is not on the PATH: skipped$", done.stdout, re.M)


def test_a_sanitizer_that_finds_something_fails_its_part(rehearsed: Path, machine: Path) -> None:
    """The planted mistake, key material that overflows, shows nowhere else."""
    kernel = machine / "checkout" / "kernels" / "common.py"
    text = kernel.read_text()
    wrong = text.replace("tl.add(k0, 0x9E3779B9, sanitize_overflow=False)", "k0 + 0x9E3779B9")
    assert wrong != text
    kernel.write_text(wrong)
    try:
        done = gpu(machine, "--tiny", "wheels", "out", "sanitizer", "memcheck", PATH=os.environ["PATH"])
    finally:
        kernel.write_text(text)
    assert done.returncode == 1
    verdicts = table(machine)
    assert (verdicts["sanitizer"], verdicts["memcheck"]) == ("failed", "ok")
    assert "overflow detected" in (machine / "out" / "sanitizer.log").read_text()


def test_the_machines_own_python_is_left_alone(rehearsed: Path, machine: Path) -> None:
    """Wheels and package go into the virtual environment, which also sees the machine's packages."""
    python = machine / "venv" / "bin" / "python"
    code = "import rehearsed, sage_fast, torch; print(rehearsed.WHERE, sage_fast.__file__, torch.__file__)"
    done = subprocess.run(
        [python, "-c", code], cwd="/", capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    wheel, package, torch = done.stdout.split()
    assert wheel.startswith(str(machine / "venv"))
    assert package == str(machine / "checkout" / "sage_fast" / "__init__.py")
    assert not torch.startswith(str(machine))
    with pytest.raises(ModuleNotFoundError):
        __import__("rehearsed")


@pytest.mark.soak
def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_next(rehearsed: Path, machine: Path) -> None:
    """One part has a broken configuration, one outlasts its call, and for one no time is left."""
    config = machine / "checkout" / "configs" / "recipes" / "paper.yaml"
    text = config.read_text()
    config.write_text("sampling: {stepps: 3}\n")
    try:
        done = gpu(machine, "--tiny", "wheels", "out", "15", "ncu-step")
    finally:
        config.write_text(text)
    assert done.returncode == 1
    verdicts = table(machine)
    assert (verdicts["testbed"], verdicts["ncu-step"], verdicts["operators"]) == ("failed", "ok", "ok")
    assert re.search(r"^testbed +failed .*unknown setting 'sampling.stepps'", done.stdout, re.M)
    done = gpu(machine, "--seconds", "16", "wheels", "out", "tests", "ncu-step")  # at a GPU's size, minutes each
    assert done.returncode == 1
    verdicts = table(machine)
    assert (verdicts["tests"], verdicts["ncu-step"]) == ("timed out", "skipped")


def test_what_is_asked_for_is_checked(machine: Path) -> None:
    for arguments, message in (
        (["wheels", "out", "docter"], "part 'docter': expected a number to 20 or one of install tests"),
        *((["wheels", "out", part], f"part '{part}'") for part in ("21", "0", "08", "021", "doctor tests", "")),
        (["nowhere", "out"], "WHEELS 'nowhere': no such folder"),
        (["--seconds", "soon", "wheels", "out"], "--seconds 'soon': expected a whole number"),
        (["--fast", "wheels", "out"], "unknown option --fast"),
        (["wheels"], "expected WHEELS OUT"),
        (["COMMIT=HEAD", "wheels", "out"], "COMMIT 'HEAD': expected a hash"),
    ):
        variables = dict(word.split("=") for word in arguments if "=" in word)
        done = gpu(machine, *(word for word in arguments if "=" not in word), **variables)
        assert done.returncode == 2
        assert message in done.stderr


def test_the_commands_of_a_gpu_are_ones_that_exist(machine: Path) -> None:
    """No rehearsal runs the full size: check that its options are known and that the page's calls fit 9 minutes."""
    done = gpu(machine, "--print", "wheels", "out")
    commands = {row.split("\t")[0]: row.rstrip("\t").split("\t")[1:] for row in done.stdout.splitlines()}
    assert list(commands) == PARTS
    for part in (
        "doctor",
        "operators",
        "rollout-480p",
        *PROFILES,
        "testbed",
        "testbed-bf16",
        "rollout",
        "decode-480p",
    ):
        _, _, package, *arguments = commands[part]
        assert package == "sage_fast"
        options, overrides = cli.parse(arguments)
        assert part in ("testbed", "testbed-bf16", *PROFILES) or not overrides
        if overrides:
            load_reward(load(REPOSITORY / options.config, overrides).reward)
    _, config, *arguments = commands["engines"]
    assert load(REPOSITORY / config, split_settings(arguments)[1]).model.tuning == "full"
    assert commands["racecheck"] == ["sanitizer_part", "racecheck", *commands["memcheck"][2:]]
    for name in itertools.chain(*commands.values()):
        assert not name.startswith("tests/") or (REPOSITORY / name).exists()


def test_an_error_of_the_stock_decode_costs_no_number(machine: Path) -> None:
    """At 480p it has tensors of more than 2^31 elements, so it runs on small rungs only, in a part of its own."""
    done = gpu(machine, "--print", "wheels", "out")
    commands = {row.split("\t")[0]: row.split("\t")[1:] for row in done.stdout.splitlines()}
    decodes = [part for part, words in commands.items() if "rollout" in words and {"decode", "stock"} <= {*words}]
    assert decodes == []
    assert "--part" not in commands["rollout"]
    ladder = commands["rollout-480p"]
    assert [ladder[i + 1] for i, word in enumerate(ladder) if word == "--part"] == ["forward", "step", "train"]
    assert [ladder[i + 1] for i, word in enumerate(ladder) if word == "--path"][1::2] == ["eager", "graphed"]


def test_the_calls_of_the_page_fit() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "first-gpu.md").read_text()
    rows = re.findall(r"^\| \d+ `[\w-]+` \| (\d+) s \|(?: (\d+) s)? \|", page, re.M)
    limits = dict(zip(PARTS, (int(limit) for limit, _ in rows), strict=True))
    new = [part for part, (_, took) in zip(PARTS, rows) if not took]
    script = (REPOSITORY / "scripts" / "gpu.sh").read_text()
    assert re.search(rf"^LIMITS=\({' '.join(map(str, limits.values()))}\)$", script, re.M)
    assert re.search(rf"^PARTS=\({' '.join(PARTS)}\)$", script, re.M)
    calls = re.findall(r"^scripts/gpu.sh --seconds 540 wheels runs/gpu (.+)$", page, re.M)
    assert all(sum(limits[part] for part in call.split()) <= 540 for call in calls)
    assert [part for call in calls for part in call.split()] == PARTS
    assert f"# everything, {math.ceil(sum(limits.values()) / 60)} minutes at most" in page
    first = [part for call in calls[:2] for part in call.split()]
    assert {*new} - {*first} == {"rollout"}
    assert sum(int(took or limit) for (limit, took), part in zip(rows, PARTS) if part in first) <= 15 * 60


@pytest.mark.parametrize(("norm", "status"), [(2.001, False), (2.1, True), (float("nan"), True)])
def test_engines_that_differ_fail_their_part(
    norm: float, status: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine, value in {"plain": 2.0, "zero2": 2.0, "zero3": norm}.items():
        (tmp_path / engine).mkdir()
        (tmp_path / engine / "metrics.jsonl").write_text(
            json.dumps({"iteration": 0, "reward/mean": -1.5, "grad_norm": value}) + "\n"
        )
    script = (REPOSITORY / "scripts" / "gpu.sh").read_text()
    (code,) = re.findall(r"^ENGINES_CODE='\n(.*?)'$", script, re.M | re.S)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        exec(code, {})
    assert ended.value.code is status


def test_the_wheels_hold_what_deepspeed_imports() -> None:
    """At any depth, but for what comes with the machine's torch and transformers; in the versions that are tested."""
    there = {"einops", "msgpack", "ninja", "numpy", "packaging", "psutil", "py-cpuinfo", "torch", "tqdm"}

    def name_of(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()

    wanted, todo = set[str](), ["deepspeed"]
    while todo:
        if (package := todo.pop()) not in wanted | there:
            wanted.add(package)
            todo += [name_of(line) for line in requires(package) or () if "extra ==" not in line]
    page = (REPOSITORY / "docs" / "how-to" / "first-gpu.md").read_text()
    pins = {name_of(name): version for name, version in re.findall(r"([\w-]+)==([\w.]+)", page)}
    tested = re.findall(r"^([\w-]+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.M)
    versions = {name_of(name): version for name, version in tested}
    assert {"pydantic-core", "hjson"} <= wanted
    assert {package: pins.get(package) for package in wanted} == {package: versions[package] for package in wanted}
