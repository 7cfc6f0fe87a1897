"""Secrets come from the environment: a run folder holds `${NAME}`, only the reward sees the
value."""

from __future__ import annotations

import html
import json
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from sage_fast.cli import main
from sage_fast.config.schema import RewardConfig, RewardEntry, SamplingConfig
from sage_fast.config.secrets import from_environment, secret
from sage_fast.rewards import CompositeReward, load_reward
from sage_fast.rewards.failure_policy import RewardFailure
from sage_fast.rewards.http import HttpReward
from sage_fast.rewards.load import dry_run_reward
from sage_fast.testbed.rewards import TestbedReward
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_metrics
from tests.test_cli import PAPER, SMALL
from tests.tiny import keys_of

SECRET = "sk-7 'q\"z"
ARGS: dict[str, Any] = {"token": "${SAGE_KEY}", "service": {"api_key": "${SAGE_KEY}", "fps": 2}}


class NeedsToken(TestbedReward):
    """Scores only with the right token."""

    def __init__(self, token: str, service: dict[str, Any]) -> None:
        assert (token, service) == (SECRET, {"api_key": SECRET, "fps": 2})


@pytest.mark.parametrize("several", [False, True])
def test_secrets_are_in_no_file_of_a_run_and_reach_the_reward(
    several: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward: dict[str, Any] = {
        "name": "tests.test_secrets:NeedsToken",
        "weights": {"vq": 1},
        "args": ARGS,
    }
    file, run = tmp_path / "config.yaml", tmp_path / "run"
    tree = {
        "base": str(PAPER),
        "output": str(run),
        "reward": {"several": [reward]} if several else reward,
    }
    file.write_text(yaml.safe_dump(tree))
    command = [
        "train",
        str(file),
        *SMALL,
        "--tracking.trackers",
        "[tensorboard]",
        "--train.iterations",
        "1",
    ]
    if not several:
        command += ["--reward.args.token", ARGS["token"]]
    monkeypatch.delenv("SAGE_KEY", raising=False)
    assert main(command) == 2
    found = capfd.readouterr().err
    assert (
        "NeedsToken': args.service.api_key = '${SAGE_KEY}': there is no environment variable "
        "SAGE_KEY" in found
    )
    assert not run.exists()
    monkeypatch.setenv("SAGE_KEY", SECRET)
    monkeypatch.setattr("sys.argv", ["sage-fast", *command])
    assert main(command) == 0
    assert "${SAGE_KEY}" in (run / "config.yaml").read_text()
    assert main(["train", str(run), "--resume", "--train.iterations", "2"]) == 0
    assert len(read_metrics(run / "metrics.jsonl")) == 2
    for path in (path for path in run.rglob("*") if path.is_file()):
        assert b"sk-7" not in path.read_bytes(), path


def test_variables_at_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGE_USER", "me")
    monkeypatch.setenv("SAGE_KEY", "")
    given = {
        "url": "https://${SAGE_USER}:${SAGE_KEY}@there",
        "several": [{"a": "${SAGE_USER}"}, 1, None],
        "b": "$x {y}",
    }
    resolved = given | {"url": "https://me:@there", "several": [{"a": "me"}, 1, None]}
    assert from_environment(given, "args") == resolved
    monkeypatch.delenv("SAGE_USER")
    with pytest.raises(
        UserError, match=r"args\.several\.0\.a = '\$\{SAGE_USER\}': there is no .* SAGE_USER"
    ):
        from_environment({"several": given["several"]}, "args")


def test_a_variable_of_a_process_or_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAGE_KEY", raising=False)
    with pytest.raises(UserError, match=r"^reward\.name = 'vlm': args\.url = .* variable SAGE_KEY"):
        load_reward(RewardEntry(name="vlm", args={"url": "${SAGE_KEY}"}))
    reward = CompositeReward.of(
        RewardConfig(name="tests.test_secrets:NeedsToken", args=ARGS, workers=1)
    )
    sampling = SamplingConfig(num_frames=5, height=32, width=32)
    with pytest.raises(
        UserError, match=r"^reward\.name = 'tests.*': args\.token = .* variable SAGE_KEY"
    ):
        reward.check(sampling, keys_of(["a"]))
    monkeypatch.setenv("SAGE_KEY", SECRET)
    reward.check(sampling, keys_of(["a small red ball moves left quickly"]))
    assert "vq" in reward.parts


def test_a_dry_run_shows_the_name_of_a_variable_and_an_address_takes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLACE", "/hunter2/y z")
    entry = RewardConfig(name="clipscore", args={"path": "${PLACE}"})
    with pytest.raises(UserError, match=r"reward.args.path = '\$\{PLACE\}': no such folder"):
        dry_run_reward(entry)
    with pytest.raises(
        UserError, match=r"args = \{'url': '\$\{PLACE\}'\}: the address of a server takes no"
    ):
        dry_run_reward(RewardConfig(name="http://there", args={"url": "${PLACE}"}))


@pytest.mark.parametrize(
    "hidden",
    [
        "http://me:hunter2@there/x",
        "http://there/x?a=hunter2",
        "http://there?hunter2",
        "http://me:hunter2/a@there/x",
    ],
)
def test_the_address_of_a_server_holds_no_secret_and_none_is_shown(hidden: str) -> None:
    for make in (lambda: RewardConfig(name=hidden), lambda: HttpReward(hidden)):
        with pytest.raises(
            ValueError, match=r"'http://there(/x)?': expected (an|this) address"
        ) as caught:
            make()
        assert "hunter2" not in str(caught.value)


class Leaks:
    """Names the address that it was given in its errors."""

    def __init__(self, url: str, how: str) -> None:
        self.url = url
        if how == "made":
            raise OSError(f"no answer from {url}")
        if how == "told":
            raise UserError(f"no answer from {url}")

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        raise OSError(f"no answer from {self.url}")


@pytest.mark.parametrize(
    ("how", "workers"), [("made", 0), ("told", 0), ("called", 0), ("made", 1), ("called", 1)]
)
def test_errors_of_a_reward_name_the_variable(
    how: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGE_KEY", SECRET)
    args = {"url": "https://me:${SAGE_KEY}@there", "how": how}
    entry = RewardConfig(name="tests.test_secrets:Leaks", args=args, workers=workers)
    with pytest.raises(
        UserError, match=r"no answer from https://me:\$\{SAGE_KEY\}@there"
    ) as caught:
        CompositeReward.of(entry).check(
            SamplingConfig(num_frames=1, height=32, width=32), keys_of(["a"])
        )
    assert "sk-7" not in str(caught.value)


class Tells:
    """Shows its token in what it returns."""

    def __init__(self, token: str, how: str) -> None:
        self.token, self.how = token, how

    def score(self, videos: Tensor, prompts: list[str]) -> Any:
        if self.how == "type":
            return type(self.token, (), {})()
        return {f"{self.token}": [0.5] * len(prompts)} if self.how == "part" else {"a": self.token}


@pytest.mark.parametrize("how", ["part", "type", "value"])
@pytest.mark.parametrize("token", [SECRET, "sk-hunter2"])
def test_what_a_reward_returns_shows_no_secret(
    how: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGE_KEY", token)
    entry = RewardConfig(
        name="tests.test_secrets:Tells",
        args={"token": "${SAGE_KEY}", "how": how},
        weights={"a": 1.0},
    )
    with pytest.raises(UserError) as caught:
        CompositeReward.of(entry).check(
            SamplingConfig(num_frames=1, height=32, width=32), keys_of(["a"])
        )
    assert "returned" in str(caught.value) or "expected" in str(caught.value)
    assert "sk-" not in str(caught.value)


TOKEN = "tök/9+x_Password-0042"


@pytest.mark.parametrize(
    "spell",
    [
        str.upper,
        lambda text: urllib.parse.quote(text, safe="").lower(),
        lambda text: json.dumps(text).replace("f6", "F6"),
        lambda text: repr(text.encode()),
        lambda text: text.encode().decode("latin-1"),
    ],
)
def test_no_half_of_a_secret_is_shown(spell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may echo the header in another alphabet."""
    monkeypatch.setenv("SAGE_KEY", TOKEN)
    assert secret("SAGE_KEY") == TOKEN
    text = spell(TOKEN)
    shown = str(RewardFailure(f"status 401: not <{text}>"))
    assert "${SAGE_KEY}" in shown
    half = len(text) // 2 + 1
    assert not any(text[i : i + half] in shown for i in range(len(text) - half + 1))


@pytest.mark.parametrize("length", [8, 9, len(TOKEN) - 1])
def test_a_secret_that_an_answer_cuts_is_masked(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGE_KEY", TOKEN)
    secret("SAGE_KEY")
    assert str(RewardFailure(f"status 401: not {TOKEN[:length]}")) == "status 401: not ${SAGE_KEY}"
    assert str(RewardFailure(f"status 401: not {TOKEN[:7]}")).endswith(TOKEN[:7])


@pytest.mark.parametrize(
    "spell", [repr, json.dumps, html.escape, urllib.parse.quote, lambda text: json.dumps([text])]
)
def test_a_secret_is_masked_as_answers_spell_it(
    spell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGE_KEY", "Schlüssel \"7'\\<x>/")
    value = secret("SAGE_KEY")
    shown = str(RewardFailure(f"status 401: not {spell(value)}, but another"))
    assert "${SAGE_KEY}" in shown
    assert "7" not in shown
