"""scripts/gpu.sh: its table of parts, its command line, and a rehearsal at sizes for a CPU, in a
copy of the checkout.

The tests run the calls on the pages: `scripts/gpu.sh wheels`, `scripts/gpu.sh --unknown`,
`scripts/gpu.sh --gpus`.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import psutil
import pytest
from sage_fast.benchmarks import operators, rung
from sage_fast.benchmarks.stock import register_attention
from torch import Tensor

from sage_fast import cli
from sage_fast.config.command_line import split_settings
from sage_fast.config.loader import load
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.rewards.load import load_reward
from sage_fast.tools.operators import OPERATORS
from sage_fast.util.environment import data_sheet_flops
from scripts import result_age
from scripts.gpu import __main__ as command
from scripts.gpu import page, run, wan
from scripts.gpu.flash4_package import gather_wheels
from scripts.gpu.kernel_tests import counts
from scripts.gpu.parts import (
    ASSUMED_TFLOPS,
    CALL_SECONDS,
    LOCAL,
    PARTS,
    PARTS_OF_SEVERAL,
    WAN_TFLOP,
    Call,
    Part,
    Prediction,
    in_calls,
    parts_for,
)
from scripts.gpu.predictions import predicted
from scripts.gpu.profiled import count_kernels
from scripts.gpu.run import Verdict, pack, run_part
from scripts.gpu.runs import agree
from scripts.pack_wheels import pack as pack_wheel
from tests.waits import wait_until

REPOSITORY = Path(__file__).parent.parent
NAMES = [part.name for part in PARTS]
SHORT = ["install", "eager-step", "streamed", "wan", "decode-480p", "consan", "memcheck"]
"""Parts that `make test-all` rehearses. `make soak` rehearses all."""
REHEARSED = NAMES if "SAGE_FAST_SOAK" in os.environ else SHORT
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
    pack_wheel(folder / "wheels" / "rehearsed-1.0-py3-none-any.whl")
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
        cwd=machine, env=variables | environment, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip


def table(out: Path) -> dict[str, str]:
    """Map each part to its verdict."""
    lines = (out / "table.txt").read_text().splitlines()[1:]
    found = (re.match(r"(\S+)\s+(ok|failed|timed out|skipped|not run)", line) for line in lines)
    return {row[1]: row[2] for row in found if row}


def call_in(folder: Path, **changes: Any) -> Call:
    facts: dict[str, Any] = {"python": sys.executable, "out": folder, "wheels": folder / "wheels"}
    return Call(**facts | {"scratch": folder / "scratch"} | changes)


def a_part(name: str, *words: str, **changes: Any) -> Part:
    """A part that runs a command of these words."""
    facts: dict[str, Any] = {"tells": "", "seconds": 60, "leaves": (f"{name}.json",)}
    return Part(name=name, command=lambda call: list(words), **facts | changes)


# -- the table -------------------------------------------------------------------------------------


def test_every_part_says_what_it_tells_what_it_leaves_and_what_is_expected() -> None:
    for parts in (PARTS, PARTS_OF_SEVERAL):
        names = [part.name for part in parts]
        assert len({*names}) == len(names)
        for part in parts:
            assert part.tells
            assert 0 < part.seconds <= CALL_SECONDS, part.name
            is_result = [name.endswith(".json") for name in part.leaves]
            assert part.name == "install" or is_result[0], part.name
    for part in PARTS[1:]:
        assert part.predictions, part.name


def test_the_parts_fit_into_calls_of_ten_minutes_in_their_order() -> None:
    calls = in_calls(list(PARTS))
    assert [part.name for call in calls for part in call] == NAMES
    assert all(sum(part.seconds for part in call) <= CALL_SECONDS < 600 for call in calls)
    first = [part.name for part in calls[0]]
    assert first[:2] == ["install", "rollout-480p"]
    assert "sequence-host" in first
    assert "wan" in [part.name for part in calls[1]]


def printed(*arguments: str, folder: Path) -> dict[str, list[str]]:
    """Map each part to the words of its command, as `--print` shows them."""
    (folder / "wheels").mkdir(exist_ok=True)
    script = str(REPOSITORY / "scripts" / "gpu.sh")
    done = subprocess.run(
        ["bash", script, "--print", *arguments, "wheels", "out"],
        cwd=folder, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {name: words for name, *words in rows}


def check_settings(arguments: Sequence[str]) -> None:
    """Load the configuration of a command with its settings, and its reward."""
    words, settings = split_settings(arguments)
    (config,) = (word for word in words if word.endswith(".yaml"))
    loaded = load(REPOSITORY / config, settings)
    if "reward.name" in settings:
        load_reward(loaded.reward)


@pytest.mark.parametrize("size", ["--tiny", ""])
def test_the_commands_are_ones_that_exist(size: str, tmp_path: Path) -> None:
    """A rehearsal runs the tiny ones, and nothing here the others: the real command line knows
    their options, sizes, parts and paths."""
    commands = printed(*filter(None, [size]), folder=tmp_path)
    assert list(commands) == NAMES
    seen = set()
    for part, words in commands.items():
        start = words.index("-m")
        module, *arguments = words[start + 1 :]
        seen.add(module)
        if module == "sage_fast":
            options, overrides = cli.parse(arguments)
            assert not overrides, part
            if arguments[:2] == ["bench", "rollout"]:
                assert {*(options.size or ())} <= rung.SIZES.keys()
                assert {*options.part} <= rung.PARTS.keys()
                assert {*options.path} <= {*rung.PATHS}
        else:
            assert (REPOSITORY / f"{module.replace('.', '/')}.py").is_file(), module
            if any(word.endswith(".yaml") for word in arguments):
                check_settings(arguments)
        for word in arguments:
            assert not word.startswith("tests/") or (REPOSITORY / word).exists()
    assert {"sage_fast", "scripts.gpu.streamed", "scripts.gpu.kernel_tests"} <= seen
    for operator in OPERATORS:
        assert operators.sizes_of(operator).keys() & {*commands["operators"]}, operator


def test_the_commands_of_several_gpus_are_ones_that_exist(tmp_path: Path) -> None:
    commands = printed("--gpus", "8", folder=tmp_path)
    assert list(commands) == [part.name for part in PARTS_OF_SEVERAL]
    for part in list(commands)[2:]:
        words = commands[part]
        assert words[1:3] == ["-m", "scripts.gpu.several"]
        _, settings = split_settings(words)
        (config,) = (word for word in words if word.endswith(".yaml"))
        loaded = load(REPOSITORY / config, settings)
        assert loaded.train.samples == (2 if part == "lora-alone" else 16)
        assert loaded.model.sequence_parallel == (8 if part == "sequence" else 1)


def test_diffusers_gets_the_attention_kernel_that_ours_has(tmp_path: Path) -> None:
    """In a trained step and in a forward, without and with a merged LoRA."""
    words = printed(folder=tmp_path)["rollout-480p"]
    assert {"eager", LOCAL, f"{LOCAL} merged"} <= {*words}
    for mode in ("full", "attention", "auto", "none"):
        assert f"train {mode}" in words
    assert LOCAL in rung.PARTS["train full"]


def test_an_error_of_the_stock_decode_costs_no_number(tmp_path: Path) -> None:
    """At 480p it has tensors of more than 2^31 elements, so no part runs it."""
    for words in printed(folder=tmp_path).values():
        assert not ({"rollout", "decode"} <= {*words} and "stock" in words)


def test_what_is_expected_of_wan_is_arithmetic() -> None:
    """By the FLOPs of the plan, which scripts/gpu/parts.py cannot count: it needs the standard
    library alone."""
    spec, config = wan.subject(tiny=False)
    sampling = config.sampling
    assert (sampling.height, sampling.width, sampling.num_frames) == (704, 1280, 121)
    flops = wan.counted_flops(spec.cost(config))
    assert {part: round(count / 1e12, 1) for part, count in flops.items()} == WAN_TFLOP
    sheet = data_sheet_flops("NVIDIA H200")
    assert sheet is not None
    assert pytest.approx(0.62 * sheet) == 1e12 * ASSUMED_TFLOPS


def test_the_page_has_the_tables_of_the_parts() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert {found[1] for found in page.TABLE.findall(text)} == page.TABLES.keys()
    assert text == page.written(text), "run python -m scripts.gpu.page"


# -- what is known ---------------------------------------------------------------------------------


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a kernel and a result of it."""
    folder = tmp_path / "repository"
    for name in ("kernels/a.py", "docs/a.md"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("1\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "Kernels")
    (folder / "results").mkdir()
    monkeypatch.setattr(result_age, "REPOSITORY", folder)
    return folder


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def keep(history: Path, name: str, result: dict[str, Any], **facts: Any) -> Path:
    """Write a result of the repository's commit."""
    environment = {"commit": git(history, "rev-parse", "HEAD"), "device": "NVIDIA H200", **facts}
    file = history / "results" / name
    file.write_text(json.dumps(result | {"environment": environment}))
    return file


def known(history: Path, part: str) -> list[str]:
    return [file.name for file in result_age.measured_on_a_gpu(part, history / "results")]


def test_a_part_is_known_until_its_code_changes(history: Path) -> None:
    name = "2026-11-27-h200-rollout.json"
    keep(history, name, {"rows": [], "ceiling_flops_per_second": 1.0})
    assert known(history, "rollout") == [name]
    (history / "docs/a.md").write_text("2\n")
    assert known(history, "rollout") == [name]
    (history / "kernels/a.py").write_text("2\n")
    assert known(history, "rollout") == []


def test_a_result_of_a_cpu_or_of_another_part_tells_nothing(history: Path) -> None:
    keep(history, "2026-11-27-cpu-rollout.json", {"rows": []})
    keep(history, "2026-11-27-h200-large-rollout.json", {"rows": []})
    assert known(history, "rollout") == []


def test_a_result_of_an_unknown_commit_tells_nothing(history: Path) -> None:
    keep(history, "2026-11-27-h200-rollout.json", {"rows": []}, commit=COMMIT)
    keep(history, "2026-11-28-h200-rollout.json", {"rows": []}, commit=None)
    assert known(history, "rollout") == []


def test_kernels_of_other_packages_do_not_grow_old(history: Path) -> None:
    name = "2026-11-27-h200-attention.json"
    keep(history, name, {"limits": {"attention": []}})
    keep(history, "2026-11-27-h200-adapter-rows.json", {"limits": {"adapter_rows": []}})
    (history / "kernels/a.py").write_text("2\n")
    assert known(history, "attention") == [name]
    assert known(history, "adapter-rows") == []


def test_a_result_of_another_kind_depends_on_all_code(history: Path) -> None:
    """So that a new kind needs no row in a table."""
    name = "2026-11-27-h200-doctor.json"
    keep(history, name, {"checks": []})
    assert known(history, "doctor") == [name]
    (history / "kernels/a.py").write_text("2\n")
    assert known(history, "doctor") == []


def test_what_ended_well_in_an_earlier_call_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measured_on_a_gpu", lambda part: [Path()] * (part == "ceiling"))
    status = run.StatusFile(tmp_path)
    for name, verdict in (("tests", "failed"), ("tests", "ok"), ("doctor", "timed out")):
        status.add(Verdict(name, verdict, 1))
    names = [part.name for part in command.unknown_parts(PARTS, tmp_path)]
    assert names == [name for name in NAMES if name not in ("ceiling", "tests")]


# -- the command line ------------------------------------------------------------------------------


def test_what_is_asked_for_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheels").mkdir()
    for arguments, message in (
        (["wheels", "out", "docter"], "part 'docter': expected a number to 22 or one of install"),
        *(
            (["wheels", "out", part], f"part '{part}'")
            for part in ("23", "0", "08", "023", "doctor tests", "")
        ),
        (["nowhere", "out"], "WHEELS 'nowhere': no such folder"),
        (["--seconds", "soon", "wheels", "out"], "--seconds: 'soon': expected a whole number"),
        (["--gpus", "all", "wheels", "out"], "--gpus: 'all': expected a whole number"),
        (["--gpus", "8", "wheels", "out", "doctor"], "expected a number to 11 or one of install"),
        (["--call", "9", "wheels", "out"], "--call 9: these parts take 4 calls"),
        (["--fast", "wheels", "out"], "--fast"),
        (["wheels"], "OUT"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("COMMIT", "HEAD")
    with pytest.raises(SystemExit):
        command.main(["wheels", "out"])
    assert "COMMIT 'HEAD': expected a hash" in capsys.readouterr().err


def test_parts_are_named_or_numbered() -> None:
    known_parts = parts_for(1)
    assert command.chosen_parts(["2", "doctor"], known_parts) == [
        known_parts["rollout-480p"],
        known_parts["doctor"],
    ]
    assert command.chosen_parts([], known_parts) == list(PARTS)


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


def test_nothing_but_the_standard_library_is_needed_before_the_installation(
    tmp_path: Path,
) -> None:
    """`-S` hides all packages."""
    (tmp_path / "wheels").mkdir()
    code = "import sys; from scripts.gpu.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--print", "--unknown", str(tmp_path / "wheels"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {code}",
         *arguments],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("install\t")


# -- running ---------------------------------------------------------------------------------------


def test_a_part_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    """Its child ignores SIGTERM, as a hanging rank may."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); "
        "import time; time.sleep(600)"
    )
    log = tmp_path / "slow.log"
    part = a_part("slow", sys.executable, "-c", code)
    verdict = run_part(call_in(tmp_path), part, 3, log)
    assert verdict.status == run.TIMED_OUT
    pid = int(log.read_text())
    wait_until(lambda: is_dead(pid))


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_failed_part_does_not_stop_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        a_part("bad", sys.executable, "-c", "print('why'); raise SystemExit(3)"),
        a_part("good", sys.executable, "-c", "print('fine')"),
    ]
    call = call_in(tmp_path)
    assert run.run_parts(call, parts, parts, 1000) == 1
    assert table(tmp_path) == {"bad": "failed", "good": "ok"}
    assert re.search(r"^bad +failed +\d+  why$", capsys.readouterr().out, re.M)
    assert run.run_parts(call, parts[1:], parts, 1000) == 0
    assert run.run_parts(call, parts[1:], parts, 1) == 1
    assert table(tmp_path) == {"bad": "failed", "good": "skipped"}


def test_all_results_are_one_file_of_a_size_that_travels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If all results are too much, the largest file is left out and named."""
    (tmp_path / "iteration").mkdir()
    (tmp_path / "iteration" / "profile.json").write_text("{}")
    (tmp_path / "of a profiler.ncu-rep").write_bytes(os.urandom(17 * 2**20))
    for _ in range(2):  # a second call does not pack the first one's file
        pack(tmp_path)
        with tarfile.open(tmp_path / "results.tar.gz") as packed:
            assert packed.getnames() == ["iteration/profile.json"]
    assert (
        "left out of results.tar.gz, which has room for 16 MiB: of a profiler.ncu-rep"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("device", "tiny", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", False, "60 or more"),
        ("NVIDIA H100 80GB HBM3", True, "not for this"),
        ("NVIDIA A100-SXM4-80GB", False, "not for this"),
        ("AMD EPYC", False, "not for this"),
    ],
)
def test_predictions_are_shown_beside_what_they_are_of(
    device: str, tiny: bool, expected: str, tmp_path: Path
) -> None:
    """The bar of `adapter_rows` is that of the benchmarks; a miss is named."""
    assert operators.LEAST_SHARE["adapter_rows"] == 0.6
    tiles = {"32 x 64, 4 warps": 1e-3, "64 x 64, 4 warps": 5e-4}
    rows = [
        {"kind": kind, "seconds": {"copy": copy, "PyTorch": 7e-4, **tiles}}
        for kind, copy in (("GELU", 2e-4), ("backward of GELU", 4e-4))
    ]
    found = {"environment": {"device": device}, "limits": {"adapter_rows": rows}}
    (tmp_path / "adapter-rows.json").write_text(json.dumps(found))
    head, forward, backward = (
        " ".join(line.split()) for line in predicted(PARTS, tmp_path, tiny=tiny)
    )
    miss = " missed" * (expected != "not for this")
    assert head == "part quantity expected measured"
    assert forward == f"adapter-rows adapter_rows with GELU, % of a copy {expected} 40{miss}"
    assert backward == f"adapter-rows its backward, % of a copy {expected} 80"


@pytest.mark.parametrize(
    ("expected", "value", "word"),
    [
        ("below 5", 5, "5 missed"),
        ("exactly 0", 0, "0"),
        ("exactly 0", 2, "2 missed"),
        ("1.1 or below", 1.2, "1.2 missed"),
        ("30 to 60", 90, "90"),
        ("4.39", 5, "5"),
        ("above 0", None, "absent"),
    ],
)
def test_a_value_outside_its_bound_is_a_miss(
    expected: str, value: float | None, word: str, tmp_path: Path
) -> None:
    prediction = Prediction(
        quantity="it", expected=expected, value=lambda found: float(found["value"])
    )
    part = a_part("one", predictions=(prediction,))
    result = {"environment": {"device": "NVIDIA H200"}}
    if value is not None:
        result["value"] = value
    (tmp_path / "one.json").write_text(json.dumps(result))
    _, line = predicted([part], tmp_path)
    assert " ".join(line.split()) == f"one it {expected} {word}"


def test_the_numbers_of_the_kept_results_are_found(tmp_path: Path) -> None:
    """Of each part of which an H200 has left a file of this form."""
    shutil.copy(REPOSITORY / "benchmarks/results/2026-11-27-h200-ceiling.json",
        tmp_path / "ceiling.json")  # fmt: skip
    shutil.copy(REPOSITORY / "benchmarks/results/2026-11-27-h200-attention.json",
        tmp_path / "attention.json")  # fmt: skip
    shutil.copy(REPOSITORY / "benchmarks/results/2026-11-25-h100-operators.json",
        tmp_path / "operators.json")  # fmt: skip
    lines = list(predicted(PARTS, tmp_path))[1:]
    assert len(lines) == 4
    assert not any("absent" in line for line in lines)


# -- the programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "expected"), [(2.001, True), (2.1, False), (math.nan, False)])
def test_engines_that_differ_fail_their_part(norm: float, expected: bool) -> None:
    metrics = {
        engine: [{"reward/mean": -1.5, "grad_norm": value}]
        for engine, value in {"plain": 2.0, "zero2": 2.0, "zero3": norm}.items()
    }
    assert agree(metrics) is expected


def test_tests_are_counted_from_the_report_of_pytest(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_c(): pass\n"
    )
    report = tmp_path / "report.xml"
    pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tests)]
    subprocess.run([*pytest_command, f"--junitxml={report}"], cwd=tmp_path, capture_output=True)
    found = counts(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)


def event(kind: str, name: str, start: float, length: float, thread: int) -> dict[str, Any]:
    facts = {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}
    return facts | {"pid": 0, "tid": thread}


def test_kernels_are_counted_within_ranges() -> None:
    """The backward's range is there without kernels if another thread launched them."""
    events = [
        event("user_annotation", "sage_fast/backward", 0, 100, 1),
        event("gpu_user_annotation", "sage_fast/block 3", 0, 50, 7),
        event("gpu_user_annotation", "sage_fast/block 4", 50, 50, 7),
        event("gpu_user_annotation", "other", 0, 100, 7),
        event("kernel", "one", 10, 5, 7),
        event("kernel", "two", 60, 5, 7),
        event("kernel", "three", 20, 5, 8),
    ]
    found = count_kernels(events)
    assert found == {"block": {"ranges": 2, "kernels": 2, "seconds": pytest.approx(1e-4)}}


def test_on_a_cpu_operations_stand_for_kernels() -> None:
    events = [
        event("user_annotation", "sage_fast/backward", 0, 100, 1),
        event("cpu_op", "one", 10, 5, 1),
        event("cpu_op", "two", 10, 5, 2),
    ]
    assert count_kernels(events)["backward"]["kernels"] == 1


def test_a_wheel_in_pieces_is_joined(tmp_path: Path) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "joined"
    wheels.mkdir()
    folder.mkdir()
    (wheels / "a-1.whl").write_bytes(b"whole")
    for number in range(11):
        (wheels / f"b-2.whl.{number}").write_bytes(bytes([number]))
    found = gather_wheels(wheels, folder)
    assert found == [str(wheels / "a-1.whl"), str(folder / "b-2.whl")]
    assert (folder / "b-2.whl").read_bytes() == bytes(range(11))


# -- the rehearsal ---------------------------------------------------------------------------------


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
    done = gpu(machine, "--tiny", "--unknown", "wheels", "out", *REHEARSED[1:])
    logs = {part: (machine / "out" / f"{part}.log").read_text()[-1500:] for part in REHEARSED}
    verdicts = {
        part: verdict for part, verdict in table(machine / "out").items() if verdict != "not run"
    }
    assert verdicts == dict.fromkeys(REHEARSED, "ok"), "\n".join(
        f"== {part}\n{logs[part]}" for part, verdict in verdicts.items() if verdict != "ok"
    )
    assert done.returncode == 0
    return machine / "out"


def test_every_part_leaves_its_results_and_their_commit(rehearsed: Path) -> None:
    """Also what it predicts is in them, unless a CPU lacks it."""
    for part in PARTS[1:]:
        if part.name not in REHEARSED:
            continue
        for name in part.leaves:
            assert (rehearsed / name).is_file(), name
        result = json.loads((rehearsed / part.leaves[0]).read_text())
        assert result["environment"]["commit"] == COMMIT, part.name
    lines = (rehearsed / "table.txt").read_text()
    assert re.search(r"^part +quantity +expected +measured$", lines, re.M)
    assert re.search(r"^decode-480p +decode of a video, s +not for this +[\d.]+$", lines, re.M)
    on_gpus = {
        "rollout-480p": {"peak of `none`, GiB"},
        "eager-step": {"step by a graph / eager step before"},
        "wan": {"peak of its trained step / the plan's"},
        "iteration": {"peak of training / the plan's"},
        "full": {"peak of training / the plan's"},
        "nft": {"peak of training / the plan's"},
        "operators": {"slowest transition at 720p, % of a copy"},
        "attention": {
            "FlashAttention 4 forward, TFLOP/s",
            "FlashAttention 4 backward, TFLOP/s",
        },
    }
    for part in PARTS:
        for prediction in part.predictions:
            line = re.search(
                rf"^{part.name} +{re.escape(prediction.quantity)} +not for this +(\S+)$",
                lines,
                re.M,
            )
            if part.name in REHEARSED:
                assert line is not None, prediction.quantity
                absent = prediction.quantity in on_gpus.get(part.name, ())
                assert (line[1] == "absent") == absent, prediction.quantity


def test_streamed_blocks_have_the_bits_of_resident_ones(rehearsed: Path) -> None:
    found = json.loads((rehearsed / "streamed.json").read_text())["streamed"]
    assert found["different"] == []
    assert found["compared"] > 50
    assert found["streamed"]["copied_bytes"] > found["streamed"]["host_bytes"]


def test_wan_by_both_forwards_has_one_velocity(rehearsed: Path) -> None:
    found = json.loads((rehearsed / "wan.json").read_text())["wan"]
    assert found["difference"] < 1e-5
    for row in found["rows"]:
        assert row["failed"] == {}
        assert {*row["seconds"]} == {"ours", "diffusers"}
    assert [row["part"] for row in found["rows"]] == ["forward", "train"]


def test_wan_gets_no_time_where_the_velocities_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when diffusers' attention is another."""
    monkeypatch.setattr(
        wan, "register_attention", lambda backend, _: register_attention(backend, of_the_keys)
    )
    monkeypatch.setattr(sys, "argv", ["wan", "--tiny", "--json", str(tmp_path / "wan.json")])
    assert wan.main() == 1
    found = json.loads((tmp_path / "wan.json").read_text())["wan"]
    assert found["difference"] > 0.01
    assert found["rows"] == []


def of_the_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend, but to the keys in the place of the values."""
    return ATTENTION["sdpa"](query, key, key)


def test_a_rehearsal_of_the_rollout_calls_diffusers_with_our_kernel(rehearsed: Path) -> None:
    if "rollout-480p" not in REHEARSED:
        pytest.skip("make soak rehearses it")
    rows = json.loads((rehearsed / "rollout-480p.json").read_text())["rows"]
    assert {row["part"]: {*row["seconds"]} for row in rows} == {
        "train full": {"eager", LOCAL},
        "train auto": {"eager"},
        "forward": {"eager", LOCAL, f"{LOCAL} merged"},
        "train attention": {"eager"},
        "train none": {"eager", LOCAL},
    }


def test_what_a_tool_ran_is_counted(rehearsed: Path) -> None:
    for tool in ("consan", "memcheck"):
        result = json.loads((rehearsed / f"{tool}.json").read_text())
        assert result["under"] == tool
        assert result["tests"]["passed"] == len(OPERATORS)
        assert result["tests"]["failed"] == 0
    log = (rehearsed / "memcheck.log").read_text()
    assert re.match(r"compute-sanitizer --tool memcheck .*caching 1\n", log)


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
            machine, "--tiny", "wheels", "out", "consan", "memcheck", PATH=os.environ["PATH"]
        )
    finally:
        kernel.write_text(text)
    assert done.returncode == 1
    verdicts = table(rehearsed)
    assert (verdicts["consan"], verdicts["memcheck"]) == ("failed", "ok")
    assert "overflow detected" in (machine / "out" / "consan.log").read_text()


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
def test_several_gpus_are_rehearsed_by_two_ranks_on_the_cpu(rehearsed: Path, machine: Path) -> None:
    names = [part.name for part in PARTS_OF_SEVERAL][1:]
    done = gpu(machine, "--tiny", "--gpus", "2", "wheels", "several", *names)
    logs = {part: (machine / "several" / f"{part}.log").read_text() for part in names}
    ends = "\n".join(f"== {part}\n{log[-1500:]}" for part, log in logs.items())
    assert done.returncode == 0, f"{done.stdout}\n{ends}"
    for part in names:
        result = json.loads((machine / "several" / f"{part}.json").read_text())
        assert result["environment"]["commit"] == COMMIT
    assert "resumed after a killed rank" in logs["killed"]


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
