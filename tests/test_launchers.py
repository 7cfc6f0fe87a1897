"""How a run may be started: each launcher works, or is one line that says what to type."""

import base64
import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sage_fast import cli
from sage_fast.cli import COMMANDS, main
from sage_fast.util import launchers, process_group
from sage_fast.util.errors import RunError, UserError
from sage_fast.util.launchers import GROUP, LAUNCHERS, Launcher, check_launch, launched
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import local_device
from tests.tiny import arguments

REPOSITORY = Path(__file__).parent.parent
PAPER = REPOSITORY / "configs" / "recipes" / "paper.yaml"
VARIABLES = {
    *GROUP,
    *launchers.OTHER_NAMES.values(),
    "SLURM_NTASKS",
    "TORCHELASTIC_RUN_ID",
    "GROUP_WORLD_SIZE",
} | {name for launcher in LAUNCHERS for name in launcher[1:] if name}
WHOLE = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin, and leave, with an environment that no launcher has touched."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # remembers that it is to be restored
        monkeypatch.delenv(name)


def environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


# -- several processes without torchrun's variables ------------------------------------------------


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.rank)
@pytest.mark.parametrize("rank", ["0", "3"])
def test_processes_that_know_nothing_of_each_other_are_refused(
    launcher: Launcher,
    rank: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not launcher.size and rank == "0":
        pytest.skip("the first process of a launcher without a count looks like one that is alone")
    variables = {launcher.rank: rank} | ({launcher.size: "8"} if launcher.size else {})
    variables |= {launcher.local_size: "4"} if launcher.local_size else {}
    environment(monkeypatch, **variables)
    assert main(["train", str(PAPER), "--output", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sage-fast train: {launcher.name} started")
    assert (
        f"torchrun --nproc-per-node {'4' if launcher.local_size else 'GPUS'} -m sage_fast" in line
    )
    assert f"RANK=${launcher.rank} LOCAL_RANK=${launcher.local_rank}" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.rank)
def test_what_the_refusal_advises_is_accepted(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's variables decide, also for processes that say to be alone."""
    variables = {launcher.rank: "3"} | ({launcher.size: "8"} if launcher.size else {})
    environment(monkeypatch, **variables)
    with pytest.raises(UserError) as refused:
        check_launch()
    advice = re.search(r"RANK=\S+ LOCAL_RANK=\S+ WORLD_SIZE=\S+", str(refused.value))
    assert advice is not None
    own = {launcher.rank: "3", launcher.local_rank: "1", launcher.size or "COUNT": "8"}
    for word in shlex.split(advice[0]):
        name, _, variable = word.partition("=")
        monkeypatch.setenv(name, own[variable.lstrip("$")])
    environment(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    check_launch()
    assert (launched("RANK", 0), launched("WORLD_SIZE", 1)) == (3, 8)
    environment(monkeypatch, WORLD_SIZE="1", RANK="0")
    check_launch()


ALONE: dict[str, dict[str, str]] = {
    "nothing": {},
    "a shell of salloc": {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
    "a batch script": {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "srun --pty bash": {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "mpirun -np 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "torchrun --nproc-per-node 1": {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    "torchrun in a task of srun": {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "WORLD_SIZE": "1",
        "RANK": "0",
    },
    "accelerate launch, one process": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    "RANK=0 in a shell": {"RANK": "0"},
}


@pytest.mark.parametrize("variables", ALONE.values(), ids=ALONE.keys())
def test_a_process_alone_starts(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, **variables)
    assert initialize() == torch.device("cpu")
    assert launchers.speaks()


@pytest.mark.parametrize("name", ["a shell of salloc", "a batch script"])
def test_one_process_in_a_job_of_several_tasks_is_noted(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    environment(monkeypatch, **ALONE[name])
    launchers.note_idle_tasks()
    assert "one process, although the Slurm job has 8 tasks" in caplog.text
    caplog.clear()
    environment(monkeypatch, SLURM_STEP_NUM_TASKS="1")
    launchers.note_idle_tasks()
    assert caplog.text == ""


COPIES: dict[str, dict[str, str]] = {
    "type `unset WORLD_SIZE`": {"WORLD_SIZE": "1", "RANK": "0"},
    "type `srun torchrun --nnodes 8": {
        "WORLD_SIZE": "4",
        "RANK": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_WORLD_SIZE": "1",
    },
}


@pytest.mark.parametrize(("said", "variables"), COPIES.items(), ids=["WORLD_SIZE=1", "torchrun"])
def test_lone_copies_under_srun_are_told_what_to_type(
    said: str,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    environment(monkeypatch, **variables)
    launchers.note_lone_copies()
    assert caplog.text == "", "no srun"
    environment(monkeypatch, SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="3")
    launchers.note_lone_copies()
    (line,) = caplog.messages
    assert line.startswith("note: srun started 8 ")
    assert said in line


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "8", "RANK": "3"},
        {"WORLD_SIZE": "64", "TORCHELASTIC_RUN_ID": "first", "GROUP_WORLD_SIZE": "8"},
        {},
    ],
    ids=["slurm.sbatch", "torchrun on all nodes", "refused elsewhere"],
)
def test_ranks_that_know_each_other_under_srun_are_told_nothing(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    environment(monkeypatch, SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="3", **variables)
    launchers.note_lone_copies()
    assert caplog.text == ""


# -- torchrun's variables, some of them left behind ------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "RANK = 1 in the environment, but no WORLD_SIZE.*`unset RANK`"),
        (
            {"RANK": "1", "WORLD_SIZE": "1"},
            "RANK = 1 in the environment: expected less than WORLD_SIZE = 1",
        ),
        ({"RANK": "one"}, "RANK = 'one' in the environment: expected a whole number"),
        *(
            (
                {key: value for key, value in WHOLE.items() if key != name},
                f"WORLD_SIZE = 2 .* but no {name}: expected",
            )
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")
        ),
    ],
)
def test_half_of_the_variables_is_one_line(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    environment(monkeypatch, **variables)
    with pytest.raises(UserError, match=said):
        initialize()
    assert main(["train", str(PAPER), "--output", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)
    assert not (tmp_path / "run").exists()


def test_a_group_that_is_described_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, **WHOLE)
    check_launch()
    assert not launchers.speaks()


@pytest.mark.parametrize("variables", [{"RANK": "1"}, WHOLE, {"RANK": "x", "WORLD_SIZE": "y",
    "LOCAL_RANK": "z"},
                                       {"SLURM_STEP_NUM_TASKS": "8",
                                        "SLURM_PROCID": "3"}])  # fmt: skip
@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.ranks])
def test_a_command_that_is_one_process_ignores_what_a_shell_was_left_with(
    name: str,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It runs, prints, and sees no group."""
    environment(monkeypatch, **variables)
    seen: list[str] = []

    class Module:
        @staticmethod
        def add_arguments(add: object) -> None:
            pass

        @staticmethod
        def run(options: object, overrides: object) -> None:
            seen.extend(variable for variable in GROUP if variable in os.environ)
            logging.getLogger("sage_fast.commands").info("says so")
            assert local_device() == torch.device("cpu")

    monkeypatch.setattr(cli, "load", lambda command: Module)
    assert main([name]) == 0
    assert seen == []
    assert capsys.readouterr().out == "says so\n"


def test_a_dry_run_prints_whatever_a_shell_was_left_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(monkeypatch, RANK="1", SLURM_STEP_NUM_TASKS="8")
    assert main(["train", str(PAPER), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "loading PyTorch" in shown
    assert "memory while it trains" in shown


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_group_left_in_a_shell_says_that_it_waits(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other rank comes, so that a line says what to unset, long before the timeout."""
    monkeypatch.setattr(process_group, "PATIENCE_S", 0.2)
    environment(monkeypatch, **WHOLE | {"RANK": rank, "MASTER_PORT": str(free_port())})
    with pytest.raises(RunError, match=f"rank {rank} of 2 cannot join the others"):
        initialize(timeout_minutes=2 / 60)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sage-fast: rank {rank} of 2 waits for the others at MASTER_ADDR:")
    assert "`unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`" in line


# -- GPUs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "gpus", "said"),
    [
        ({"LOCAL_RANK": "2"}, 2, r"LOCAL_RANK = 2 .* sees 2 GPU\(s\): expected less than 2"),
        (
            {"LOCAL_RANK": "1"},
            1,
            r"LOCAL_RANK = 1 .* sees 1 GPU\(s\).*LOCAL_RANK=0 where each task sees",
        ),
        ({"WORLD_SIZE": "2"}, 2, "no LOCAL_RANK in the environment: expected 0 to 1"),
        ({"WORLD_SIZE": "2"}, 1, None),
        ({"LOCAL_RANK": "1"}, 2, None),
        ({}, 2, None),
    ],
)
def test_a_rank_has_a_gpu_of_its_own_or_says_why_not(
    variables: dict[str, str], gpus: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, **variables)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    if said is None:
        assert local_device().index == int(variables.get("LOCAL_RANK", "0"))
        return
    with pytest.raises(UserError, match=said):
        local_device()


# -- the launchers themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--local_rank=1", "--local-rank=1"])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_the_option_of_a_launcher_is_its_variable(
    word: str, place: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["train", str(PAPER), "--output", "missing"]
    assert launchers.without_local_rank([*words[:place], word, *words[place:]]) == words
    assert launched("LOCAL_RANK", 0) == 1
    assert launchers.without_local_rank(["--local_rank=0"]) == []
    assert launched("LOCAL_RANK", 0) == 1  # the variable decides
    assert main([word, "train", "no-such.yaml"]) == 2
    assert "no-such.yaml" in capsys.readouterr().err


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launch(name: str) -> list[str]:
    """The command of a launcher, for two processes of `sage_fast`."""
    python, port = [sys.executable, "-m"], str(free_port())
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    return {
        "deepspeed --module": [
            *python, "deepspeed.launcher.launch", f"--world_info={world}", f"--master_port={port}",
            "--module",
        ],
        "torch.distributed.launch": [
            *python, "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={port}",
            "-m",
        ],
        "accelerate launch": [
            *python, "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1",
            "--mixed_precision=no", "--dynamo_backend=no", "-m",
        ],
    }[name] + ["sage_fast"]  # fmt: skip


def start(name: str, words: list[str]) -> "subprocess.CompletedProcess[str]":
    own = os.environ | {
        "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    return subprocess.run(
        [*launch(name), *words],
        cwd=REPOSITORY,
        env=own,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["deepspeed --module", "torch.distributed.launch", "accelerate launch"]
)
def test_a_run_starts_under_every_launcher(name: str, tmp_path: Path) -> None:
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    options = arguments(
        train__iterations=1, train__prompts_per_iteration=2, train__group_size=2,
        train__optimizer_steps=1,
        sampling__num_frames=5, sampling__steps=2, eval__steps=1, eval__num_prompts=2,
        eval__seeds_per_prompt=1,
        eval__num_videos=1, eval__judge="null", tracking__trackers="[]", timeout_minutes=2,
    )  # fmt: skip
    run = tmp_path / "run"
    done = start(name, ["train", str(PAPER), "--output", str(run), *options])
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = 1 if name == "accelerate launch" else 2
    assert len(list((run / "logs").glob("rank-*.log"))) == ranks
    (row,) = (run / "metrics.jsonl").read_text().splitlines()
    assert ("time/ranks" in json.loads(row)) == (ranks > 1)
    assert done.stdout.count("1/1  reward") == 1, "rank 0 alone prints"
