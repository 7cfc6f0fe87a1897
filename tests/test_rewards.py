"""Rewards by name: those of the current folder, and what a mistake in one looks like."""

import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.config.schema import RewardConfig
from sage_fast.rewards import CompositeReward, Judge, load_reward
from sage_fast.rewards.dry_run import dry_run_reward
from sage_fast.rewards.failures import RewardFailure
from sage_fast.rewards.inline import InProcess
from sage_fast.util.errors import RewardError, UserError
from tests.waits import HANG


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, which is not on the path, as for a console script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def message(name: str) -> str:
    with pytest.raises(UserError) as error:
        load_reward(RewardConfig(name=name))
    return str(error.value)


def test_a_reward_in_the_current_folder(here: Path) -> None:
    (here / "my_rewards.py").write_text(
        "class MyReward:\n"
        "    def __call__(self, videos, prompts):\n"
        "        return {'red': videos[:, :, 0].mean((1, 2, 3))}\n"
        "def blue(videos, prompts):\n    return {'blue': videos[:, :, 2].mean((1, 2, 3))}\n"
    )
    videos = torch.zeros(2, 5, 3, 8, 8)
    videos[1, :, 0] = 1
    assert load_reward(RewardConfig(name="my_rewards:MyReward"))(videos, ["a", "b"])["red"].tolist() == [0, 1]
    assert load_reward(RewardConfig(name="my_rewards:blue"))(videos, ["a", "b"])["blue"].tolist() == [0, 0]


def test_what_is_installed_wins(here: Path) -> None:
    (here / "tabnanny.py").write_text("def reward(videos, prompts): ...\n")  # also a module of Python
    assert "module tabnanny has no 'reward' that can be called" in message("tabnanny:reward")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def reward(:\n", r"SyntaxError: invalid syntax \(my_rewards.py, line 1\)"),
        ("\nimport no_such_package\n", "my_rewards.py:2: ModuleNotFoundError: No module named 'no_such_package'"),
        ("from json import nothing\n", "my_rewards.py:1: ImportError: cannot import name 'nothing' from 'json'"),
        ("x = 1\n\nreward = y\n", "my_rewards.py:3: NameError: name 'y' is not defined"),
        (
            "class reward:\n    def __init__(self):\n        open('w.pt')\n",
            r"reward\(\) failed: .*my_rewards.py:3: File",
        ),
        (
            "class reward:\n    def __init__(self):\n"
            "        from sage_fast.util.errors import UserError\n        raise UserError('fps = 0: expected more')\n",
            r"^reward.name = 'my_rewards:reward': fps = 0: expected more$",
        ),
        ("class reward:\n    def __init__(self, path): ...\n", r"required argument: 'path'; reward takes path"),
        ("reward = 3\n", "module my_rewards has no 'reward' that can be called"),
        ("def rewrd(videos, prompts): ...\n", "can be called; expected one of rewrd; did you mean 'rewrd'?"),
    ],
)
def test_mistakes_in_it_name_file_line_and_cause(text: str, expected: str, here: Path) -> None:
    (here / "my_rewards.py").write_text(text)
    found = message("my_rewards:reward")
    assert found.startswith("reward.name = 'my_rewards:reward': ")
    assert re.search(expected, found), found


def test_names_that_lead_nowhere(here: Path) -> None:
    assert f"no module 'no_such_module' is installed or in {here}" in message("no_such_module:Reward")
    assert "no module 'json.nothing' is installed" in message("json.nothing:Reward")
    assert re.search("'testbd': expected one of .*testbed, .*; did you mean 'testbed'.* or http://", message("testbd"))
    for name in (":reward", "my_rewards:", "my rewards:reward"):
        assert "expected 'package.module:name', such as my_rewards:MyReward" in message(name)


def test_an_address_takes_no_arguments() -> None:
    with pytest.raises(
        UserError, match=r"reward.name = 'http://there': args = .*'dtyp'.*: the address of a server takes"
    ):
        dry_run_reward(RewardConfig(name="http://there", args={"dtyp": "uint8"}))


def test_an_instance_that_cannot_be_called(here: Path) -> None:
    (here / "my_rewards.py").write_text("class MyReward: ...\n")
    assert "expected a class with score(self, videos, prompts), or a function" in message("my_rewards:MyReward")


def test_whatever_a_reward_raises_is_a_reward_error() -> None:
    def reward(videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
        return {"red": torch.tensor([float("x\ny")])}

    composite = CompositeReward(reward, RewardConfig(name="my:reward", weights={"red": 1.0}, on_failure="stop"))
    where = r"^no score for prompt 'a': reward 'my:reward': .*test_rewards.py:\d+: ValueError: could not"
    with pytest.raises(RewardError, match=where) as error:
        composite(torch.zeros(2, 5, 3, 8, 8), ["a", "b"])
    assert 'return {"red": torch.tensor([float(' in str(error.value), "the line of its own source"
    assert "sage_fast/rewards" not in str(error.value), "none of ours"


RELEASED = threading.Event()


def hangs(videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
    """As a client that tries again and again until it is released; for one prompt it answers."""
    for _ in range(20 * HANG if len(prompts) > 1 else 0):
        try:
            if RELEASED.wait(0.05):
                break
        except Exception:
            continue
    return {"red": torch.ones(1)}


@pytest.fixture
def hanging() -> Iterator[None]:
    RELEASED.clear()
    yield
    RELEASED.set()


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("on_failure", ["stop", "drop"])
@pytest.mark.fault("a reward hangs in one process", "ends after `reward.timeout_seconds`")
def test_a_reward_that_hangs_is_named(on_failure: Any) -> None:
    config = RewardConfig(name="my:reward", weights={"red": 1.0}, on_failure=on_failure, timeout_seconds=3)
    composite, videos = CompositeReward(hangs, config), torch.zeros(2, 5, 3, 8, 8)
    with pytest.raises(RewardError, match=r"reward 'my:reward' gave no answer within .* = 3 for 2 prompts"):
        composite(videos, ["a", "b"])
    assert composite(videos[:1], ["a"]).rewards.tolist() == [1.0]


@pytest.mark.usefixtures("hanging")
def test_a_judge_that_hangs_is_named() -> None:
    judge = Judge("tests.test_rewards:hangs", RewardConfig(timeout_seconds=0.3))
    with pytest.raises(RewardError, match=r"'tests.test_rewards:hangs' gave no answer within"):
        judge(torch.zeros(2, 5, 3, 8, 8), ["a", "b"])


def where(videos: torch.Tensor, prompts: list[str]) -> dict[str, list[int]]:
    """The thread that calls, and whether gradients are on."""
    if prompts == ["late"]:
        raise TimeoutError("the server's")
    return {"thread": [threading.get_native_id()], "gradients": [torch.is_grad_enabled()]}


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_call_with_a_time_limit_has_a_thread_of_its_own(seconds: float) -> None:
    """No gradients on either, and the reward's own exceptions, TimeoutError too."""
    backend, videos = InProcess("my:reward", where), torch.zeros(1, 5, 3, 8, 8)
    found = backend.score(videos, ["a"], [{}], seconds)
    here = torch.tensor([threading.get_native_id()], dtype=torch.float32)
    assert bool(found["thread"] == here) == (seconds == 0)
    assert found["gradients"] == 0
    with pytest.raises(RewardFailure, match=r"test_rewards.py:\d+: TimeoutError: the server's"):
        backend.score(videos, ["late"], [{}], seconds)


def test_a_fork_has_a_thread_of_its_own() -> None:
    backend, videos = InProcess("my:reward", where), torch.zeros(1, 5, 3, 8, 8)
    backend.score(videos, ["a"], [{}], 60)
    child = os.fork()
    if child == 0:
        os._exit(7 + int(backend.score(videos, ["a"], [{}], 60)["gradients"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
