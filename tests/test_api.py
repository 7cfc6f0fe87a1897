"""The public interface, `import sage_fast as sf`, as a script or a notebook uses it."""

import ast
import gc
import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sage_fast as sf
from sage_fast.cli import main
from tests.ranks import run_ranks, screens
from tests.tiny import BASE_SETTINGS

PROMPT = "a small red ball moves left quickly"
SETTINGS = BASE_SETTINGS | {"eval.seeds_per_prompt": 1, "eval.num_videos": 1}


class Noting(sf.Callback):
    """Adds a column to each row, and counts the iterations."""

    def __init__(self) -> None:
        self.iterations: list[int] = []

    def on_iteration_end(self, run: sf.Run, row: dict[str, Any]) -> None:
        self.iterations.append(run.iteration)
        row["twice/reward"] = 2 * row["reward/mean"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> sf.Run:
    """A run of two iterations, trained from Python."""
    folder = tmp_path_factory.mktemp("api") / "run"
    noting = Noting()
    run = sf.train(sf.build(SETTINGS | {"output": folder}), callbacks=[noting])
    assert noting.iterations == [1, 2]
    return run


# -- the names -------------------------------------------------------------------------------------


def names_for_type_checkers() -> dict[str, str]:
    """Name -> module of the imports that stand under TYPE_CHECKING in `sage_fast/__init__.py`."""
    tree = ast.parse(Path(str(sf.__file__)).read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "`as` makes it a name of the package"
            found[alias.name] = str(node.module)
    return found


def test_type_checkers_see_the_names_that_there_are() -> None:
    assert names_for_type_checkers() == sf._MODULES
    assert sf.__all__ == list(sf._MODULES)
    assert {"load", "build", "train", "evaluate", "sample", "Callback", "Trainer"} < {*sf.__all__}


@pytest.mark.parametrize("name", sf.__all__)
def test_a_public_name_is_the_one_of_its_module(name: str) -> None:
    value = getattr(sf, name)
    assert value is getattr(importlib.import_module(sf._MODULES[name]), name)
    assert name in dir(sf)


def test_the_import_loads_nothing_heavy() -> None:
    """Nor does what only reads settings, or what a callback is derived from."""
    code = (
        "import sys, sage_fast as sf\n"
        "heavy = {'torch', 'numpy', 'diffusers', 'transformers', 'scipy'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
        "class Mine(sf.Callback): pass\n"
        "sf.build({'train.iterations': 3}), sf.evaluate, sf.sample, sf.Rollouts, sf.UserError\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'; did you mean 'train'"):
        sf.trian  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'; dir\(sage_fast\) lists"):
        sf.xyzzy  # type: ignore[attr-defined]  # noqa: B018


# -- settings --------------------------------------------------------------------------------------


def test_overrides_are_values_of_python_or_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings").mkdir()
    file = tmp_path / "settings" / "config.yaml"
    file.write_text("train: {iterations: 5, learning_rate: 1.0e-4}\ndata: {prompts: mine.txt}\n")
    typed = sf.load(
        file,
        {
            "train.iterations": 50,
            "train": {"learning_rate": "3e-4", "keep_best": False},
            "data.eval_prompts": Path("held-out.txt"),
            "tracking.trackers": ("tensorboard",),
            "model.weights": None,
        },
    )
    assert (typed.train.iterations, typed.train.learning_rate) == (50, 3e-4)
    assert not typed.train.keep_best
    assert typed.tracking.trackers == ["tensorboard"]
    # what a file names is beside it, what a call names in the current folder
    assert typed.data.prompts == str(tmp_path / "settings" / "mine.txt")
    assert typed.data.eval_prompts == str(tmp_path / "held-out.txt")
    as_texts = {"train.iterations": "50", "train.learning_rate": "3e-4"}
    assert sf.load(file, as_texts).train.iterations == 50


def test_built_settings_name_what_is_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that they begin is resumed from any folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text("def score(videos, prompts): ...\n")
    config = sf.build(
        {"data.prompts": "mine.txt", "reward": {"name": "my_reward:score"}, "output": Path("run")}
    )
    assert config.data.prompts == str(tmp_path / "mine.txt")
    assert config.reward.name == f"{tmp_path}/my_reward:score"
    assert config.output == "run"
    assert sf.build({"reward.args.path": {"a": 1}}).reward.args == {"path": {"a": 1}}


def test_a_wrong_value_of_python_is_named() -> None:
    with pytest.raises(sf.UserError, match=r"train.iterations = 'many': expected a whole number"):
        sf.load(None, {"train.iterations": "many"})
    with pytest.raises(sf.UserError, match=r"unknown setting 'train.iteratons'; did you mean"):
        sf.load(None, {"train": {"iteratons": 3}})
    with pytest.raises(sf.UserError, match=r"train.iterations = \[3\]: expected a whole number"):
        sf.build({"train.iterations": [3]})


# -- a run, its evaluation and its samples ---------------------------------------------------------


def test_a_run_has_its_metrics_and_the_columns_of_a_callback(finished: sf.Run) -> None:
    metrics = finished.metrics
    assert list(metrics["iteration"]) == [0, 1]
    assert list(metrics["twice/reward"]) == [2 * value for value in metrics["reward/mean"]]
    assert list(sf.read_metrics(finished.folder)["reward/mean"]) == list(metrics["reward/mean"])


def test_an_evaluation_is_that_of_the_command(
    finished: sf.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(finished.folder)
    words = ["eval", "base", f"trained={run}", "--folder", "by-command", "--json", "command.json"]
    assert main([*words, "--scorer", "testbed-judge", "--quiet"]) == 0
    printed = capsys.readouterr().out

    found = sf.evaluate(
        {"base": "base", "trained": finished},
        scorer="testbed-judge",
        folder="by-call",
        json=tmp_path / "call.json",
    )
    assert capsys.readouterr().out == ""
    assert json.loads(Path("call.json").read_text()) == json.loads(Path("command.json").read_text())
    for name in ("evaluation.md", "evaluation.html", "videos/trained/videos.csv"):
        assert Path("by-call", name).read_bytes() == Path("by-command", name).read_bytes()
    assert printed == f"{found}\n{Path('by-command', 'evaluation.html')}\n"

    rows = {(row.score, row.label): row for row in found.rows}
    assert rows["reward", "trained"].gain == pytest.approx(
        rows["reward", "trained"].mean - rows["reward", "base"].mean
    )
    # as the run itself was evaluated at its end
    after = json.loads((finished.folder / "eval" / "after.json").read_text())
    assert found.sets[1].scores["reward"] == pytest.approx(after["reward"], rel=1e-4)


def test_an_evaluation_writes_nothing_that_nobody_asked_for(
    finished: sf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = sf.evaluate(finished.folder, {"eval.num_prompts": 1})
    assert [videos.label for videos in one.sets] == ["run"]
    settings = sf.evaluate(finished.config, {"eval": {"num_prompts": 1}})
    base = sf.evaluate(["base", finished.config], {"eval.num_prompts": 1})
    assert settings.sets[0].scores == base.sets[0].scores != one.sets[0].scores
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_lose_the_scores(
    finished: sf.Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("sage_fast"), "propagate", True)
    with pytest.raises(OSError, match="No space left on device"):
        sf.evaluate(finished, {"eval.num_prompts": 1}, json="/dev/full")
    assert "| reward |" in caplog.text


def test_samples_are_those_of_the_command(
    finished: sf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sample", str(finished.folder), "--prompt", PROMPT, "--prompt", PROMPT]
    assert main([*words, "--folder", "by-command", "--quiet"]) == 0
    files = sf.sample(finished, prompts=[PROMPT, PROMPT], folder="by-call")
    assert [file.parent for file in files] == [Path("by-call")] * 2
    for file in files:
        assert file.read_bytes() == Path("by-command", file.name).read_bytes()

    (tmp_path / "mine.txt").write_text(f"{PROMPT}\n\n{PROMPT}\n")
    again = sf.sample(finished.folder, prompts=Path("mine.txt"), folder=Path("by-call"))
    assert [file.name[:2] for file in again] == ["02", "03"]
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]
    (untrained,) = sf.sample(finished.config, prompts=[PROMPT])
    assert untrained.parent == Path("samples")
    assert untrained.read_bytes() != files[0].read_bytes()


def state_of_the_process() -> dict[str, Any]:
    package = logging.getLogger("sage_fast")
    return {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "numpy's": np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        "python's": random.getstate(),
        "signals": {number: signal.getsignal(number) for number in (1, 2, 3, 10, 12, 15, 24)},
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "type": torch.get_default_dtype(),
        "collector": gc.isenabled(),
        "handlers": [*package.handlers],
        "ranks": dist.is_initialized(),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "search path": [*sys.path],
    }


def test_a_call_leaves_nothing_behind(finished: sf.Run, tmp_path: Path) -> None:
    before = state_of_the_process()
    sf.evaluate(finished, {"eval.num_prompts": 1}, scorer="testbed-judge")
    sf.sample(finished, prompts=[PROMPT], folder=tmp_path / "samples")
    one = {"train.iterations": 1, "output": tmp_path / "run"}
    sf.train(sf.build(SETTINGS | one))
    assert state_of_the_process() == before


CALLS: dict[str, tuple[Callable[[sf.Run], object], str]] = {
    "no source": (lambda run: sf.evaluate([]), "no source is given; expected a run"),
    "no path": (lambda run: sf.evaluate(3), "3: expected a path, settings or a run"),  # type: ignore[arg-type]
    "none of a list": (
        lambda run: sf.evaluate(["base", None]),  # type: ignore[list-item]
        "None: expected a path, settings or a run",
    ),
    "base alone": (lambda run: sf.evaluate("base"), "'base' is the model of a run or of settings"),
    "twice the same": (
        lambda run: sf.evaluate([run, run.folder]),
        "two sources are called 'run'; name them, as in {'before': ...}",
    ),
    "no such run": (
        lambda run: sf.evaluate(f"{run.folder}s"),
        "no such file or folder; expected a YAML file or a run folder; did you mean",
    ),
    "a folder with files": (
        lambda run: sf.evaluate(run, folder=run.folder),
        "expected a new or an empty folder; nothing was changed",
    ),
    "a misspelt setting": (
        lambda run: sf.evaluate(run, {"eval.num_promts": 3}),
        "unknown setting 'eval.num_promts'; did you mean 'eval.num_prompts'?",
    ),
    "a reserved label": (
        lambda run: sf.evaluate(run, scorer="judge=testbed"),
        "expected LABEL=NAME, and a label other than judge",
    ),
    "a scorer that is no name": (
        lambda run: sf.evaluate(run, scorer=len),  # type: ignore[arg-type]
        "scorer = <built-in function len>: expected a name, as in reward.name",
    ),
    "a file as settings": (
        lambda run: sf.train("config.yaml"),  # type: ignore[arg-type]
        "config = 'config.yaml': expected settings, of sf.load or sf.build",
    ),
    "no list of callbacks": (
        lambda run: sf.train(run.config, callbacks=3),  # type: ignore[arg-type]
        "callbacks = 3: expected a list of callbacks",
    ),
    "a text as prompts": (
        lambda run: sf.sample(run, prompts="a small red ball"),
        "texts are given as a list, prompts=[...]",
    ),
    "no prompts": (lambda run: sf.sample(run, prompts=[]), "expected at least one text"),
    "a prompt that is no text": (
        lambda run: sf.sample(run, prompts=[3]),  # type: ignore[list-item]
        "--prompt 3: expected a text",
    ),
    "too many images": (
        lambda run: sf.sample(run, prompts=[PROMPT], image=["a.png", "b.png"]),
        "2 for 1 of --prompt; expected one for all, or one for each",
    ),
    "no such image": (
        lambda run: sf.sample(run, prompts=[PROMPT], image="a.png"),
        "a.png': no such file",
    ),
    "a file as folder": (
        lambda run: sf.sample(run, prompts=[PROMPT], folder=run.folder / "config.yaml"),
        "a file; expected a folder; it is created if missing",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_a_line_that_says_what_is_expected(case: str, finished: sf.Run) -> None:
    call, expected = CALLS[case]
    with pytest.raises(sf.UserError) as raised:
        call(finished)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def evaluate_and_sample(folder: Path, run: str) -> None:
    """What each of two ranks does, one call after the other."""
    os.chdir(folder)
    first = sf.evaluate(run, json="scores.json")
    files = sf.sample(run, prompts=[PROMPT])
    with pytest.raises(sf.UserError, match="expected a new or an empty folder"):
        sf.evaluate(run, folder=folder)
    again = sf.evaluate(run)
    assert again.sets[0].scores == first.sets[0].scores
    assert not dist.is_initialized()
    assert Path("scores.json").is_file()  # whichever rank asks
    assert files[0].is_file()
    print([str(file) for file in files], first.sets[0].scores["reward"])


@pytest.mark.full  # test_a_call_leaves_nothing_behind holds it for one process
def test_ranks_evaluate_and_sample_one_call_after_the_other(
    finished: sf.Run, tmp_path: Path
) -> None:
    status = run_ranks(evaluate_and_sample, 2, tmp_path, str(finished.folder))
    first, second = screens(tmp_path)
    assert status == [0, 0], first + second
    assert first.splitlines()[-1] == second.splitlines()[-1]
    assert len(list((tmp_path / "samples").glob("*.mp4"))) == 1
