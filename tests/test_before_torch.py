"""What `train` tells before PyTorch is loaded, and that its dry run tells the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from sage_fast.algorithm.objective import SURROGATES
from sage_fast.cli import main
from sage_fast.config.engines import RENOISES

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from sage_fast.cli import main; "
"""Start of a program in which importing PyTorch is an error."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Settings of a small run, beside a full folder and a file."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {path: 'random:testbed', dtype: float32}\noutput: none\n"
        "sampling: {num_frames: 9, height: 32, width: 32, steps: 3}\nkl: {strategy: none}\n"
        "train: {iterations: 1}\n"
    )
    return file


REFUSED = [
    (["--output", "full"], "output = 'full' already holds other files"),
    (["--output", "run"], "output = 'run' already holds a run: continue it with --resume"),
    (["--output", "config.yaml"], "output = 'config.yaml': a file; expected a new or empty folder"),
    (
        ["--sampling.sampler", "ode"],
        "sampler 'ode' with eta 0.5 and 3 steps has no stochastic step to train",
    ),
    (
        ["--sampling.eta", "0"],
        "sampler 'sage' with eta 0 and 3 steps has no stochastic step to train",
    ),
    (["--sampling.averaged_weights", "true"], "there is no average with train.ema_decay = 0"),
    (
        ["--objective.balanced_rewards", "true", "--reward.weights.vq", "1"],
        "the reward has one part with a weight, vq",
    ),
    (["--data.prompts", "none.txt"], "prompt file '{0}/none.txt': no such file"),
    (["--data.eval_prompts", "full"], "prompt file '{0}/full': a folder, not a file"),
    (["--reward.name", "testbd"], "reward.name = 'testbd': expected one of"),
    (["--reward.name", "no_such_module:Mine"], "no module 'no_such_module' is installed or in"),
    (
        ["--reward.several", "[{name: testbd, weights: {vq: 1}}]"],
        "reward.several[0].name = 'testbd': expected one of",
    ),
    (["--eval.judge", "testbd"], "eval.judge = 'testbd': expected one of"),
    (["--model.path", "testbd"], "model.path = '{0}/testbd': no such folder"),
    (
        ["--model.path", "no_such_module:Mine:testbed"],
        "no module 'no_such_module' is installed or in",
    ),
    (["--model.weights", "none"], "model.weights = '{0}/none': no such file"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED]
)
def test_it_is_told_before_pytorch_is_loaded(
    options: list[str],
    message: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With status 2 and in one line; nothing is written."""
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr(
        "sage_fast.commands.train.heavy_imports", lambda name: pytest.fail("PyTorch is loaded")
    )
    before = sorted(config.parent.rglob("*"))
    assert main(["train", str(config), *options]) == 2
    told = capsys.readouterr().err
    assert message.format(config.parent) in told
    assert told.count("\n") == 1
    assert sorted(config.parent.rglob("*")) == before


@pytest.mark.parametrize("index", [1, 3, 7, 9])
def test_no_module_of_it_imports_pytorch(index: int, config: Path) -> None:
    """In a process of its own."""
    options, message = REFUSED[index]
    code = WITHOUT_TORCH + f"sys.exit(main({['train', str(config), *options]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=config.parent, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert message.format(config.parent) in done.stderr


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED]
)
def test_the_dry_run_tells_the_same(
    options: list[str],
    message: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the output folder as a first line, before the plan: a plan may be for another machine."""
    monkeypatch.chdir(config.parent)
    status = main(["train", str(config), "--dry-run", *options])
    printed = capsys.readouterr()
    told = " ".join(
        (
            printed.err if status else printed.out.partition("loading PyTorch and diffusers")[2]
        ).split()
    )
    assert message.format(config.parent) in told
    assert (status == 0) == (options[0] == "--output")
    assert status or told.startswith("This run does not start here: output = ")


def test_what_the_dry_run_approves_has_no_such_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--dry-run", "--output", str(config.parent / "new")]) == 0
    assert "does not start here" not in capsys.readouterr().out


def test_missing_packages_are_told_by_the_dry_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sage_fast.config.rank_checks.importlib.util.find_spec", lambda name: None)
    assert main(["train", str(config), "--dry-run", "--train.engine", "zero1"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "This run does not start here: train.engine = 'zero1' needs deepspeed, which is not "
        "installed" in told
    )


def test_surrogates_say_the_same_without_pytorch() -> None:
    assert {name: not row.scores_rollout for name, row in SURROGATES.items()} == RENOISES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [],
            "args: no 'fps'; TestbedReward takes no arguments; --reward.args {} leaves out those "
            "of the settings file",
        ),
        (["--reward.name", "videoalign"], "args: no 'fps'; expected one of path, base"),
    ],
)
def test_arguments_that_a_reward_does_not_take(
    options: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint is true: what it says works."""
    config.write_text(config.read_text() + "reward: {name: clipscore, args: {fps: 2, width: 3}}\n")
    given = [*(options or ["--reward.name", "testbed"]), "--output", str(config.parent / "new")]
    assert main(["train", str(config), "--dry-run", *given]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert main(["train", str(config), "--dry-run", *given, "--reward.args", "{}"]) == (
        2 if options else 0
    )
