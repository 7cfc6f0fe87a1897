"""The command a user types, on the testbed that ships with the package."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sage_fast.cli import COMMANDS, load, main, parse
from sage_fast.config.fields import settings_of
from sage_fast.config.loader import build, dump
from sage_fast.config.schema import Config
from sage_fast.run.checkpoint import write_manifest
from sage_fast.run.claim import Claim, claim_output
from sage_fast.run_folder import MANIFEST, RunFolder
from sage_fast.testbed.world import heldout_prompts
from sage_fast.trainer import Trainer
from sage_fast.util.errors import UserError, reason
from sage_fast.util.files import read_metrics, save_tensors, writing
from tests.waits import HANG

CONFIGS = Path(__file__).parent.parent / "configs"
PAPER = CONFIGS / "recipes" / "paper.yaml"
SMALL = [
    *("--train.iterations", "2", "--train.prompts_per_iteration", "2", "--train.group_size", "3"),
    *("--sampling.num_frames", "9", "--sampling.steps", "4", "--train.timestep_fraction", "1.0"),
    *("--eval.steps", "2", "--eval.num_prompts", "2"),
    *("--eval.seeds_per_prompt", "1", "--eval.num_videos", "1", "--train.batch_size", "16"),
    # so that an extended run stays on its curve
    *("--train.ema_decay", "0", "--train.schedule", "constant"),
]


def train(run: Path, *arguments: str) -> int:
    return main(["train", str(PAPER), "--output", str(run), "--quiet", *SMALL, *arguments])


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, sage_fast.cli as c; c._parser(c.COMMANDS); print({'torch', 'diffusers'} & "
        "sys.modules.keys())"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "sage_fast", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "train" in done.stdout
    assert "--sampling.eta 0.7" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_works_without_the_standard_streams(closed: str, tmp_path: Path) -> None:
    start = f"exec {shlex.quote(sys.executable)} -m sage_fast"
    for words in ("init here", "--version"):
        done = subprocess.run(
            ["bash", "-c", f"{start} {words} {closed}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "here" / "config.yaml").is_file()
    done = subprocess.run(
        ["bash", "-c", f"{start} init here {closed}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, "already holds" in done.stderr) == (2, "2>" not in closed)


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from sage_fast.cli import main; "
"""Start of a program in which importing PyTorch is an error."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward.name", "videoalgin"], "did you mean 'videoalign'?"),
        (
            ["--reward.several", "[{name: testbed, weights: {vq: 1}}, {name: clip, weights: {}}]"],
            "reward.several[1].name = 'clip': expected one of",
        ),
        (
            ["--reward.name", "no_such_module.inside:Reward"],
            "no module 'no_such_module' is installed or in",
        ),
        (["--eval.judge", "judge"], "eval.judge = 'judge': expected one of"),
    ],
)
def test_a_wrong_name_of_a_reward_leaves_no_run(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_help_of_train_lists_every_setting_in_80_columns() -> None:
    code = WITHOUT_TORCH + "main(['train', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = " ".join(done.stdout.split())
    for name, setting in settings_of(Config).items():
        assert f"\n  --{name} " in done.stdout
        assert setting.range in words
    samplers = "sage,flow,dance,cps,dance-precise,precise,ode"
    assert f"--sampling.sampler {{{samplers}}}\n        Rule of a denoising step" in done.stdout
    assert "(at least 0 and at most 10; default: 0.5)" in done.stdout
    for command in ("sample", "eval", "profile"):
        done = subprocess.run(
            [sys.executable, "-m", "sage_fast", command, "--help"], capture_output=True, text=True
        )
        assert "sage-fast train --help" in done.stdout


def test_every_option_says_what_it_is() -> None:
    missing: list[tuple[str, ...]] = []

    def add(*words: str, help: str = "", **others: object) -> None:
        missing.extend([words] * (len(help) < 5))

    for name in COMMANDS:
        load(name).add_arguments(add)
    assert not missing


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sage-fast tr", ["train"]),
        ("sage-fast train c.yaml --dr", ["--dry-run"]),
        (
            "sage-fast eval runs/demo --sampling.sh",
            ["--sampling.shift", "--sampling.shared_initial_noise"],
        ),
        ("sage-fast train c.yaml --kl.strategy ", ["none", "fixed", "stepwise", "moving", "dual"]),
        ("sage-fast sample c.yaml --model.attention=fl", ["flash", "flash3", "flash4"]),
    ],
)
def test_completion(line: str, expected: list[str]) -> None:
    """Do what bash does on the tab key; the answer comes on file descriptor 8."""
    command = f'{sys.executable} -c "{WITHOUT_TORCH} main()" 8>&1 1>/dev/null 9>/dev/null'
    protocol = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    protocol |= {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
    }
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=os.environ | protocol
    )
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    # argparse itself ignores that nobody reads its help
    [("['train', '--help']", 0), ("['report', 'x']", 141)],
)
def test_a_reader_that_goes_away_is_no_error(arguments: str, status: int) -> None:
    """A reader may close the pipe early, as in `sage-fast train --help | head -1`."""
    code = (
        "import sys, sage_fast.cli as c, sage_fast.commands.report as m; m.run = lambda *_: "
        f"print('x'); sys.exit(c.main({arguments}))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (status, b"")


def test_something_is_said_before_pytorch_is_imported(tmp_path: Path) -> None:
    for command in (["train", str(PAPER), "--output", str(tmp_path / "run")], ["eval", str(PAPER)]):
        code = WITHOUT_TORCH + f"main({command!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == f"sage-fast {command[0]}: loading PyTorch and diffusers\n"
        assert "ModuleNotFoundError" in done.stderr
        quiet = subprocess.run(
            [sys.executable, "-c", code.replace("])", ", '--quiet'])")], capture_output=True
        )
        assert quiet.stdout == b""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["train", "\x1b[2J.yaml"], 2, "config \\x1b[2J.yaml: no such file"),
        (["train", str(PAPER.parent), "--resume"], 2, "no run to resume there"),
        (
            ["train", "rnus/demo", "--resume"],
            2,
            "'rnus/demo': no such file or folder; expected a YAML file or a run folder",
        ),
        (
            ["sample", str(PAPER), "--prompt", "a cat", "--prompt", " "],
            2,
            "--prompt ' ': the prompt is empty",
        ),
        (["init", "mine", "--config", "demmo"], 2, "did you mean 'demo'?"),
        (
            ["evaluate", "runs/demo"],
            2,
            "sage-fast evaluate: no such command; expected one of init, train, ",
        ),
        (["evaluate", "runs/demo"], 2, "did you mean 'eval'?"),
        (["init", "mine"], 0, "wrote config.yaml, my_rewards.py, prompts.txt, heldout.txt"),
        (
            ["init", "real", "--config", "hunyuanvideo15-480p"],
            0,
            "wrote config.yaml, my_rewards.py, slurm.sbatch, prompts.txt, heldout.txt",
        ),
    ],
)
def test_what_needs_no_pytorch_does_not_wait_for_it(
    arguments: list[str], status: int, message: str, tmp_path: Path
) -> None:
    code = WITHOUT_TORCH + f"sys.exit(main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == status, done.stderr
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.prompts", "missing.txt"], "/missing.txt': no such file"),
        (["--data.prompts", "testbedd:train"], "or .jsonl, or 'testbed:train'"),
        (["--dry-run", "--gpus", "64"], "samples an iteration for 64 ranks"),
        (["--output", str(PAPER.parent)], "already holds other files"),
    ],
)
def test_settings_that_do_not_fit_leave_no_run(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["/proc/run", "/dev/null/run"])
def test_an_output_that_cannot_be_made_is_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(PAPER), "--output", name, *SMALL]) == 2
    error = capsys.readouterr().err
    assert f"output = '{name}': cannot be made: " in error
    assert "; choose another folder with --output" in error


@pytest.mark.parametrize("option", [[], ["--resume"]])
def test_an_output_that_is_a_link_to_nothing_is_refused(
    option: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "gone")
    assert main(["train", str(PAPER), "--output", str(link), *option]) == 2
    error = capfd.readouterr().err
    assert str(link) in error
    assert "a link to nothing" in error
    assert option or "expected a new or empty folder" in error
    assert [*tmp_path.iterdir()] == [link]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder; what the run printed is in the file `printed` beside it."""
    run = tmp_path_factory.mktemp("run") / "demo"
    with (run.parent / "printed").open("w") as printed, contextlib.redirect_stdout(printed):
        assert main(["train", str(PAPER), "--output", str(run), *SMALL]) == 0
    return run


def test_a_run_says_how_long_it_still_takes(finished_run: Path) -> None:
    lines = [
        line
        for line in (finished_run.parent / "printed").read_text().splitlines()
        if "  kl " in line
    ]
    assert len(lines) == 2
    assert all(re.match(r" +loss -?\d\.\de[+-]\d\d  kl \d", line) for line in lines)
    assert all(
        re.search(r"  ratio within \d\.\de-\d\d of 1, \d+ % clipped$", line) for line in lines
    )
    assert "iteration 2 of" not in (log := (finished_run / "logs" / "rank-000.log").read_text())
    assert [line in log for line in lines] == [True] * 2
    assert max(map(len, lines)) <= 80
    times = [
        line
        for line in (finished_run.parent / "printed").read_text().splitlines()
        if line.endswith(" left")
    ]
    assert all(re.search(r"\d s, \d\d:\d\d left$", line) for line in times)
    assert len(times) == 2
    assert times[-1].endswith(" 00:00 left")
    assert max(map(len, times)) <= 80


def test_a_run_leaves_everything(finished_run: Path) -> None:
    run = finished_run
    for name in (
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "report.html",
        "eval/before.json",
        "eval/after.json",
    ):
        assert (run / name).stat().st_size > 0, name
    assert (run / "weights" / "pytorch_lora_weights.safetensors").is_file()
    assert list((run / "tensorboard").glob("events*"))
    assert list((run / "checkpoints").iterdir())
    before, after = (
        sorted(p.name for p in (run / "videos" / n).glob("*.mp4")) for n in ("before", "after")
    )
    assert before == after
    assert len(before) <= 2  # the first one, and the one with the largest gain
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1]
    evaluations = [
        json.loads((run / "eval" / f"{n}.json").read_text()) for n in ("before", "after")
    ]
    assert evaluations[0]["seeds"] == evaluations[1]["seeds"]
    assert evaluations[0]["reward"] != evaluations[1]["reward"]
    # the judge in configs/recipes/paper.yaml
    judged = [scores["parts"]["judge/color"] for scores in evaluations]
    assert judged[0] != judged[1]


def test_settings_before_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """They may stand anywhere; without a configuration their values are not taken for one."""
    words = [
        "train",
        "--sampling.eta",
        "0.7",
        "--seed=5",
        str(PAPER),
        "--resume",
        "--output",
        "o",
        "--train.grad_clip",
    ]
    options, overrides = parse([*words, "-1"])
    assert (options.config, options.resume) == (str(PAPER), True)
    assert overrides == {"sampling.eta": "0.7", "seed": "5", "output": "o", "train.grad_clip": "-1"}
    with pytest.raises(SystemExit):
        main(["train", "--train.iterations", "5"])
    assert "the following arguments are required: CONFIG" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "usage: sage-fast train CONFIG [OPTION ...]" in capsys.readouterr().out


def test_output_that_holds_another_run(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished_run / "metrics.jsonl").read_bytes()
    assert train(finished_run) == 2
    error = capsys.readouterr().err
    assert "already holds a run" in error
    assert "--resume" in error
    assert (finished_run / "metrics.jsonl").read_bytes() == before


def test_sample_and_eval_and_report_of_a_run(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = "a small red ball moves left quickly"
    assert (
        main(
            ["sample", str(finished_run), "--prompt", prompt, "--folder", str(tmp_path), "--quiet"]
        )
        == 0
    )
    assert (tmp_path / "00-a-small-red-ball-moves-left-quickly.mp4").stat().st_size > 500
    assert (
        main(["eval", str(finished_run), "--json", str(tmp_path / "scores.json"), "--quiet"]) == 0
    )
    after = json.loads((finished_run / "eval" / "after.json").read_text())
    scores = json.loads((tmp_path / "scores.json").read_text())
    # the saved weights are the trained ones
    assert scores["reward"] == pytest.approx(after["reward"], rel=1e-4)
    assert "ta" in capsys.readouterr().out
    assert scores["iteration"] == 2
    assert main(["eval", str(finished_run), "--json", "/dev/full", "--eval.num_prompts", "1"]) == 1
    out, error = capsys.readouterr()
    assert not list(tmp_path.glob("evaluation*"))
    assert out.startswith(
        f"weights of iteration 2: {finished_run}/weights\nsage-fast eval: loading PyTorch"
    )
    assert error.splitlines()[-1] == "sage-fast eval: '/dev/full': No space left on device"
    assert main(["report", str(finished_run)]) == 0


def test_an_evaluation_keeps_its_videos_table_and_page(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("evaluation", "evaluation-2"):
        assert main(["eval", "base", str(finished_run), "--eval.num_prompts", "1", "--quiet"]) == 0
        assert {file.name for file in Path(name).iterdir()} == {
            "evaluation.html",
            "evaluation.md",
            "videos",
        }
        assert capsys.readouterr().out.endswith(f"\n{name}/evaluation.html\n")


def test_newest_weights_of_a_run(tmp_path: Path) -> None:
    def folders(*names: str) -> None:
        for name in names:
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "manifest.json").write_text('{"files": {}}')

    def weights(iteration: int) -> None:
        (tmp_path / "weights").mkdir()
        write_manifest(tmp_path / "weights", [], iteration=iteration)

    with pytest.raises(UserError, match="neither a checkpoint nor weights"):
        RunFolder(tmp_path).newest_weights()
    folders(
        "checkpoints/iteration-000020",
        "checkpoints/iteration-000040",
        "checkpoints/iteration-000060.partial",
    )
    assert RunFolder(tmp_path).newest_weights() == (
        tmp_path / "checkpoints" / "iteration-000040",
        40,
    )
    weights(60)
    folders("checkpoints/iteration-000060")
    assert RunFolder(tmp_path).newest_weights() == (tmp_path / "weights", 60)
    folders("checkpoints/iteration-000070")  # resumed, and stopped again
    assert RunFolder(tmp_path).newest_weights() == (
        tmp_path / "checkpoints" / "iteration-000070",
        70,
    )
    folders("checkpoints/iteration-000080")
    (tmp_path / "weights" / MANIFEST).write_text('{"itera')
    assert RunFolder(tmp_path).newest_weights() == (
        tmp_path / "checkpoints" / "iteration-000080",
        80,
    )


def test_resume_gives_the_same_run(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "resumed"
    assert train(run, "--train.iterations", "1", "--train.checkpoint_interval", "1") == 0
    capsys.readouterr()
    assert main(["train", str(PAPER), "--output", str(run), *SMALL, "--resume"]) == 0
    assert "resumed after 1 iteration" in capsys.readouterr().out
    whole, resumed = (
        [
            {
                key: value
                for key, value in row.items()
                if not key.startswith(
                    ("time/", "throughput/", "memory/", "log_prob/", "kl/rounding")
                )
            }
            for row in read_metrics(folder / "metrics.jsonl")
        ]
        for folder in (finished_run, run)
    )
    assert resumed == whole
    before = {path: path.read_bytes() for path in run.glob("*.*")}
    assert (
        train(run, "--resume", "--train.iterations", "3", "--train.ema_decay", "0.9") == 2
    )  # there is no average to continue
    assert {path: path.read_bytes() for path in run.glob("*.*")} == before


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("run.json", "run.json: not valid JSON"),
        (
            "checkpoints/iteration-000002/training/state.json",
            "no checkpoint can be used (iteration-000002: training/state.json has",
        ),
        ("metrics.jsonl", "metrics.jsonl, line 3: not a row of metrics: 'half'"),
    ],
)
def test_a_damaged_file_is_named_when_its_run_is_resumed(
    file: str, message: str, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    with (run / file).open("a") as damaged:
        damaged.write("half\n")
    assert train(run, "--resume") == 2
    assert message in capsys.readouterr().err


def test_only_one_of_two_runs_gets_the_folder(tmp_path: Path) -> None:
    config = build({"output": str(tmp_path / "run")})
    first, second = (Claim(tmp_path / "run" / "run.lock") for _ in range(2))
    claim_output(first, tmp_path / "run", dump(config))
    with pytest.raises(UserError, match="another run began there while this one was loading"):
        claim_output(second, tmp_path / "run", dump(config))
    first.check()  # the one that was refused has not taken it


def test_dry_run_plans_the_real_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = CONFIGS / "hunyuanvideo15-480p.yaml"
    arguments = ["--output", str(tmp_path / "none")]
    assert main(["train", str(config), "--dry-run", *arguments]) == 0
    plan = capsys.readouterr().out
    assert "8.3" in plan
    assert "32,760" in plan or "32760" in plan
    assert not (tmp_path / "none").exists()


def test_dry_run_for_a_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(CONFIGS / "hunyuanvideo15-480p.yaml")]
    assert main([*command, "--dry-run", "--gpus", "4"]) == 0
    assert "4 GPUs" in capsys.readouterr().out
    assert main([*command, "--dry-run", "--gpus", "33"]) == 2
    assert (
        "32 samples an iteration for 33 ranks; expected at least one each"
        in capsys.readouterr().err
    )
    assert main([*command, "--dry-run", "--gpus", "0"]) == 2
    assert "--gpus 0: expected at least 1" in capsys.readouterr().err
    assert main([*command, "--gpus", "8"]) == 2
    assert "torchrun --nproc-per-node 8 -m sage_fast train" in capsys.readouterr().err


REAL = str(CONFIGS / "hunyuanvideo15-480p.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward.name", "videoalgin"], "did you mean 'videoalign'?"),
        (["--reward.args", "{}"],
         "reward.name = 'videoalign': args: missing a required argument: 'path'"),
        (["--reward.args.pth", "x"], "args: no 'pth'; expected one of path"),
        (["--reward.args.path", "./nowhere"],
         "reward.args.path = './nowhere': no such folder; expected one with "
                                              "model_config.json, or a hub id"),
        (["--reward.args.path", "configs"], "/configs': expected a folder that holds model_config"),
        (["--reward.args.base", "configs"], "/configs': expected a folder that holds config.json"),
        (["--reward.name", "json:dumps"], "takes no args"),
        (["--reward.name", "no_such_rewards:MyReward"], "no module 'no_such_rewards'"),
        (["--eval.judge", "videoalign"],
         "eval.judge = 'videoalign': args: missing a required argument: 'path'"),
        (["--data.prompts", "none.jsonl"], "/none.jsonl': no such file"),
        (["--data.eval_prompts", "testbed:heldout"],
         "data.eval_prompts = 'testbed:heldout': captions of the testbed's "
                                                     "balls, not for model.path = "
                                                     "'hunyuanvideo-community/"),
        (["--gpu-memory", "0"], "--gpu-memory 0: expected a number above 0"),
    ],
)  # fmt: skip
def test_dry_run_finds_what_the_run_would_stop_at(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", REAL, "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_the_testbeds_captions_is_refused_with_another_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    captions = tmp_path / "captions.txt"
    captions.write_text("\n".join(heldout_prompts()))
    assert main(["train", REAL, "--dry-run", "--data.eval_prompts", str(captions)]) == 2
    assert (
        "captions.txt': captions of the testbed's balls, not for model.path"
        in capsys.readouterr().err
    )


def test_dry_run_warns_of_guidance_in_evaluations_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "train",
                str(PAPER),
                "--dry-run",
                "--kl.strategy",
                "none",
                "--eval.guidance_scale",
                "6",
            ]
        )
        == 0
    )
    assert "warning: sampling.guidance_scale = 1 in training and eval" in " ".join(
        capsys.readouterr().out.split()
    )


def test_dry_run_says_what_is_trained_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    for file in ("model_config.json", "checkpoint-7/model.pth", "config.json"):
        (tmp_path / file).write_text("{}")  # must exist; only a run reads it
    given = ["--reward.args", f"{{path: {tmp_path}, base: Qwen/Qwen2-VL-2B-Instruct}}"]
    assert main(["train", REAL, "--dry-run", *given, "--gpus", "8", "--gpu-memory", "96"]) == 0
    printed = capsys.readouterr().out
    for line in (
        f"{CONFIGS}/prompts/train.txt: 64 prompts",
        f"{CONFIGS}/prompts/heldout.txt: 32 held-out prompts, of which 32 are evaluated",
        "reward videoalign: 0.5 vq + 0.5 mq + 1 ta",
        "reward.args.base = 'Qwen/Qwen2-VL-2B-Instruct': no folder and not in the hub's",
    ):
        assert f"\n  {line}" in printed
    assert " GiB of a card of 96 GB\n" in printed
    assert "reward.args.path" not in printed
    assert max(len(line) for line in printed.splitlines() if str(CONFIGS) not in line) <= 80, (
        "paths are whole"
    )
    assert main(["train", REAL, "--gpu-memory", "96"]) == 2
    assert "--gpu-memory goes with --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling.etta", "1"], "did you mean 'sampling.eta'"),
        (["--sampling.eta"], "--sampling.eta needs a value"),
        (["--sampling.eta", "--train.iterations", "3"], "--sampling.eta needs a value"),
        (["--lr", "1e-4"], "unknown option --lr; did you mean --train.learning_rate?"),
        (["--kl_coef", "0.1"], "unknown option --kl_coef; did you mean --kl.lambda_max?"),
        (["--steps=3"], "unknown option --steps; did you mean --sampling.steps or --eval.steps?"),
        (["--fsdp"], "unknown option --fsdp; did you mean --train.engine?"),
        (["--dry"], "unknown option --dry; see sage-fast train --help"),
        (["--config", "a.yaml"], "unknown option --config; the YAML file comes first, without an"),
        (["--resume_from_checkpoint=latest"], "`sage-fast train RUN --resume` continues a run"),
        (["--gradient_accumulation_steps", "2"], "; it follows: an update has all samples of an"),
        (["--wandb"], "unknown option --wandb; did you mean --tracking.trackers?"),
        (["--sampling.eta="], "--sampling.eta: the value is empty"),
        (["--sampling", "3"], "'sampling' is a section of settings: sampling.sampler"),
        (["--model.path", "@file"], "--model.path '@file': not a YAML value"),
        (["stray"], "unknown argument stray; see sage-fast train --help"),
        (["--model.path", "./no/such/folder"], "/no/such/folder': no such folder"),
        (["--model.weights", "no/such/file"], "/no/such/file': no such file"),
        (["--data.prompts", "missing.txt"], "missing.txt': no such file; expected UTF-8 text"),
        (
            ["--reward.name", "json:dmups"],
            "json has no 'dmups' that can be called; expected one of",
        ),
        (
            ["--reward.name", "no_such_module:Reward"],
            "no module 'no_such_module' is installed or in",
        ),
        (
            ["--reward.name", "videoalignment"],
            "did you mean 'videoalign'?; or 'package.module:name'",
        ),
        (
            ["--eval.judge", "testbed_judge"],
            "'testbed_judge': expected one of clipscore, ocr, pickscore, testbed, testbed-i2v, "
            "testbed-judge, videoalign, vlm",
        ),
        (["--sampling.sampler", "ode"], "no stochastic step"),
    ],
)
def test_messages(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize(
    ("word", "instead"),
    [("resume", "train RUN --resume"), ("grid", "studies.grid"), ("push", "hf upload")],
)
def test_what_is_no_command_points_to_what_there_is(
    word: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "runs/first"]) == 2
    assert instead in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        (["compare", "run", "--output", "out"], "option --output"),
        (["compare", "--sampling.eta", "3", "run"], "option --sampling.eta"),
        (["compare", "run", "--train.seed=3"], "option --train.seed"),
        (["doctor", "extra"], "argument extra"),
    ],
)
def test_commands_without_settings_do_not_speak_of_them(
    words: list[str], unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert (
        capsys.readouterr().err
        == f"sage-fast {words[0]}: unknown {unknown}; see sage-fast {words[0]} --help\n"
    )


def test_word_unknown_to_the_testbed_is_found_before_the_run_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("a small purple ball moves left quickly\n")
    assert train(tmp_path / "run", "--data.prompts", str(tmp_path / "prompts.txt")) == 2
    assert 'does not know "purple"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_said_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(PAPER)]) == 2
    assert capsys.readouterr() == (
        "",
        "sage-fast sample: give at least one --prompt, or --prompts FILE\n",
    )
    for command in (["eval", str(PAPER)], ["bench"]):
        assert main([*command, "--json", str(tmp_path)]) == 2
        assert f"--json '{tmp_path}': a folder; expected a file" in capsys.readouterr().err


def test_a_file_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for command in (
        ["sample", str(PAPER), "--prompt", "a small red ball"],
        ["profile", str(PAPER)],
        ["compare", "."],
    ):
        assert main([*command, "--folder", "file"]) == 2
        assert "--folder 'file': a file; expected a folder" in capsys.readouterr().err
    assert main(["train", str(PAPER), "--output", "file"]) == 2
    assert "output = 'file': a file; expected a new or empty folder" in capsys.readouterr().err


def test_output_is_the_folder_that_a_command_writes(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As for `train`; and it is no setting of the run that is sampled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACE", "of the environment")
    sample = ["sample", str(finished_run), "--prompt", "a small red ball moves left slowly"]
    assert main([*sample, "--quiet", "--output=$PLACE/videos"]) == 0
    assert list(Path("of the environment/videos").glob("*.mp4"))
    assert main(["export", str(finished_run), "--output", "exported"]) == 0
    assert Path("exported", "README.md").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"of the environment", "exported"}


@pytest.mark.parametrize(
    "words",
    [
        ["sample", str(PAPER), "--prompt", "a small red ball", "--folder", "one"],
        ["eval", str(PAPER), "--folder", "one"],
        ["profile", str(PAPER), "--folder", "one"],
        ["export", ".", "one"],
    ],
    ids=lambda words: words[0],
)
def test_a_folder_is_named_once(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--output", "two"]) == 2
    error = capsys.readouterr().err
    assert "'one'" in error
    assert "--output 'two': both name the folder to write; give one" in error
    assert not list(tmp_path.iterdir())


def test_an_export_without_a_folder_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "."]) == 2
    assert "no FOLDER is given" in capsys.readouterr().err


def test_a_mistyped_run_gets_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/first").mkdir(parents=True)
    for file in ("config.yaml", "run.json"):
        Path("runs/first", file).touch()
    for command in ("compare", "report", "export", "sample", "eval"):
        words = {"export": ["out"], "sample": ["--prompt", "a"]}.get(command, [])
        assert main([command, "runs/frist", *words]) == 2
        error = capsys.readouterr().err
        assert "'runs/frist': no such file or folder; expected a" in error
        assert error.endswith("did you mean 'runs/first'?\n")
    assert main(["train", "runs/first"]) == 2
    assert (
        "such as runs/first/config.yaml; --resume continues the run in it"
        in capsys.readouterr().err
    )


def test_rollouts_that_fit_nowhere_are_refused_before_a_run_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr("sage_fast.parallel.stored_rollouts.free_bytes", lambda device: 2**30)
    assert train(run, "--train.group_size", "500000") == 2
    assert "are free; lower train.group_size" in capsys.readouterr().err
    assert not run.exists()


def test_lora_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "pytorch_lora_weights.safetensors"
    factors = {"A": torch.zeros(4, 2048), "B": torch.zeros(2048, 4)}
    save_file(
        {
            f"transformer_blocks.0.attn.to_q.lora_{x}.weight": factor
            for x, factor in factors.items()
        },
        weights,
    )
    assert train(tmp_path / "run", "--model.weights", str(weights)) == 2
    assert "was made for another model" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [weights.name]


def test_a_failing_reward_is_found_before_the_run_and_shows_its_own_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--reward.name", "tests.test_trainer:RaisingReward") == 2
    error = capsys.readouterr().err
    assert "/tests.test_trainer:RaisingReward': failed on made-up videos [2, 9, 3, 32, 32]" in error
    assert re.search(r"test_trainer.py:\d+: OSError: scoring server went away\n", error)
    assert 'raise OSError("scoring server went away")' in error, "its own line of source"
    assert "sage_fast/rewards" not in error, "no frame of ours"
    assert not (tmp_path / "run").exists()


def test_reward_that_fails_later_leaves_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, "--reward.name", "tests.test_trainer:LateFailure") == 1
    assert "went away later" in capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["iteration-000001"]
    assert train(run, "--reward.name", "tests.test_trainer:LateFailure", "--resume") == 0


def test_a_mistake_of_the_program_keeps_its_traceback_and_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iteration = Trainer.iteration

    def failing(self: Trainer, index: int) -> dict[str, object]:
        if index == 1:
            raise ValueError("a mistake of the program")
        return iteration(self, index)

    monkeypatch.setattr(Trainer, "iteration", failing)
    with pytest.raises(ValueError, match="a mistake of the program"):
        train(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "iteration-000001"
    ]


def test_exit_status_of_a_mistake_of_the_program() -> None:
    code = (
        "import sys, sage_fast.cli as c, sage_fast.commands.report as m\nm.run = lambda *_: "
        "int('x')\n"
        "sys.exit(c.main(['report', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: invalid literal for int() with base 10: 'x'\n")


THREADS = """
import atexit, sys, threading, time, sage_fast.cli as cli, sage_fast.commands.report as command
from concurrent.futures import ThreadPoolExecutor

def run(*_):
    threading.Thread(target=time.sleep, args=(0.05,), name="brief").start()
    {}
    return 3

cli.THREAD_GRACE, command.run, sys.argv = 3.0, run, ["sage-fast", "report", "x"]
atexit.register(print, "exit functions ran", file=sys.stderr)
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("line", "status", "named"),
    [
        ("threading.Thread(target=time.sleep, args=(1000,), name='poll').start()", 3, "poll"),
        ("kept = ThreadPoolExecutor(1, 'pool'); kept.submit(time.sleep, 1000)", 3, "pool_0"),
        (
            "threading.Thread(target=time.sleep, args=(1000,), name='poll').start(); 1 / 0",
            1,
            "poll",
        ),
        ("kept = ThreadPoolExecutor(1, 'pool'); kept.submit(int).result()", 3, ""),
        ("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", 3, ""),
    ],
)
@pytest.mark.fault(
    "a reward leaves a thread running that Python waits for at its end",
    "ends with the command's status; a note names the thread",
)
def test_a_thread_that_is_left_running_does_not_keep_the_process(
    line: str, status: int, named: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS.format(line)], capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == status
    assert done.stderr.count("exit functions ran\n") == 1
    assert ("ZeroDivisionError" in done.stderr) == (status == 1)
    notes = [text for text in done.stderr.splitlines() if text.startswith("note: ")]
    assert notes == [f"note: threads that still run end with the process: {named}"] * bool(named)


@pytest.mark.parametrize(
    ("folder", "why"),
    [("a" * 300, "File name too long"), ("file/run", "Not a directory")],
    ids=["long", "file"],
)
def test_errors_of_the_operating_system_are_one_line(
    folder: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert train(tmp_path / folder) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(
        f"sage-fast train: output = '{tmp_path}/{folder}': cannot be made: {why}; "
    )


def test_a_full_disk_is_named_by_what_is_written(tmp_path: Path) -> None:
    def full() -> None:
        with writing(tmp_path), Path("/dev/full").open("w") as file:
            file.write("x")
            file.flush()

    with pytest.raises(OSError, match="No space left") as error:
        full()
    assert reason(error.value) == f"'{tmp_path}': No space left on device"
    with pytest.raises(OSError, match="free there") as error:
        save_tensors(tmp_path / ("a" * 300), {"a": torch.zeros(9)}, {})
    assert reason(error.value).startswith(f"'{tmp_path}/aaa")
    assert "File name too long" in reason(error.value)
    assert reason(ConnectionError("no answer")) == "ConnectionError: no answer"
    assert reason(ConnectionError()) == "ConnectionError: "


def test_a_mistyped_run_is_named_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "config.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    for mistyped in ("runs/dmo", "rnus/demo"):
        for command in (["eval"], ["train", "--resume"], ["sample", "--prompt", "a cat"]):
            assert main([*command, mistyped]) == 2
            assert f"'{mistyped}': no such file or folder; expected" in (
                error := capsys.readouterr().err
            )
            assert "did you mean 'runs/demo'?" in error
