"""Rewards by name: those of the current folder, and what a mistake in one looks like."""

import logging
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

from sage_fast.config.schema import RewardConfig
from sage_fast.rewards import CompositeReward, in_process, load_reward
from sage_fast.rewards.in_process import InProcess
from sage_fast.rewards.load import dry_run_reward
from sage_fast.util.errors import RewardError, UserError
from tests.reward_faults import request
from tests.tiny import keys_of
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
    assert load_reward(RewardConfig(name="my_rewards:MyReward"))(videos, ["a", "b"])[
        "red"
    ].tolist() == [0, 1]
    assert load_reward(RewardConfig(name="my_rewards:blue"))(videos, ["a", "b"])[
        "blue"
    ].tolist() == [0, 0]


def test_what_is_installed_wins(here: Path) -> None:
    # also a module of Python
    (here / "tabnanny.py").write_text("def reward(videos, prompts): ...\n")
    assert "module tabnanny has no 'reward' that can be called" in message("tabnanny:reward")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def reward(:\n", r"SyntaxError: invalid syntax \(my_rewards.py, line 1\)"),
        (
            "\nimport no_such_package\n",
            "my_rewards.py:2: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (
            "from json import nothing\n",
            "my_rewards.py:1: ImportError: cannot import name 'nothing' from 'json'",
        ),
        ("x = 1\n\nreward = y\n", "my_rewards.py:3: NameError: name 'y' is not defined"),
        (
            "class reward:\n    def __init__(self):\n        open('w.pt')\n    def score(self, "
            "videos, prompts): ...\n",
            r"reward\(\) failed: .*my_rewards.py:3: File",
        ),
        (
            "class reward:\n    def __init__(self):\n"
            "        from sage_fast.util.errors import UserError\n        raise UserError('fps = "
            "0: expected more')\n"
            "    def score(self, videos, prompts): ...\n",
            r"^reward.name = 'my_rewards:reward': fps = 0: expected more$",
        ),
        (
            "class reward:\n    score = 1\n",
            r"expected a class with score\(self, videos, prompts\), or a function",
        ),
        (
            "def reward(videos): ...\n",
            r"expected a function of \(videos, prompts\): too many positional arguments",
        ),
        (
            "class reward:\n    def __init__(self, path): ...\n    def score(self, videos, "
            "prompts): ...\n",
            r"required argument: 'path'; reward takes path",
        ),
        ("reward = 3\n", "module my_rewards has no 'reward' that can be called"),
        (
            "def rewrd(videos, prompts): ...\n",
            "can be called; expected one of rewrd; did you mean 'rewrd'?",
        ),
    ],
)
def test_mistakes_in_it_name_file_line_and_cause(text: str, expected: str, here: Path) -> None:
    (here / "my_rewards.py").write_text(text)
    found = message("my_rewards:reward")
    assert found.startswith("reward.name = 'my_rewards:reward': ")
    assert re.search(expected, found), found


def test_names_that_lead_nowhere(here: Path) -> None:
    assert f"no module 'no_such_module' is installed or in {here}" in message(
        "no_such_module:Reward"
    )
    assert "no module 'json.nothing' is installed" in message("json.nothing:Reward")
    assert re.search(
        "'testbd': expected one of .*testbed, .*; did you mean 'testbed'.* or http://",
        message("testbd"),
    )
    for name in (":reward", "my_rewards:", "my rewards:reward"):
        assert "expected 'package.module:name', such as my_rewards:MyReward" in message(name)


def test_an_address_takes_no_arguments() -> None:
    with pytest.raises(
        UserError,
        match=r"reward.name = 'http://there': args = .*'dtyp'.*: the address of a server takes",
    ):
        dry_run_reward(RewardConfig(name="http://there", args={"dtyp": "uint8"}))


def test_an_instance_that_cannot_be_called(here: Path) -> None:
    (here / "my_rewards.py").write_text("class MyReward: ...\n")
    assert "expected a class with score(self, videos, prompts), or a function" in message(
        "my_rewards:MyReward"
    )


def test_whatever_a_reward_raises_is_a_reward_error() -> None:
    def reward(videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
        return {"red": torch.tensor([float("x\ny")])}

    composite = CompositeReward(
        reward, RewardConfig(name="my:reward", weights={"red": 1.0}, on_failure="stop")
    )
    where = (
        r"^no score for prompt 'a': reward 'my:reward': .*test_rewards.py:\d+: ValueError: could "
        r"not"
    )
    with pytest.raises(RewardError, match=where) as error:
        composite(torch.zeros(2, 5, 3, 8, 8), keys_of(["a", "b"]))
    assert 'return {"red": torch.tensor([float(' in str(error.value), "the line of its own source"
    assert "sage_fast/rewards" not in str(error.value), "none of ours"


def where(videos: torch.Tensor, prompts: list[str]) -> dict[str, list[int]]:
    """The thread that calls, and whether gradients are on."""
    return {"thread": [threading.get_native_id()], "gradients": [torch.is_grad_enabled()]}


def test_a_call_is_on_the_main_thread_without_gradients() -> None:
    found = InProcess("my:reward", where).score(request(torch.zeros(1, 5, 3, 8, 8)))
    assert found["thread"].tolist() == [threading.get_native_id()]
    assert found["gradients"].tolist() == [0]


def test_a_call_that_takes_long_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    named = threading.Event()
    monkeypatch.setattr(in_process, "SLOW_CALL_S", 0.01)
    monkeypatch.setattr(
        in_process.log, "info", lambda text: (caplog.records.append(text), named.set())
    )

    def slow(videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
        assert named.wait(HANG)
        return {"a": torch.ones(1)}

    InProcess("my:slow", slow).score(request(torch.zeros(1, 5, 3, 8, 8)))
    assert re.match(
        r"reward 'my:slow' has been scoring 1 video since \d\d:\d\d:\d\d", str(caplog.records[0])
    )
