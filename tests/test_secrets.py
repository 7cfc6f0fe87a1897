"""Secrets in reward arguments appear in no file of a run; a resume takes them from the configuration or an option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_fast.cli import main
from sage_fast.config.redact import hide, hide_in_command, is_secret
from sage_fast.rewards.testbed import TestbedReward
from sage_fast.util.files import read_metrics
from tests.test_cli import PAPER, SMALL

SECRET = "sk-7 'q\"z"


class NeedsToken(TestbedReward):
    """Scores only with the right token."""

    def __init__(self, token: str, service: dict[str, Any]) -> None:
        assert (token, service) == (SECRET, {"api_key": SECRET, "fps": 2})


@pytest.mark.parametrize("several", [False, True])
def test_secrets_are_in_no_file_of_a_run_and_a_resume_finds_them(
    several: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward: dict[str, Any] = {"name": "tests.test_secrets:NeedsToken", "weights": {"vq": 1}}
    reward["args"] = {"token": SECRET, "service": {"api_key": SECRET, "fps": 2}}
    file, run = tmp_path / "config.yaml", tmp_path / "run"
    tree = {"base": str(PAPER), "output": str(run), "reward": {"several": [reward]} if several else reward}
    file.write_text(yaml.safe_dump(tree))
    options = [*SMALL, "--tracking.trackers", "[tensorboard]", "--train.iterations"]
    command = ["train", str(file), *options, "1"]
    if not several:
        command += ["--reward.args", yaml.safe_dump(reward["args"], default_flow_style=True, width=1000).strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sage-fast", *command])
        assert main(command) == 0
    assert "(hidden)" in (run / "config.yaml").read_text()
    assert ("(hidden)" in (run / "run.json").read_text()) is not several
    assert main(["train", str(run), "--resume", "--train.iterations", "2"]) == 2
    where = "reward.several[0].args.service.api_key" if several else "reward.args.service.api_key"
    option = "reward.several" if several else "reward.args.service"
    assert f"{where}: a run folder does not keep it; give --{option} VALUE, or" in capsys.readouterr().err
    assert main(["train", str(file), "--resume", "--train.iterations", "2"]) == 0
    assert "reward." not in capsys.readouterr().out, "no setting of it has changed"
    assert len(read_metrics(run / "metrics.jsonl")) == 2
    for path in (path for path in run.rglob("*") if path.is_file()):
        assert b"sk-7" not in path.read_bytes(), path


def test_what_is_a_secret() -> None:
    for name in ("token", "api_key", "apiKey", "API-KEY", "apikey", "password", "client_secret", "hfToken", "openAIKey",
                 "api_keys", "secrets", "passwords", "Authorization", "bearer", "pwd", "access_tokens", "apiTokens",
                 "auth-tokens"):  # fmt: skip
        assert is_secret(name), name
    for name in (
        "num_tokens",
        "stop_tokens",
        "tokens",
        "tokenizer",
        "keyframes",
        "key_frames",
        "monkey",
        "path",
        "secretary",
    ):
        assert not is_secret(name), name
    words = ["--reward.args.token=a", "--reward.args", "{x: 1, token: a}", "--reward.weights", "{a: 1}", "--seed", "3",
             "--reward.several", "[{name: a, args: {b: [{password: c}]}}]", "--reward.args.x", "a",
             "--reward.args.url", "https://me:pw@there/x"]  # fmt: skip
    shown = ["--reward.args.token=(hidden)", "--reward.args", "(hidden)", *words[3:7], "--reward.several", "(hidden)",
             *words[9:12], "(hidden)"]  # fmt: skip
    assert hide_in_command(["sage-fast", "train", *words]) == ["sage-fast", "train", *shown]
    urls = {"urls": ["https://me:pw@there/x", "https://there/x@y", "postgres://me:pw@there"], "mail": "me@there",
            "query": "https://there/x?n=1&api_key=abc", "page": "https://there/x?tokens=1"}  # fmt: skip
    assert hide(urls) == urls | {"urls": ["(hidden)", "https://there/x@y", "(hidden)"], "query": "(hidden)"}
