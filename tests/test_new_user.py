"""A new user's path through README and docs/tutorials/first-run.md: the wheel in its own
environment, no clone."""

import contextlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.cli import main
from sage_fast.commands.init import init
from sage_fast.config.loader import load
from sage_fast.config.shipped import gpus_of
from sage_fast.data.prompts import read_prompts
from sage_fast.eval.playback import read_video
from sage_fast.eval.video_folder import read_folder
from sage_fast.util.files import read_metrics
from tests.test_docs import Block, blocks, commands
from tests.tiny import FEW_STEPS, arguments
from tests.waits import wait_until

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
FOUR_BLOCKS = "one iteration of 4 blocks on an H100, random weights"
EVIDENCE_OF = {
    "demo": "run here on the testbed",
    "demo-i2v": "run here on the testbed",
    "demo-nft": "run here on the testbed",
    "official-480p": "settings of the authors; not run by this code",
    "hunyuanvideo15-480p": "one iteration on an H200, random weights",
    "hunyuanvideo15-480p-full": FOUR_BLOCKS,
    "hunyuanvideo15-480p-nft": FOUR_BLOCKS,
}
FILES = ["config.yaml", "heldout.txt", "my_rewards.py", "prompts.txt"]
# the last one makes every start slow
HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
SMALL = FEW_STEPS + arguments(
    train__prompts_per_iteration=2, train__group_size=3, train__batch_size=16,
    train__timestep_fraction=1.0,
    eval__num_prompts=2, eval__seeds_per_prompt=1, eval__num_videos=1, eval__interval=0,
)  # fmt: skip
README = CONFIGS.parent / "README.md"
QUICKSTART = CONFIGS.parent / "docs" / "tutorials" / "first-run.md"
WHERE = "import sage_fast, sage_fast.ops; print(sage_fast.__file__)\n"
CHECK = """
import torch
from sage_fast.testbed.tiny_model import BASE
def velocity(transformer):
    x = torch.randn(1, 65, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return transformer(
            x, torch.tensor([500.0]), torch.ones(1, 3, 32), torch.ones(1, 3, dtype=torch.int64),
            encoder_hidden_states_2=torch.zeros(1, 0, 8),
            encoder_attention_mask_2=torch.zeros(1, 0, dtype=torch.int64),
            image_embeds=torch.zeros(1, 0, 8), return_dict=False,
        )[0]
base = velocity(TestbedTransformer.from_pretrained(BASE / "transformer"))
print(float((velocity(transformer) - base).abs().max()))
"""


class User:
    """Runs commands of a fresh environment in a folder, as a shell would."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.bin, self.folder = environment / "bin", folder
        self.variables = {key: value for key, value in os.environ.items() if key not in HIDDEN}
        self.variables["PATH"] = f"{self.bin}:{os.environ['PATH']}"

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.bin / command, *arguments], cwd=self.folder, env=self.variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, command: str, *arguments: str) -> str:
        process = self.start(command, *arguments)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, f"{command} {arguments}:\n{out[-2000:]}{err[-4000:]}"
        return out

    def paste(self, block: Block) -> str:
        """Paste a block of a page into the shell; the next command starts in the folder where the
        block ended."""
        done = subprocess.run(
            ["bash", "-eu", "-c", block.text + "pwd"], cwd=self.folder, env=self.variables,
            text=True,
            capture_output=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        *printed, folder = done.stdout.splitlines()
        self.folder = Path(folder)
        return "\n".join(printed)

    def run_or_call(self, *words: str) -> str:
        """Run a command as `run` does in `make soak`, and in this process in `make test`, which
        starts quicker."""
        if "SAGE_FAST_SOAK" in os.environ:
            return self.run(*words)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(words[1:]) == 0
        return out.getvalue()

    def set_reward(self, section: str) -> None:
        config = self.folder / "config.yaml"
        text, count = re.subn(r"^reward:\n(?:  .*\n)+", section, config.read_text(), flags=re.M)
        assert count == 1
        config.write_text(text)


@pytest.fixture
def user(wheel: Path, tmp_path: Path) -> User:
    """A user whose environment has the wheel and this one's dependencies, but none of its editable
    installs."""
    environment, folder = tmp_path / "venv", tmp_path / "work"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    user = User(environment, folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python",
         environment / "bin" / "python",
         "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True, cwd=folder, env=user.variables,
    )  # fmt: skip
    site = next((environment / "lib").glob("python*/site-packages"))
    dependencies = next(path for path in sys.path if Path(path).name == "site-packages")
    # its own .pth files are not followed
    (site / "dependencies.pth").write_text(dependencies + "\n")
    return user


def test_from_the_wheel_to_weights_in_diffusers(user: User) -> None:
    """Follow docs/tutorials/first-run.md block by block with few steps and iterations, then
    README's first hour."""
    init_, reward, trial, train, look, weights, real, plan, _ = blocks(QUICKSTART)
    (section,) = re.findall(r"^```yaml\n(.*?)^```$", QUICKSTART.read_text(), re.M | re.S)

    printed = user.paste(init_)
    assert sorted(path.name for path in user.folder.iterdir()) == FILES
    assert "sage-fast train config.yaml" in printed
    (user.folder / "my_rewards.py").write_text(reward.text)
    stated = re.search(r"about (0\.\d+) and (0\.\d+)", QUICKSTART.read_text())
    assert stated is not None
    where, *printed = user.run("python", "-c", f"{WHERE}{trial.text}").splitlines()
    assert where.startswith(str(user.bin.parent)), "another sage_fast than the wheel's was imported"
    scores = re.findall(r"0\.\d+", "".join(printed))
    assert [f"{float(score):.2f}" for score in scores] == list(stated.groups())
    user.set_reward(section)

    run = user.folder / "runs" / "first"
    (words,) = commands(train)
    process = user.start(*words, *SMALL, "--train.iterations", "1000")
    wait_until(lambda: process.poll() is not None or len(read_metrics(run / "metrics.jsonl")) >= 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out[-2000:] + err[-4000:]
    assert "continue with --resume" in out + err
    long = [line for line in (out + err).splitlines() if len(line) > 80]
    assert [line for line in long if str(user.folder) not in line] == [], (
        "only a whole path may be longer"
    )
    assert "\r" not in out + err
    assert any(line.strip().startswith("1/1000  reward ") for line in out.splitlines())
    done = len(read_metrics(run / "metrics.jsonl"))
    user.run_or_call(*words, *SMALL, "--train.iterations", str(done + 1), "--resume")
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(done + 1))
    parts = [row["reward_part/direction"] + row["reward_part/whole"] for row in rows]
    assert [row["reward/mean"] for row in rows] == pytest.approx(parts)

    eval_, sample = commands(look)
    user.run_or_call(*eval_)
    user.run_or_call(*sample)
    sampled = user.folder / "samples" / "00-a-small-red-ball-moves-left-quickly.mp4"
    assert sampled.stat().st_size > 500
    own: dict[str, Any] = {}
    exec(compile(reward.text, "my_rewards.py", "exec"), own)
    for source in ("base", "first"):
        videos = read_folder(source, user.folder / "evaluation" / "videos" / source)
        frames = torch.stack([read_video(file) for file in videos.files if file])
        for part, expected in own["moves_and_stays"](frames, videos.prompts).items():
            # compression changes it, most of all the light of a frame that is nearly empty
            most = {"direction": 0.06, "whole": 0.3}[part]
            assert videos.scores[part] == pytest.approx(expected.tolist(), abs=most)
    (listed,) = re.findall(
        r"^\| in `runs/demo` \|.*\n\|---.*\n((?:\|.*\n)+)", README.read_text(), re.M
    )
    found = {file.name + "/" * file.is_dir() for file in run.iterdir()}
    first_cells = [row.split(" | ")[0] for row in listed.splitlines()]
    names = set(re.findall(r"`([\w./]+)`", " ".join(first_cells)))
    assert (
        names | {"run.lock"} | {name for name in found if name.startswith("config.until-")} == found
    )
    (run / "report.html").unlink()
    user.run_or_call("sage-fast", "report", "runs/first")
    assert (run / "report.html").stat().st_size > 10_000

    changed = float(user.run("python", "-c", weights.text + CHECK))
    assert changed > 0, "the trained weights give the velocity of the base model"

    user.paste(real)
    (words,) = commands(plan)
    planned = user.run_or_call(*words)
    assert "reward videoalign: 0.5 vq + 0.5 mq + 1 ta" in planned
    assert "8 GPUs" in planned

    followed = [words[:2] for block in blocks(QUICKSTART) for words in commands(block)] + [
        ["sage-fast", "report"]
    ]
    for first_hour in (
        block for block in blocks(README) if block.value == "tests/test_new_user.py"
    ):
        assert all(words[:2] in followed for words in commands(first_hour))
        for further in re.findall(r"--resume --train.iterations (\d+)", first_hour.text):
            # more than the last command did
            assert int(further) > load(CONFIGS / "demo.yaml").train.iterations


@pytest.mark.parametrize("name", SHIPPED)
def test_init_writes_what_its_configuration_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own settings point at the files beside the configuration; all others stay as
    shipped."""
    init(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    ours, theirs = (
        (file / leaf).read_text()
        for file, leaf in ((tmp_path, "config.yaml"), (CONFIGS, f"{name}.yaml"))
    )
    pairs = zip(ours.splitlines(), theirs.splitlines(), strict=True)
    differing = [line.split(":")[0].strip() for line, other in pairs if line != other]
    own_reward = ["name", "weights"] if name.startswith("demo") else []
    assert differing == ["output", "prompts", "eval_prompts", *own_reward]
    gpus, _ = gpus_of(name)
    expected = {*FILES, *(["slurm.sbatch"] if gpus > 1 else [])}
    data = load(CONFIGS / f"{name}.yaml").data
    if data.prompts.endswith(".jsonl"):
        shipped = [
            read_prompts(str(CONFIGS.parent / source))
            for source in (data.prompts, data.eval_prompts)
        ]
        expected = {file.replace(".txt", ".jsonl") for file in expected}
        expected |= {"images"}
        assert {*map(str, Path("images").iterdir())} == {
            prompt.image for prompt in itertools.chain(*shipped)
        }
        assert len(read_prompts("prompts.jsonl")) == len(shipped[0])  # their images are found
    assert sorted(os.listdir()) == sorted(expected)
    if name not in ("demo", "hunyuanvideo15-480p") and "SAGE_FAST_SOAK" not in os.environ:
        return  # a dry run of the 8.3 B model takes seconds
    assert main(["train", "config.yaml", "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out


def test_init_of_the_real_model_has_its_reward_and_prompts_of_real_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path, "hunyuanvideo15-480p")
    monkeypatch.chdir(tmp_path)
    config = load("config.yaml")
    assert config.reward == load(CONFIGS / "hunyuanvideo15-480p.yaml").reward
    assert config.reward.name == "videoalign"
    train, heldout = (
        Path(file).read_text().splitlines() for file in ("prompts.txt", "heldout.txt")
    )
    assert len(heldout) == len(set(heldout)) == config.eval.num_prompts
    assert len(train) == len(set(train)) >= 2 * config.train.prompts_per_iteration
    assert not set(train) & set(heldout)
    # longer than the captions of the testbed
    assert all(len(prompt.split()) > 8 for prompt in train + heldout)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_next_commands_of_init_can_be_pasted(name: str, tmp_path: Path) -> None:
    printed = init(tmp_path / "my run", name)
    assert f"cd '{tmp_path}/my run'" in printed
    commands = [line for line in printed.splitlines()[1:] if not line.startswith("  cd ")]
    assert max(map(len, commands)) <= 80


def test_init_does_not_obey_its_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "a\x1b[2J")]) == 0
    assert "a\\x1b[2J: wrote" in capsys.readouterr().out


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("mine\n")
    assert main(["init", str(tmp_path)]) == 2
    assert "already holds prompts.txt" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["prompts.txt"]
    assert main(["init", str(tmp_path / "prompts.txt")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "prompts.txt").read_text() == "mine\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_configuration_says_on_what_evidence(name: str) -> None:
    what, evidence = (CONFIGS / f"{name}.yaml").read_text().splitlines()[:2]
    assert what.startswith("# ")
    assert evidence == f"# Evidence: {EVIDENCE_OF.get(name, 'never run')}"


def test_init_lists_what_it_can_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[:-5] if not line.startswith(" ")] == sorted(SHIPPED)
    place = lines.index("paper-480p")
    assert lines[place + 1 : place + 3] == [
        "  SAGE-GRPO as the paper states it, else our defaults",
        "  Evidence: never run",
    ]
    assert lines[place + 3].startswith("  Plan: 8 GPUs of 80 GB, ")
    demo = lines[lines.index("demo") + 3]
    assert re.fullmatch(
        r"  Plan: two CPU cores, tensors of \S+ GiB, an iteration \S+ s, \S+ iterations \S+ min",
        demo,
    )
    assert any(line.startswith("  Plan: 1 GPU of 24 GB, ") for line in lines)
    for wrong in (["--list", str(tmp_path / "new")], []):
        assert main(["init", *wrong]) == 2
        assert "expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("demo", "'demo' comes with the package: sage-fast init my-run --config demo, then"),
        ("configs/demo.yaml", "'demo' comes with the package: sage-fast init my-run"),
        ("hunyuanvideo15-480", "did you mean 'hunyuanvideo15-480p', which comes with the package?"),
        ("mine", "expected a YAML file; sage-fast init --list shows those that are shipped"),
        ("mine.yaml", "config mine.yaml: no such file\n"),
    ],
)
def test_train_of_a_shipped_name_says_how_to_begin(
    name: str,
    hint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", name]) == 2
    assert hint in capsys.readouterr().err
    assert main(["eval", name]) == 2
    error = capsys.readouterr().err
    assert ("comes with the package" in hint) == ("comes with the package" in error)


def test_init_of_an_unknown_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "new"), "--config", "demmo"]) == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_reward_of_init_scores_what_it_says() -> None:
    """Score red, blue and flickering red for a prompt that names red, and red for a prompt without
    a colour."""
    from sage_fast.configs.my_rewards import MyReward  # type: ignore[import-not-found]

    still = torch.full((5, 3, 8, 8), 0.1)
    still[:, 0, 2:6, 2:6] = 0.9
    flicker = still * torch.tensor([1.0, 0.5, 1.0, 0.5, 1.0])[:, None, None, None]
    parts = MyReward().score(
        torch.stack([still, still.flip(1), flicker, still]), ["a red car"] * 3 + ["a car"]
    )
    assert {name: list(part.shape) for name, part in parts.items()} == {"color": [4], "steady": [4]}
    assert parts["color"][0] > 0.95
    assert parts["color"][1] == 0
    assert parts["color"][3] == 0
    assert parts["steady"].tolist()[:2] == [1, 1]
    assert parts["steady"][2] < 0.5
