"""The command a user types, on the testbed that ships with the package."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sage_fast.cli import main
from sage_fast.run.trackers import read_lines

DEMO = Path(__file__).parent.parent / "configs" / "demo.yaml"
SMALL = [
    *("--train.iterations", "2", "--train.prompts_per_iteration", "2", "--train.group_size", "3"),
    *("--sampling.steps", "4", "--train.timestep_fraction", "1.0", "--eval.steps", "2", "--eval.num_prompts", "2"),
    *("--eval.seeds_per_prompt", "1", "--eval.num_videos", "1", "--train.batch_size", "16"),
]


def train(run: Path, *arguments: str) -> int:
    return main(["train", str(DEMO), "--output", str(run), "--quiet", *SMALL, *arguments])


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys, sage_fast.cli as c; c._parser(); print([m for m in ('torch', 'diffusers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    done = subprocess.run([sys.executable, "-m", "sage_fast", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "train" in done.stdout
    assert "--sampling.eta 0.7" in done.stdout


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "demo"
    assert train(run) == 0
    return run


def test_a_run_leaves_everything(finished_run: Path) -> None:
    run = finished_run
    for name in ("config.yaml", "run.json", "metrics.jsonl", "report.html", "eval/before.json", "eval/after.json"):
        assert (run / name).stat().st_size > 0, name
    assert (run / "weights" / "pytorch_lora_weights.safetensors").is_file()
    assert list((run / "tensorboard").glob("events*"))
    assert list((run / "checkpoints").iterdir())
    before, after = (sorted(p.name for p in (run / "videos" / n).glob("*.mp4")) for n in ("before", "after"))
    assert before == after
    assert len(before) == 1
    assert (run / "videos" / "before.png").is_file()
    rows = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
    assert [row["iteration"] for row in rows] == [0, 1]
    evaluations = [json.loads((run / "eval" / f"{n}.json").read_text()) for n in ("before", "after")]
    assert evaluations[0]["seeds"] == evaluations[1]["seeds"]
    assert evaluations[0]["reward"] != evaluations[1]["reward"]


def test_same_seed_same_metrics(finished_run: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "again") == 0
    first, second = (
        [
            {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
            for line in read_lines(run / "metrics.jsonl")
        ]
        for run in (finished_run, tmp_path / "again")
    )
    assert first == second


def test_output_that_holds_another_run(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished_run / "metrics.jsonl").read_bytes()
    assert train(finished_run) == 2
    error = capsys.readouterr().err
    assert "already holds a run" in error
    assert "--resume" in error
    assert (finished_run / "metrics.jsonl").read_bytes() == before


def test_sample_and_eval_and_report_of_a_run(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "a red circle moves left quickly"
    assert main(["sample", str(finished_run), "--prompt", prompt, "--folder", str(tmp_path), "--quiet"]) == 0
    assert (tmp_path / "00-a-red-circle-moves-left-quickly.mp4").stat().st_size > 500
    assert main(["eval", str(finished_run), "--json", str(tmp_path / "scores.json"), "--quiet"]) == 0
    after = json.loads((finished_run / "eval" / "after.json").read_text())
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["reward"] == pytest.approx(after["reward"], rel=1e-4)  # the weights that were saved are those trained
    assert "ta" in capsys.readouterr().out
    assert main(["report", str(finished_run)]) == 0


def test_resume_gives_the_same_run(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "resumed"
    assert train(run, "--train.iterations", "1", "--train.checkpoint_interval", "1") == 0
    assert train(run, "--resume") == 0
    whole, resumed = (
        [json.loads(line)["reward/mean"] for line in read_lines(folder / "metrics.jsonl")]
        for folder in (finished_run, run)
    )
    assert resumed == whole


def test_ctrl_c_leaves_a_checkpoint_to_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["train", str(DEMO), "--output", str(run), *SMALL, "--train.iterations", "1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sage_fast", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while len(read_lines(run / "metrics.jsonl")) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()[-2000:]
    assert "continue with --resume" in out.decode() + err.decode()
    done = len(read_lines(run / "metrics.jsonl"))
    assert train(run, "--resume", "--train.iterations", str(done + 1)) == 0
    rows = [json.loads(line)["iteration"] for line in read_lines(run / "metrics.jsonl")]
    assert rows == list(range(done + 1))


def test_dry_run_plans_the_real_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = DEMO.parent / "hunyuanvideo15-480p.yaml"
    arguments = ["--output", str(tmp_path / "none")]
    assert main(["train", str(config), "--dry-run", *arguments]) == 0
    plan = capsys.readouterr().out
    assert "8.3" in plan
    assert "32,760" in plan or "32760" in plan
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling.etta", "1"], "did you mean 'sampling.eta'"),
        (["--sampling.eta"], "--sampling.eta needs a value"),
        (["stray"], "unexpected argument 'stray'"),
        (["--model.path", "./no/such/folder"], "model.path = './no/such/folder': no such folder"),
        (["--model.weights", "no/such/file"], "model.weights = 'no/such/file': no such file"),
        (["--data.prompts", "missing.txt"], "missing.txt': no such file"),
        (["--reward.name", "json:nothing"], "json has no 'nothing' that can be called"),
        (["--reward.name", "no_such_module:Reward"], "no module 'no_such_module' is installed or in"),
        (["--reward.name", "videoalign"], "expected 'testbed' or 'package.module:name'"),
        (["--sampling.sampler", "ode"], "no stochastic step"),
    ],
)
def test_messages(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(run, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not run.exists()


def test_rollouts_that_fit_nowhere_are_refused_before_a_run_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, "--train.group_size", "1000000000") == 2
    assert "are free; lower train.group_size" in capsys.readouterr().err
    assert not run.exists()


def test_lora_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    weights = tmp_path / "pytorch_lora_weights.safetensors"
    save_file({"transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(4, 2048)}, weights)
    assert train(tmp_path / "run", "--model.weights", str(weights)) == 2
    assert "was made for another model" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [weights.name]


def test_failing_reward_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--reward.name", "tests.test_trainer:RaisingReward") == 1
    error = capsys.readouterr().err
    assert "raised OSError: scoring server went away" in error
    assert "Traceback" not in error


def test_reward_that_fails_later_leaves_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(run, "--reward.name", "tests.test_trainer:LateFailure") == 1
    assert "went away later" in capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["iteration-000001"]
    assert train(run, "--resume") == 0
