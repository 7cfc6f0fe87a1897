"""scripts/gpu.sh rehearsed: the same script and parts at sizes for a CPU, in a copy of the
checkout.

The tests run the calls on the pages: `scripts/gpu.sh wheels`, `scripts/gpu.sh --seconds`,
`scripts/gpu.sh --gpus`.
"""

import itertools
import json
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
from sage_fast.benchmarks import limits, operators, rung

from sage_fast import cli
from sage_fast.config.command_line import split_settings
from sage_fast.config.loader import load
from sage_fast.rewards.load import load_reward
from sage_fast.tools.operators import OPERATORS
from sage_fast.util.files import read_metrics
from scripts import gpu_predictions
from scripts.pack_wheels import pack

REPOSITORY = Path(__file__).parent.parent
PARTS = [
    "install",
    "rollout-480p",
    "tests",
    "ceiling",
    "attention",
    "adapter-rows",
    "doctor",
    "rollout",
    "decode-480p",
]
PARTS += ["iteration", "sanitizer", "memcheck", "racecheck", "rollout-9x30x52", "ncu-adapter-rows"]
PARTS += [
    "ncu-block",
    "operators",
    "full",
    "nft",
    "nft-zero3",
    "video-121",
    "engines",
    "testbed",
    "testbed-bf16",
]
PARTS += ["variables", "ncu-step"]
OF_SEVERAL = [
    "install",
    "collectives",
    "lora-alone",
    "lora",
    "zero3",
    "zero3-no-prefetch",
    "zero2",
    "sequence",
]
OF_SEVERAL += ["resume", "killed", "hybrid"]
PROFILES = ["iteration", "full", "nft", "nft-zero3"]
LIMITS = ["ceiling", "attention", "adapter-rows"]
ROLLOUTS = ["rollout", "rollout-480p", "decode-480p", "rollout-9x30x52", "video-121"]
SHORT = [
    "install",
    "ceiling",
    "attention",
    "decode-480p",
    "sanitizer",
    "memcheck",
    "ncu-adapter-rows",
    "ncu-step",
    "variables",
]
"""Parts that `make test-all` rehearses. Others are run by other tests too, differ from these in a
word, or start several processes: `make soak` rehearses all."""
REHEARSED = PARTS if "SAGE_FAST_SOAK" in os.environ else SHORT
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
        wheel.writestr(
            "rehearsed-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: rehearsed\nVersion: 1.0\n",
        )
        wheel.writestr(
            "rehearsed-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("rehearsed-1.0.dist-info/RECORD", "")
    pack(folder / "wheels" / "rehearsed-1.0-py3-none-any.whl")
    for name, text in {"c++": CACHED_COMPILER, "bin/compute-sanitizer": PRETEND_SANITIZER}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def gpu(machine: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {
        "PYTHON": sys.executable,
        "GPU_VENV": str(machine / "venv"),
        "OMP_NUM_THREADS": "1",
    }
    variables |= {"COMMIT": COMMIT, "PATH": f"{machine / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(machine / "checkout" / "scripts" / "gpu.sh"), *arguments],
        cwd=machine, env=variables | environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip


def table(out: Path) -> dict[str, str]:
    """Map each part to its verdict."""
    lines = (out / "table.txt").read_text().splitlines()[1:]
    found = (re.match(r"(\S+)\s+(ok|failed|timed out|skipped|not run)", line) for line in lines)
    return {row[1]: row[2] for row in found if row}


@pytest.fixture(scope="module")
def rehearsed(machine: Path) -> Path:
    """Run all parts in two calls, as on a machine; return the output folder."""
    compiler = str(machine / "c++")
    built = next((REPOSITORY / "sage_fast").glob("_C.*so"), None)
    if built is None:
        pytest.skip("the C++ operators are not built")
    first = gpu(
        machine, "--tiny", "wheels", "out", "install", CXX=compiler, CC=compiler, BUILT=str(built)
    )
    assert first.returncode == 0, (machine / "out" / "install.log").read_text()[-3000:]
    done = gpu(machine, "--tiny", "wheels", "out", *REHEARSED[1:])
    logs = {part: (machine / "out" / f"{part}.log").read_text()[-1500:] for part in REHEARSED}
    verdicts = {
        part: verdict for part, verdict in table(machine / "out").items() if verdict != "not run"
    }
    assert verdicts == dict.fromkeys(REHEARSED, "ok"), "\n".join(
        f"== {part}\n{logs[part]}" for part, verdict in verdicts.items() if verdict != "ok"
    )
    assert done.returncode == 0
    return machine / "out"


def test_every_part_runs_and_leaves_its_numbers(rehearsed: Path) -> None:
    leave = {
        part: f"{part}.json"
        for part in ("doctor", "operators", "ceiling", "attention", "adapter-rows", *ROLLOUTS)
    }
    leave |= {part: f"{part}/profile.json" for part in PROFILES}
    for part in leave.keys() & set(REHEARSED):
        assert json.loads((rehearsed / leave[part]).read_text())["environment"]["commit"] == COMMIT
    if "doctor" in REHEARSED:
        doctor = json.loads((rehearsed / "doctor.json").read_text())
        assert not [check for check in doctor["checks"] if check["verdict"] == "wrong"]
    if "engines" in REHEARSED:
        engines = (rehearsed / "engines.log").read_text()
        assert (
            len(
                re.findall(
                    r"^iteration [01], (?:reward/mean|grad_norm) of plain, zero2, zero3: ",
                    engines,
                    re.M,
                )
            )
            == 4
        )
    for part in {"testbed", "testbed-bf16"} & set(REHEARSED):
        assert json.loads((rehearsed / part / "run.json").read_text())["commit"] == COMMIT
        assert len(read_metrics(rehearsed / part / "metrics.jsonl")) == 1
    for part in {*ROLLOUTS} & set(REHEARSED):
        rows = json.loads((rehearsed / leave[part]).read_text())["rows"]
        found = {row["part"]: list(row["seconds"]) for row in rows}
        three = ["stock", "tuned", "eager"]
        compiled = ["tuned compiled", "tuned flash4 compiled"]
        six = ["stock", "stock flash3 compiled", "tuned", *compiled, "eager"]
        assert found == {
            "rollout": {"forward": three, "step": three, "rollout": three},
            "rollout-480p": {"forward": six, "train auto": ["eager"], "train full": six},
            "decode-480p": {"decode": ["contiguous", "channels last"]},
            "video-121": {"rollout": ["eager"], "decode": ["channels last"]},
        }.get(part, found)
    table = (rehearsed / "table.txt").read_text()
    assert re.search(r"^part +quantity +expected +measured$", table, re.M)
    assert re.search(r"^decode-480p +decode of a video, ms +not for this +[\d.]+$", table, re.M)
    assert re.search(
        r"^attention +FlashAttention 4 forward, TFLOP/s +not for this +absent$", table, re.M
    )
    if "adapter-rows" in REHEARSED:
        tiles = json.loads((rehearsed / "adapter-rows.json").read_text())["limits"]["adapter_rows"]
        assert all(
            len(row["seconds"]) == 2 + len(limits.TILES) and not row["problems"] for row in tiles
        )
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
    assert "adapter_rows of" in (rehearsed / "ncu-adapter-rows.log").read_text()
    if "ncu-block" in REHEARSED:
        assert "two blocks of" in (rehearsed / "ncu-block.log").read_text()
    if "tests" in REHEARSED:
        assert "passed" in (rehearsed / "tests.log").read_text()


def test_all_results_are_one_file_of_a_size_that_travels(rehearsed: Path, machine: Path) -> None:
    """If all results are too much, the largest file is left out and named.

    The part in this call has nothing to do.
    """
    with tarfile.open(rehearsed / "results.tar.gz") as packed:
        names = set(packed.getnames())
    assert {"table.txt", "status.tsv", *(f"{part}.log" for part in REHEARSED)} <= names
    large = rehearsed / "of a profiler.ncu-rep"
    large.write_bytes(os.urandom(17 * 2**20))
    done = gpu(machine, "--tiny", "wheels", "out", "memcheck", PATH=os.environ["PATH"])
    large.unlink()
    assert done.returncode == 0
    assert (
        "left out of results.tar.gz, which has room for 16 MiB: of a profiler.ncu-rep"
        in done.stdout
    )
    with tarfile.open(rehearsed / "results.tar.gz") as packed:
        assert set(packed.getnames()) == names


def test_without_compute_sanitizer_its_parts_say_so(rehearsed: Path, machine: Path) -> None:
    done = gpu(machine, "--tiny", "wheels", "out", "memcheck", PATH=os.environ["PATH"])
    assert done.returncode == 0
    assert re.search(
        r"^memcheck +ok +\d+  compute-sanitizer is not on the PATH: skipped$", done.stdout, re.M
    )


def test_a_sanitizer_that_finds_something_fails_its_part(rehearsed: Path, machine: Path) -> None:
    """The planted mistake, key material that overflows, shows nowhere else."""
    kernel = machine / "checkout" / "kernels" / "common.py"
    text = kernel.read_text()
    wrong = text.replace("tl.add(k0, 0x9E3779B9, sanitize_overflow=False)", "k0 + 0x9E3779B9")
    assert wrong != text
    kernel.write_text(wrong)
    try:
        done = gpu(
            machine, "--tiny", "wheels", "out", "sanitizer", "memcheck", PATH=os.environ["PATH"]
        )
    finally:
        kernel.write_text(text)
    assert done.returncode == 1
    verdicts = table(rehearsed)
    assert (verdicts["sanitizer"], verdicts["memcheck"]) == ("failed", "ok")
    assert "overflow detected" in (machine / "out" / "sanitizer.log").read_text()


def test_the_machines_own_python_is_left_alone(rehearsed: Path, machine: Path) -> None:
    """Wheels and package go into the virtual environment, which also sees the machine's
    packages."""
    python = machine / "venv" / "bin" / "python"
    code = (
        "import rehearsed, sage_fast, torch; print(rehearsed.WHERE, sage_fast.__file__, "
        "torch.__file__)"
    )
    done = subprocess.run(
        [python, "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    wheel, package, torch = done.stdout.split()
    assert wheel.startswith(str(machine / "venv"))
    assert package == str(machine / "checkout" / "sage_fast" / "__init__.py")
    assert not torch.startswith(str(machine))
    with pytest.raises(ModuleNotFoundError):
        __import__("rehearsed")


@pytest.mark.soak
def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_next(
    rehearsed: Path, machine: Path
) -> None:
    """One part has a broken configuration, one outlasts its call, and for one no time is left."""
    config = machine / "checkout" / "configs" / "recipes" / "paper.yaml"
    text = config.read_text()
    config.write_text("sampling: {stepps: 3}\n")
    try:
        done = gpu(machine, "--tiny", "wheels", "out", str(PARTS.index("testbed") + 1), "ncu-step")
    finally:
        config.write_text(text)
    assert done.returncode == 1
    verdicts = table(rehearsed)
    assert (verdicts["testbed"], verdicts["ncu-step"], verdicts["operators"]) == (
        "failed",
        "ok",
        "ok",
    )
    assert re.search(r"^testbed +failed .*unknown setting 'sampling.stepps'", done.stdout, re.M)
    # at a GPU's size, minutes each
    done = gpu(machine, "--seconds", "16", "wheels", "full", "tests", "ncu-step")
    assert done.returncode == 1
    verdicts = table(machine / "full")
    assert (verdicts["tests"], verdicts["ncu-step"]) == ("timed out", "skipped")


@pytest.mark.parametrize("first", ["tiny", "full"])
def test_a_rehearsal_and_a_measurement_do_not_share_a_folder(
    machine: Path, tmp_path: Path, first: str
) -> None:
    """The predictions beside one would be of the other. In one second no part starts."""
    options = {"tiny": ["--tiny"], "full": []}
    calls = {
        sizes: [*option, "--seconds", "1", "wheels", str(tmp_path), "doctor"]
        for sizes, option in options.items()
    }
    (second,) = calls.keys() - {first}
    assert gpu(machine, *calls[first]).returncode == 1
    status = (tmp_path / "status.tsv").read_text()
    assert "doctor\tskipped" in status
    refused = gpu(machine, *calls[second])
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        f"'{tmp_path}' holds {first} sizes, this call has {second} ones\n"
    )
    assert (tmp_path / "status.tsv").read_text() == status
    assert gpu(machine, *calls[first]).returncode == 1


def test_what_is_asked_for_is_checked(machine: Path) -> None:
    for arguments, message in (
        (
            ["wheels", "out", "docter"],
            "part 'docter': expected a number to 26 or one of install rollout-480p",
        ),
        *(
            (["wheels", "out", part], f"part '{part}'")
            for part in ("27", "0", "08", "021", "doctor tests", "")
        ),
        (["nowhere", "out"], "WHEELS 'nowhere': no such folder"),
        (["--seconds", "soon", "wheels", "out"], "--seconds 'soon': expected a whole number"),
        (["--gpus", "all", "wheels", "out"], "--gpus 'all': expected a whole number"),
        (
            ["--gpus", "8", "wheels", "out", "doctor"],
            "part 'doctor': expected a number to 11 or one of install coll",
        ),
        (["--fast", "wheels", "out"], "unknown option --fast"),
        (["wheels"], "expected WHEELS OUT"),
        (["COMMIT=HEAD", "wheels", "out"], "COMMIT 'HEAD': expected a hash"),
    ):
        variables = dict(word.split("=") for word in arguments if "=" in word)
        done = gpu(machine, *(word for word in arguments if "=" not in word), **variables)
        assert done.returncode == 2
        assert message in done.stderr


def test_the_commands_of_a_gpu_are_ones_that_exist(machine: Path) -> None:
    """No rehearsal runs the full size: check that its options, sizes, parts and paths are known."""
    done = gpu(machine, "--print", "wheels", "out")
    commands = {
        row.split("\t")[0]: row.rstrip("\t").split("\t")[1:] for row in done.stdout.splitlines()
    }
    assert list(commands) == PARTS
    for part in (
        "doctor",
        "ceiling",
        "attention",
        "adapter-rows",
        "operators",
        "testbed",
        "testbed-bf16",
        *ROLLOUTS,
        *PROFILES,
    ):
        _, _, package, *arguments = commands[part]
        assert package == "sage_fast"
        options, overrides = cli.parse(arguments)
        assert part in ("testbed", "testbed-bf16", *PROFILES) or not overrides
        if part in ROLLOUTS:
            assert {*options.size} <= rung.SIZES.keys()
            assert {*options.part} <= rung.PARTS.keys()
            assert {*options.path} <= {*rung.PATHS}
        if overrides:
            load_reward(load(REPOSITORY / options.config, overrides).reward)
    for operator in OPERATORS:
        assert operators.sizes_of(operator).keys() & {*commands["operators"]}, operator
    _, config, *arguments = commands["engines"]
    assert load(REPOSITORY / config, split_settings(arguments)[1]).model.tuning == "full"
    assert commands["racecheck"] == ["sanitizer_part", "racecheck"]
    for name in itertools.chain(*commands.values()):
        assert not name.startswith("tests/") or (REPOSITORY / name).exists()


def test_the_commands_of_several_gpus_are_ones_that_exist(machine: Path) -> None:
    done = gpu(machine, "--gpus", "8", "--print", "wheels", "out")
    commands = {
        row.split("\t")[0]: row.rstrip("\t").split("\t")[1:] for row in done.stdout.splitlines()
    }
    assert list(commands) == OF_SEVERAL
    for part in OF_SEVERAL[2:]:
        function, name, config, *arguments = commands[part]
        assert (function.endswith("_part"), name) == (True, part)
        settings = load(REPOSITORY / config, split_settings(arguments)[1])
        assert settings.train.samples == (2 if part == "lora-alone" else 16)
        assert settings.model.sequence_parallel == (8 if part == "sequence" else 1)


@pytest.mark.soak
def test_several_gpus_are_rehearsed_by_two_ranks_on_the_cpu(rehearsed: Path, machine: Path) -> None:
    done = gpu(machine, "--tiny", "--gpus", "2", "wheels", "several", *OF_SEVERAL[1:])
    logs = {part: (machine / "several" / f"{part}.log").read_text() for part in OF_SEVERAL[1:]}
    ends = "\n".join(f"== {part}\n{log[-1500:]}" for part, log in logs.items())
    assert done.returncode == 0, f"{done.stdout}\n{ends}"
    assert "all-gather of a block" in logs["collectives"]
    for part in ("lora-alone", "lora", "zero3", "zero3-no-prefetch", "zero2", "sequence", "hybrid"):
        assert json.loads(logs[part].splitlines()[-1])["iteration"] == 1
    assert "resumed after a killed rank" in logs["killed"]


def test_an_error_of_the_stock_decode_costs_no_number(machine: Path) -> None:
    """At 480p it has tensors of more than 2^31 elements, so no part runs it."""
    done = gpu(machine, "--print", "wheels", "out")
    commands = {row.split("\t")[0]: row.split("\t")[1:] for row in done.stdout.splitlines()}
    decodes = [
        part
        for part, words in commands.items()
        if "rollout" in words and {"decode", "stock"} <= {*words}
    ]
    assert decodes == []


def test_the_calls_of_the_page_fit() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "first-gpu.md").read_text()
    rows = re.findall(r"^\| \d+ `([\w-]+)` \| (\d+) s \| (?:`|the same of)", page, re.M)
    seconds = {part: int(limit) for part, limit in rows}
    assert list(seconds) == PARTS
    script = (REPOSITORY / "scripts" / "gpu.sh").read_text()
    assert re.search(rf"^LIMITS=\({' '.join(map(str, seconds.values()))}\)$", script, re.M)
    assert re.search(rf"^PARTS=\({' '.join(PARTS)}\)$", script, re.M)
    calls = re.findall(r"^scripts/gpu.sh --seconds 540 wheels runs/gpu (.+)$", page, re.M)
    assert all(sum(seconds[part] for part in call.split()) <= 540 for call in calls)
    assert [*{part: 0 for call in calls for part in call.split()}] == PARTS
    assert re.search(rf"^PARTS_OF_SEVERAL=\({' '.join(OF_SEVERAL)}\)$", script, re.M)


@pytest.mark.parametrize(
    ("device", "tiny", "expected"),
    [
        (
            "NVIDIA H100 80GB HBM3",
            False,
            f"{100 * operators.LEAST_SHARE['adapter_rows']:g} or more",
        ),
        ("NVIDIA H100 80GB HBM3", True, "not for this"),
        ("NVIDIA A100-SXM4-80GB", False, "not for this"),
        ("AMD EPYC", False, "not for this"),
    ],
)
def test_predictions_are_shown_beside_what_they_are_of(
    device: str, tiny: bool, expected: str, tmp_path: Path
) -> None:
    """The bar of `adapter_rows` is that of the benchmarks; a miss is named."""
    rows = [
        {
            "kind": kind,
            "seconds": {
                "copy": copy,
                "PyTorch": 7e-4,
                "32 x 64, 4 warps": 1e-3,
                "64 x 64, 4 warps": 5e-4,
            },
        }
        for kind, copy in (("GELU", 2e-4), ("backward of GELU", 4e-4))
    ]
    found = {"environment": {"device": device}, "limits": {"adapter_rows": rows}}
    (tmp_path / "adapter-rows.json").write_text(json.dumps(found))
    forward, plain, backward = (
        " ".join(line.split()) for line in gpu_predictions.lines(tmp_path, tiny)
    )
    miss = " missed" * (expected != "not for this")
    assert forward == f"adapter-rows adapter_rows with GELU, % of a copy {expected} 40{miss}"
    assert backward == f"adapter-rows its backward, % of a copy {expected} 80"
    assert plain.endswith(" 0.7")


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
    """At any depth, but for what comes with the machine's torch and transformers; in the versions
    that are tested."""
    there = {
        "einops",
        "msgpack",
        "ninja",
        "numpy",
        "packaging",
        "psutil",
        "py-cpuinfo",
        "torch",
        "tqdm",
    }

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
    assert {package: pins.get(package) for package in wanted} == {
        package: versions[package] for package in wanted
    }
