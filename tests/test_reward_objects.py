"""Rewards given as objects: functions, classes and instances, importable or not."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.cli import main
from sage_fast.config.schema import RewardEntry
from sage_fast.data.contents import contents_of
from sage_fast.loading import load_setup, resolve, with_reward_objects
from sage_fast.rewards import load_reward
from sage_fast.rewards.objects import digest, import_name
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError
from tests.tiny import settings, train

REPOSITORY = Path(__file__).parent.parent
HERE = f"{REPOSITORY}/tests.test_reward_objects"
FAST: dict[str, Any] = {
    "train__iterations": 1,
    "sampling__steps": 2,
    "eval__num_prompts": 1,
    "eval__steps": 1,
    "tracking__trackers": [],
}


def red(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return videos[:, :, 0].mean((1, 2, 3))


def colours(videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    return {"green": videos[:, :, 1].mean((1, 2, 3)), "blue": videos[:, :, 2].mean((1, 2, 3))}


def lengths(videos: Tensor, prompts: Sequence[str]) -> list[float]:
    return [float(len(prompt)) for prompt in prompts]


class Scaled:
    """A class of rewards; `made` counts its instances."""

    made = 0

    def __init__(self, factor: float = 1.0) -> None:
        Scaled.made += 1
        self.factor = factor

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.factor * red(videos, prompts)


def closure(weight: float = 1.0) -> Callable[..., Tensor]:
    def own(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        return weight * videos.mean((1, 2, 3, 4))

    return own


# -- what the settings say -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "name", "weights"),
    [
        (red, f"{HERE}:red", {"red": 1.0}),
        (lengths, f"{HERE}:lengths", {"lengths": 1.0}),
        (colours, f"{HERE}:colours", {"blue": 1.0, "green": 1.0}),
        (Scaled, f"{HERE}:Scaled", {"Scaled": 1.0}),
        (Scaled(2.0), "object:Scaled", {"Scaled": 1.0}),
        (Scaled(2.0).score, "object:score", {"score": 1.0}),
        (closure(), "object:own", {"own": 1.0}),
        (functools.partial(red), "object:red", {"red": 1.0}),
        (lambda videos, prompts: red(videos, prompts), "object:score", {"score": 1.0}),
        ([red], f"{HERE}:red", {"red": 1.0}),
    ],
)
def test_one_reward_takes_the_place_of_the_settings(
    reward: object, name: str, weights: dict[str, float]
) -> None:
    config, objects = with_reward_objects(settings(), reward)
    assert config.reward.name == name
    assert config.reward.weights == weights
    assert list(objects) == ["reward.name"]


def test_several_rewards_keep_their_weights() -> None:
    config, objects = with_reward_objects(settings(), [red, colours, closure()])
    assert [entry.name for entry in config.reward.entries] == [
        f"{HERE}:red",
        f"{HERE}:colours",
        "object:own",
    ]
    assert config.reward.part_weights == {"red": 1.0, "green": 1.0, "blue": 1.0, "own": 1.0}
    assert list(objects) == [f"reward.several[{i}].name" for i in range(3)]

    weighted, _ = with_reward_objects(
        settings(reward__weights={"red": 2.0, "blue": 0.5}), [red, colours]
    )
    assert weighted.reward.part_weights == {"red": 2.0, "blue": 0.5}
    several = [{"name": "testbed", "weights": {"vq": 1.0}}]
    replaced, _ = with_reward_objects(settings(reward__several=several), red)
    assert (replaced.reward.several, replaced.reward.name) == ([], f"{HERE}:red")


def test_a_class_is_created_once_with_its_arguments() -> None:
    Scaled.made = 0
    config, objects = with_reward_objects(settings(reward__args={"factor": 3.0}), Scaled)
    assert objects["reward.name"].factor == 3.0
    setup = load_setup(resolve(config), reward_objects=objects)
    assert Scaled.made == 1
    videos = torch.rand(2, 9, 3, 32, 32)
    found = setup.reward.submit(videos, setup.prompts[:2]).result()
    assert torch.allclose(found.rewards, 3.0 * red(videos, ()))


@pytest.mark.parametrize(
    ("reward", "given", "message"),
    [
        ("red", {}, r"reward_funcs = 'red': expected a function .*reward.name = 'red'"),
        (3, {}, r"reward_funcs = 3: expected a function of \(videos, prompts\)"),
        ([], {}, r"reward_funcs = \[\]: expected a function"),
        (
            lambda: 1,
            {},
            r"reward.name = 'object:score': expected a function of \(videos, prompts\)",
        ),
        (lambda v, p: None, {}, r"'score' failed on made-up videos .*returned NoneType"),
        (lambda v, p: v.mean(), {}, r"part 'score': expected shape \[2\], got \[\]"),
        ([red, functools.partial(red)], {}, r"two of them return a part 'red'; rename"),
        (red, {"reward__weights": {"rod": 1.0}}, r"weights names 'rod': .*did you mean 'red'"),
        (red, {"reward__args": {"x": 1}}, r"reward.args = {'x': 1}: only a class takes arguments"),
        (
            [red, closure()],
            {"reward__workers": 2},
            r"reward.workers = 2: .*cannot import the reward 'own'.*reward.name = my_rewards:own",
        ),
    ],
)
def test_a_mistake_is_told(reward: object, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_reward_objects(settings(**given), reward)


def test_workers_import_a_function_by_its_name() -> None:
    config, objects = with_reward_objects(settings(reward__workers=1), red)
    setup = load_setup(resolve(config), reward_objects=objects)
    assert setup.reward.callers[0].in_background  # type: ignore[attr-defined]
    videos = torch.rand(2, 9, 3, 32, 32)
    found = setup.reward.submit(videos, setup.prompts[:2]).result()
    assert torch.allclose(found.rewards, red(videos, ()), atol=1e-6)


# -- names and digests -----------------------------------------------------------------------------


def test_the_name_of_an_object_imports_it() -> None:
    for each in (red, Scaled):
        name = import_name(each)
        assert name is not None
        kind = load_reward(RewardEntry(name=name, weights={}))
        assert kind is each or isinstance(kind, Scaled)
    assert import_name(json.dumps) == "json:dumps"
    for other in (closure(), lambda: 1, Scaled(), Scaled().score, functools.partial(red), len):
        assert import_name(other) is None


def test_a_digest_is_that_of_the_source_text() -> None:
    assert digest(closure(1.0)) == digest(closure(2.0)) != digest(red)
    assert digest(Scaled()) == digest(Scaled)
    assert digest(functools.partial(red)) == digest(red)
    assert digest(red).startswith("code (SHA-256 ")
    assert digest(len) == "len, without source text"


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_trains_resumes_and_says_what_has_changed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    given = {**FAST, "output": str(tmp_path / "run")}
    first = closure()
    run = RunFolder(train(settings(**given), reward_funcs=first))
    assert run.facts["contents"]["reward.name"] == digest(first)
    assert run.rows[0]["reward/mean"] == pytest.approx(run.rows[0]["reward_part/own"])

    def own(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        return 2 * videos.mean((1, 2, 3, 4))

    train(settings(**given | {"train__iterations": 2}), reward_funcs=own, resume=True)
    said = " ".join(" ".join(caplog.messages).split())
    assert f"note: reward.name holds {digest(own)} from here on; it held {digest(first)}" in said

    # without the object, the command line says what is missing, whatever modules are there
    (tmp_path / "object.py").write_text("def own(videos, prompts):\n    return videos[0]\n")
    monkeypatch.chdir(tmp_path)
    status = main(["train", "--resume", str(run.path), "--train.iterations", "3"])
    assert status == 2
    error = capsys.readouterr().err
    assert "the program that trained gave this reward as an object" in error
    assert "my_rewards:own" in error


def test_a_script_trains_with_a_function_of_its_own(tmp_path: Path) -> None:
    """A function of `__main__`, as in a notebook, cannot be imported by its name."""
    given = {key.replace("__", "."): value for key, value in FAST.items()}
    given |= {"output": str(tmp_path / "run"), "model.dtype": "float32", "sampling.num_frames": 5}
    given |= {"sampling.height": 32, "sampling.width": 32, "train.prompts_per_iteration": 1}
    script = tmp_path / "script.py"
    script.write_text(
        "from sage_fast.config.loader import build\n"
        "from sage_fast.run.train import train\n\n"
        "def brightness(videos, prompts):\n"
        "    return videos.mean((1, 2, 3, 4))\n\n"
        'if __name__ == "__main__":\n'
        f"    run = train(build({given!r}), reward_funcs=brightness)\n"
        "    print(run.config.reward.name, run.config.reward.weights)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "object:brightness {'brightness': 1.0}"
    assert RunFolder(tmp_path / "run").facts["contents"]["reward.name"].startswith("code (SHA-256 ")


def test_contents_of_an_importable_reward_are_those_of_its_module() -> None:
    config, objects = with_reward_objects(settings(), red)
    by_name = contents_of({}, None, {"reward.name": RewardEntry(name=f"{HERE}:red", weights={})})
    assert contents_of({}, None, config.named_rewards, objects=objects) == by_name
