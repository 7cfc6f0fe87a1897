"""Contents that changed under their name, and the variables of launchers."""

import json
import logging
import socket
from pathlib import Path

import pytest
import torch
from PIL import Image

from sage_fast.cli import main
from sage_fast.config.schema import RewardEntry, SamplingConfig, TrainConfig
from sage_fast.data.contents import contents_of, contents_of_networks
from sage_fast.data.prompt_checks import shared_prompts
from sage_fast.data.prompts import Prompt
from sage_fast.loading import load_setup, resolve
from sage_fast.models.load import load_model
from sage_fast.models.model import Model
from sage_fast.run.claim import run_facts
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError
from tests.tiny import settings, tiny_model, train

PAPER = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"
WORDS = [
    "a small red ball moves left quickly",
    "a big blue ball moves up slowly",
    "a small green ball moves right slowly",
]


def records(folder: Path, words: list[str], **further: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, **further}) + "\n" for text in words))
    return file


def test_a_resume_says_that_the_prompts_are_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        "data__prompts": str(records(tmp_path, WORDS)),
        "output": str(tmp_path / "run"),
        "eval__num_prompts": 1,
    }
    given |= {
        "train__iterations": 1,
        "sampling__steps": 2,
        "eval__steps": 1,
        "tracking__trackers": [],
    }
    caplog.set_level(logging.INFO)
    train(settings(**given))
    assert "from here on" not in caplog.text
    before = json.loads((tmp_path / "run" / "run.json").read_text())["contents"]
    assert before["data.prompts"].startswith("3 prompts (SHA-256 ")
    assert before["data.eval_prompts"].startswith("16 prompts (SHA-256 ")
    records(tmp_path, WORDS[:2])
    train(settings(**given | {"train__iterations": 2}), resume=True)
    said = " ".join(" ".join(caplog.messages).split())
    assert "note: data.prompts holds 2 prompts (SHA-256 " in said
    assert f"from here on; it held {before['data.prompts']}" in said
    assert "reward.name holds" not in said
    facts = RunFolder(tmp_path / "run").facts
    assert facts["contents"]["data.prompts"].startswith("2 prompts")
    assert facts["contents"]["reward.name"] == before["reward.name"]


def test_a_resume_says_that_the_model_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the hub has other weights under the same name: the adapter would go on with another
    policy."""
    given = {
        "output": str(tmp_path / "run"),
        "eval__num_prompts": 1,
        "train__iterations": 1,
        "sampling__steps": 2,
    }
    given |= {"eval__steps": 1, "tracking__trackers": []}
    caplog.set_level(logging.INFO)
    train(settings(**given))
    begun = RunFolder(tmp_path / "run").facts["contents"]["model.path"]
    train(settings(**given | {"train__iterations": 2}), resume=True)
    assert "model.path holds" not in caplog.text

    def changed(*about: object, **named: object) -> Model:
        model: Model = load_model(*about, **named)
        frozen = next(
            p for p in model.policy.networks["transformer"].parameters() if not p.requires_grad
        )
        frozen.data.flatten()[0] += 1e-6
        return model

    monkeypatch.setattr("sage_fast.loading.load_model", changed)
    train(settings(**given | {"train__iterations": 3}), resume=True)
    said = " ".join(" ".join(caplog.messages).split())
    assert "note: model.path holds weights (SHA-256 " in said
    assert f"from here on; it held {begun}" in said


def test_the_digest_of_a_model_is_that_of_its_checkpoint() -> None:
    """An adapter, its rank and its weights do not enter it."""
    plain = tiny_model(settings(model__tuning="full")).policy
    adapted = tiny_model(settings()).policy
    with torch.no_grad():
        for p in adapted.parameters().values():
            p.add_(1)
    assert contents_of_networks(adapted) == contents_of_networks(plain)


def held(**fields: object) -> str:
    prompts = [Prompt(text="a", **fields)]  # type: ignore[arg-type]
    return contents_of({"data.prompts": prompts}, None, {})["data.prompts"]


def test_negatives_and_metadata_belong_to_the_prompts() -> None:
    found = [
        held(),
        held(negative="blurred"),
        held(metadata={"answer": 1}),
        held(metadata={"answer": 2}),
    ]
    assert len(set(found)) == 4
    assert held(where="p.txt:1") == held(where="p.txt:2") == found[0]


def test_an_image_is_told_by_what_it_holds(tmp_path: Path) -> None:
    found = []
    for colour in ("red", "red", "blue"):
        Image.new("RGB", (32, 32), colour).save(tmp_path / "first.png")
        found.append(held(image="first.png", folder=str(tmp_path)))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("inside", ["", "transformer/config.json"])
def test_weights_are_told_by_what_their_file_or_folder_holds(inside: str, tmp_path: Path) -> None:
    found, path = [], tmp_path / "weights"
    file = path / inside if inside else path
    file.parent.mkdir(parents=True, exist_ok=True)
    for content in ("one", "one", "two"):
        file.write_text(content)
        found.append(contents_of({}, str(path), {})["model.weights"])
    assert found[0] == found[1] != found[2]


def test_a_reward_is_told_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for content in ("X = 1\n", "X = 1\n", "X = 2\n"):
        (tmp_path / "code_of_mine.py").write_text(content)
        entries = {
            "reward.name": RewardEntry(name="code_of_mine:Mine"),
            "eval.judge": RewardEntry(name="http://h:1"),
        }
        found.append(contents_of({}, None, entries))
    assert [*found[0]] == ["reward.name"]
    assert found[0] == found[1]
    assert found[1]["reward.name"] != found[2]["reward.name"]


@pytest.mark.parametrize("package", ["", "mine_too"])
@pytest.mark.parametrize(
    "line", ["from {0}help_of_mine import X", "import os, {0}help_of_mine as h", "help_of_mine = 3"]
)
def test_a_reward_is_told_by_the_code_that_it_imports_too(
    package: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, prefix = tmp_path / package, f"{package}." if package else ""
    folder.mkdir(exist_ok=True)
    (folder / "main_of_mine.py").write_text(line.format(prefix))
    (folder / "help_of_mine.py").write_text("from far_of_mine import X\n")
    found = []
    for content in ("X = 1\n", "X = 1\n", "X = 2\n"):
        (folder / "far_of_mine.py").write_text(content)
        (folder / "another.py").write_text(f"{len(found)}")
        found.append(
            contents_of({}, None, {"reward.name": RewardEntry(name=f"{prefix}main_of_mine:Mine")})
        )
    assert found[0] == found[1] != found[2]


def test_a_reward_is_told_by_the_files_that_its_arguments_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # 300: no name of a file
    args = {"url": "http://h:1", "model": "m" * 300, "template": "asks.txt", "num_frames": 4}
    found = []
    for content in ("one", "one", "two"):
        (tmp_path / "asks.txt").write_text(content)
        found.append(contents_of({}, None, {"reward.name": RewardEntry(name="vlm", args=args)}))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("contents", "said"), [({}, ""), ({"gone": "x"}, ""), ({"a": "old"}, "a holds new")]
)
def test_contents_of_an_earlier_version_are_no_news(
    contents: dict[str, str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = {"date": "d", "commit": "c", "command": "x"}
    (tmp_path / "run.json").write_text(json.dumps({**start, "contents": contents}))
    caplog.set_level(logging.INFO)
    facts = run_facts(tmp_path, {**start, "contents": {"a": "new"}}, 1)
    assert facts["contents"] == {"a": "new"}
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_held_out_prompts_that_are_trained_on_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [Prompt(text=text) for text in WORDS]
    assert shared_prompts(own[:2], own[2:]) is None
    assert shared_prompts(own[:1], [Prompt(text=WORDS[0], image="other.png")]) is None
    file = records(tmp_path, WORDS)
    config = settings(
        data__prompts=str(file), data__eval_prompts=str(records(tmp_path / ".", WORDS))
    )
    notes = load_setup(resolve(config)).model.notes
    said = (
        "3 of 3 prompts of data.eval_prompts are also in data.prompts, such as 'a small red ball "
        "moves left quickly'"
    )
    assert any(said in note for note in notes)
    assert (
        main(
            [
                "train",
                str(PAPER),
                "--dry-run",
                "--data.prompts",
                str(file),
                "--data.eval_prompts",
                str(file),
            ]
        )
        == 0
    )
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "two"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-2"), ("WORLD_SIZE", "1.5"),
     ("WORLD_SIZE", "9" * 5000), ("LOCAL_WORLD_SIZE", "x"), ("RANK", "first")],
)  # fmt: skip
def test_an_odd_number_of_a_launcher_is_one_line(
    name: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    command = ["train", str(PAPER), "--output", str(tmp_path / "run"), "--train.engine", "zero3"]
    dry = [] if name == "RANK" else ["--dry-run"]
    assert main([*command, *dry]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{name} = '{value[:5]}" in error
    assert "expected a whole number from" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1"}, 1, "MASTER_ADDR:MASTER_PORT = 127.0.0.1:"),
        ({"RANK": "1", "MASTER_ADDR": "no-such-host.invalid"}, 1, "no-such-host.invalid:"),
        ({"RANK": "1", "MASTER_ADDR": "a b"}, 1, "within timeout_minutes = 0.01: "),
        ({"RANK": "0", "MASTER_ADDR": "a b"}, 1, "within timeout_minutes = 0.01: "),
        ({"RANK": "0", "MASTER_ADDR": "no-such-host.invalid"}, 1, "no-such-host.invalid:"),
        ({"RANK": "0", "MASTER_ADDR": "300.1.1.1"}, 1, "rank 0 of 2 cannot join the others"),
        ({"RANK": "0", "MASTER_ADDR": "x" * 70}, 2, "x" * 70),
        ({"RANK": "1", "MASTER_ADDR": "x" * 70}, 2, "x" * 70),
        (
            {"RANK": "7", "MASTER_ADDR": "127.0.0.1"},
            2,
            "RANK = 7 in the environment: expected less than",
        ),
        ({"RANK": "1"}, 2, "WORLD_SIZE = 2 in the environment, but no MASTER_ADDR"),
        (
            {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"},
            2,
            "MASTER_PORT = 'http'",
        ),
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, 1, "99999"),
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "-1"}, 2, "MASTER_PORT = '-1'"),
    ],
)
def test_other_ranks_that_cannot_be_reached_are_one_line(
    given: dict[str, str], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"WORLD_SIZE": "2", "MASTER_PORT": port} | given).items():
        monkeypatch.setenv(name, value)
    output = ["--output", str(tmp_path / "run"), "--timeout_minutes", "0.01"]
    assert main(["train", str(PAPER), *output]) == status
    (error,) = capfd.readouterr().err.splitlines()
    assert error.startswith("sage-fast train: ")
    assert said in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"prompts_per_iteration": 10**10},
        {"group_size": 10**10},
        {"group_size": 10**5, "prompts_per_iteration": 10**5},
    ],
)
def test_more_samples_than_can_be_planned_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(
        UserError,
        match=r"train\.(prompts_per_iteration|group_size) = \d+: expected .*nearest is \d",
    ):
        TrainConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"num_frames": 4 * 10**10 + 1},
        {"height": 16 * 10**11},
        {"num_frames": 10**6 + 1, "width": 16 * 10**5},
    ],
)
def test_a_video_that_is_too_large_to_plan_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(
        UserError, match=r"sampling\.num_frames = \d+: expected at most 17,179,869,184 pixels"
    ):
        SamplingConfig(**given)  # type: ignore[arg-type]
    assert SamplingConfig(num_frames=1001, height=2160, width=3840).height == 2160
