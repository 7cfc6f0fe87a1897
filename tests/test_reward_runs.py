"""Whole runs on two ranks whose rewards run beside the rollout and fail: the numbers are those of a
sound run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.callbacks.checkpoints import prune_checkpoints
from sage_fast.loading import load_setup, resolve
from sage_fast.rewards.http import HttpReward
from sage_fast.run_folder import RunFolder, iteration_of
from sage_fast.testbed.world import heldout_prompts
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics, write_json
from tests.fork_server import ForkServer
from tests.reward_faults import fingerprints, request
from tests.test_scores import gains
from tests.tiny import arguments, settings
from tests.waits import HANG

REPOSITORY = Path(__file__).parent.parent
PAPER = REPOSITORY / "configs" / "recipes" / "paper.yaml"
SMALL = arguments(
    train__iterations=2, train__prompts_per_iteration=2, train__group_size=2,
    train__optimizer_steps=1,
    train__batch_size=16, train__parity_gate="false", sampling__num_frames=5, sampling__steps=2,
    sampling__batch_size=1, eval__steps=1, eval__num_prompts=4, eval__seeds_per_prompt=1,
    eval__num_videos=1,
    eval__judge="null", tracking__trackers="[]",
    reward__name="tests.reward_faults:Fingerprint", reward__weights="{print: 1}",
    reward__max_dropped=0.25,
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


def on_two_ranks(server: ForkServer, run: Path, *options: str, ends: Sequence[int] = (0, 0)) -> str:
    """Train on two gloo ranks, started as torchrun would; check how they end, and return their
    log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    command = ["train", str(PAPER), "--output", str(run), *SMALL, *options]
    log = run.with_suffix(".log")
    ranks = [server.start(command, log, **shared, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    assert [server.wait(rank) for rank in ranks] == [*ends], log.read_text()
    return log.read_text()


def numbers(run: Path) -> list[dict[str, Any]]:
    """Metrics of each iteration, without times and the counts of failures."""
    apart = ("time/", "throughput/", "memory/", "reward/retried")
    return [
        {key: value for key, value in row.items() if not key.startswith(apart)}
        for row in read_metrics(run / "metrics.jsonl")
    ]


def test_two_ranks_with_rewards_beside_them_that_fail(server: ForkServer, tmp_path: Path) -> None:
    """A rank calls its reward for the check, for two evaluations of two videos, and for two samples
    per iteration."""
    sound, faulty = tmp_path / "sound", tmp_path / "faulty"
    on_two_ranks(server, sound)
    poison = heldout_prompts()[1]
    args = (
        f"{{folder: {tmp_path / 'faults'}, plan: [6 kill, 8 nan, 10 raise], how: raise, poison: "
        f"{poison}}}"
    )
    log = on_two_ranks(server, faulty, "--reward.workers", "1", "--reward.args", args)
    # One call is killed, one is not finite, one raises: each is scored again, so training has
    # exactly the same numbers.
    assert numbers(faulty) == numbers(sound)
    retried = [row["reward/retried"] for row in read_metrics(faulty / "metrics.jsonl")]
    assert sum(retried) >= 3
    assert [row["reward/dropped"] for row in read_metrics(faulty / "metrics.jsonl")] == [0, 0]
    assert "its process ended: signal SIGKILL; 1 of 1 videos had no scores" in log
    # A held-out video whose reward always fails is named, has no score, and is left out of the
    # comparison.
    assert (
        f"dropped a sample of {poison!r}: reward '{REPOSITORY}/tests.reward_faults:Fingerprint': "
        in log
    )
    assert "ValueError: wrong" in log
    expected = read_json(sound / "eval" / "after.json")
    found = read_json(faulty / "eval" / "after.json")
    assert found["prompts"] == expected["prompts"]
    assert found["prompts"][1] == poison
    assert found["reward"] == [
        None if i == 1 else value for i, value in enumerate(expected["reward"])
    ]
    assert found["parts"]["print"] == found["reward"]
    assert found["parts"]["watched"] == [None] * 4
    assert [row.pairs for row in gains(read_json(faulty / "eval" / "before.json"), found)] == [
        3,
        3,
        0,
    ]
    assert gains(expected, found)[0].pairs == 3
    assert (faulty / "report.html").is_file()
    for child in (tmp_path / "faults").glob("*/pid-*"):
        assert not Path("/proc", child.name[4:]).exists(), "they end with the run"


@pytest.fixture(scope="module")
def undisturbed(
    server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The numbers of a run on two ranks whose reward does nothing else."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    on_two_ranks(
        server,
        run,
        "--reward.name",
        "tests.reward_faults:Meddles",
        "--reward.args",
        "{what: nothing}",
    )
    return numbers(run)


@pytest.mark.parametrize(
    ("what", "note"),
    [
        ("destroy", "torch.distributed.destroy_process_group"),
        ("fork", ""),
        ("launcher", "os.environ of the launcher"),
        ("alarm", "signal.alarm"),
        ("event loop", "signal.set_wakeup_fd"),
        ("autocast", "torch.autocast's blocks"),
        ("optimizer", "torch.optim.adamw.AdamW.zero_grad"),
    ],
)
def test_two_ranks_are_what_they_were_whatever_a_reward_does(
    server: ForkServer, undisturbed: list[dict[str, Any]], tmp_path: Path, what: str, note: str
) -> None:
    run = tmp_path / "run"
    args = ("--reward.name", "tests.reward_faults:Meddles", "--reward.args", f"{{what: {what}}}")
    log = " ".join(on_two_ranks(server, run, *args).split())
    assert numbers(run) == undisturbed
    assert note in log
    assert len(list((run / "eval").glob("after.json"))) == 1


def test_a_rank_without_its_process_group_ends(server: ForkServer, tmp_path: Path) -> None:
    """It cannot be made again, and the ranks would each go on alone in one folder."""
    args = ("--reward.name", "tests.reward_faults:Meddles", "--reward.args", "{what: abort}")
    log = " ".join(on_two_ranks(server, tmp_path / "run", *args, ends=(1, 1)).split())
    assert "destroyed a process group of the run, so this rank ends" in log
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_draws_is_the_same_after_a_resume_and_beside_evaluations(
    server: ForkServer, tmp_path: Path, workers: int
) -> None:
    whole, parts, watched = (tmp_path / name for name in ("whole", "parts", "watched"))
    own = ["--reward.name", "tests.reward_faults:Draws", "--reward.workers", str(workers)]

    def train(run: Path, *options: str) -> None:
        log = run.with_suffix(".log")
        command = ["train", str(PAPER), "--output", str(run), *SMALL, *own, *options]
        assert server.wait(server.start(command, log)) == 0, log.read_text()

    train(whole)
    train(watched, "--eval.interval", "1")
    train(parts, "--train.iterations", "1")
    train(parts, "--train.iterations", "2", "--resume")
    assert numbers(parts) == numbers(whole) == numbers(watched)
    after = [read_json(run / "eval" / "after.json")["reward"] for run in (whole, parts, watched)]
    assert after[0] == after[1] == after[2]


def test_more_than_the_share_stops_the_run_with_a_checkpoint(
    server: ForkServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    args = (
        f"{{folder: {tmp_path / 'faults'}, plan: "
        f"[{', '.join(f'{i} sys.exit' for i in range(8, 40))}]}}"
    )
    command = ["train", str(PAPER), "--output", str(run), *SMALL, "--reward.args", args]
    assert server.wait(server.start(command, run.with_suffix(".log"))) == 1
    log = run.with_suffix(".log").read_text()
    assert (
        "2 of 4 samples have no score, more than reward.max_dropped = 0.25 of them; the last: "
        "dropped a sample" in log
    )
    assert re.search(r"tests/reward_faults\.py:\d+: SystemExit: 4", log)
    assert "stopped after 0 iterations; fix the cause, then continue with --resume" in log
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["iteration-000000"]


def test_the_best_checkpoint_is_told_by_the_videos_that_have_scores(tmp_path: Path) -> None:
    for iteration, rewards in ((1, [1.0, 2.0]), (2, [None, 4.0]), (3, [None, None])):
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)
        scores = {
            "iteration": iteration,
            "prompts": ["a", "b"],
            "seeds": [0, 1],
            "reward": rewards,
            "parts": {},
        }
        write_json(scores, tmp_path / "eval" / f"iteration-{iteration:06d}.json")
    prune_checkpoints(tmp_path, 1, {})
    assert [iteration_of(folder) for folder in RunFolder(tmp_path).checkpoints()] == [2, 3]


# -- before a run ----------------------------------------------------------------------------------


def test_rewards_are_checked_before_the_model_is_loaded_and_sampling_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[object] = []

    def fail(*args: object, **options: object) -> None:
        loaded.append(args)
        pytest.fail("the model")

    monkeypatch.setattr("sage_fast.loading.load_model", fail)
    with pytest.raises(
        UserError,
        match=r"reward.weights names 'red'; reward 'testbed' returns \['mq', 'ta', 'vq'\]",
    ):
        load_setup(resolve(settings(reward__weights={"red": 1})))
    with pytest.raises(
        UserError, match=r"eval.judge = '.*/tests.reward_faults:nothing': .* has no 'nothing'"
    ):
        load_setup(resolve(settings(eval__judge="tests.reward_faults:nothing")))
    for part in ("reward", "overall", "judge/x"):
        own = {"reward__name": "tests.reward_faults:Named", "reward__args": {"part": part}}
        with pytest.raises(
            UserError, match=rf"^reward.name = '.*tests.reward_faults:Named': .*{part!r}.*prefix"
        ):
            load_setup(resolve(settings(**own, reward__weights={part: 1})))
    assert not loaded
    with pytest.raises(pytest.fail.Exception, match="the model"):
        load_setup(
            resolve(settings(reward__name="no_such:Reward")),
            ["a small red ball moves left quickly"],
            rewards=False,
        )


PACKAGE = {
    "pyproject.toml": (
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'stranger'\nversion = '1'\n[tool.setuptools]\npackages = ['stranger']\n"
        "[project.entry-points.'sage_fast.rewards']\nstranger = 'stranger.scores:Scorer'\n"
    ),
    "stranger/__init__.py": "",
    "stranger/scores.py": (
        "class Scorer:\n    def __init__(self, *, scale, device):\n        self.scale, self.device "
        "= scale, device\n"
        "    def score(self, videos, prompts):\n        assert videos.device.type == self.device\n"
        "        return {'bright': self.scale * videos.mean((1, 2, 3, 4))}\n"
    ),
}


def test_serve_reward_finds_rewards_of_a_package_and_of_the_current_folder(tmp_path: Path) -> None:
    """Run sage-fast serve-reward as a console script, without the current folder on the path."""
    for name, text in PACKAGE.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps",
        "--no-index",
           "--no-build-isolation", "--target", str(tmp_path / "installed"),
           str(tmp_path / "source")]  # fmt: skip
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_rewards.py").write_text(
        "from tests.reward_faults import fingerprints\n"
        "def mine(videos, prompts):\n    return {'print': fingerprints(videos)}\n"
    )
    (here / "config.yaml").write_text(
        "sampling: {num_frames: 5, height: 16, width: 16}\nreward:\n  several:\n"
        "    - {name: stranger, args: {scale: 3.0}, device: cpu, weights: {bright: 1}}\n"
        "    - {name: 'my_rewards:mine', weights: {print: 1}, workers: 1}\n"
    )
    code = "import sys; from sage_fast.cli import main; sys.exit(main(sys.argv[1:]))"
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "serve-reward", "config.yaml", "--port", "0"], cwd=here,
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path / 'installed'}"},
    )  # fmt: skip
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line.startswith(
        f"serves stranger, {here}/my_rewards:mine (bright, print) at http://127.0.0.1:"
    ), line
    videos = torch.rand(2, 5, 3, 16, 16)
    parts = HttpReward(line.split()[-1]).score(request(videos), 60)
    sent = videos.half().float()
    assert torch.equal(parts["print"], fingerprints(sent)), "JSON holds every digit"
    torch.testing.assert_close(parts["bright"].float(), 3 * sent.mean((1, 2, 3, 4)))
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=HANG) == 0
    assert server.stdout.read().splitlines()[-1] == "ended"
