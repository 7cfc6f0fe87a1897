"""What a resumed run continues with: its own settings, those given, and evaluations that were
interrupted."""

import json
import logging
import re
import shutil
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sage_fast.cli import main
from sage_fast.commands.sources import resumed_settings
from sage_fast.config.fields import settings_of
from sage_fast.config.loader import build, dump, load
from sage_fast.config.schema import Config
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.run.checkpoint import save_checkpoint
from sage_fast.run.resume import check_kept, rule_of
from sage_fast.run_folder import STATE, RunFolder, digest
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics, write_json
from tests.test_cli import PAPER, SMALL
from tests.test_trainer import resume
from tests.tiny import settings, tiny_trainer, train


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one iteration, started with options that its file does not have."""
    run = tmp_path_factory.mktemp("begun") / "run"
    options = ["--train.iterations", "1", "--train.learning_rate", "3e-4"]
    assert main(["train", str(PAPER), "--output", str(run), "--quiet", *SMALL, *options]) == 0
    return run


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "run")


# -- settings --------------------------------------------------------------------------------------


def test_the_run_keeps_its_settings_and_the_file_changes_none(begun: Path) -> None:
    """Each difference between the file and the run is printed; none is applied."""
    config, lines = resumed_settings(str(PAPER), {"output": str(begun), "train.iterations": "5"})
    assert config == load(begun / "config.yaml", {"train.iterations": "5"})
    expected = f"train.learning_rate stays 0.0003 as in the run, not 0.001 as in {PAPER}; "
    assert expected + "--train.learning_rate changes it" in lines
    said, own = load(PAPER), load(begun / "config.yaml")
    differing = {
        name for name in settings_of(Config) if attrgetter(name)(said) != attrgetter(name)(own)
    }
    assert {line.split()[0] for line in lines} == differing - {"output", "train.iterations"}


def test_a_run_folder_is_all_that_a_resume_needs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has been moved, and its own file still has the old path."""
    assert load(run / "config.yaml").output != str(run)
    for source in (run, run / "config.yaml"):
        assert resumed_settings(str(source), {}) == (
            load(run / "config.yaml", {"output": str(run)}),
            [],
        )
    before = (run / "config.yaml").read_text()
    assert main(["train", str(run), "--resume", "--train.iterations", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "train.iterations = 2 from here on; it was 1" in out
    assert "resumed after 1 iteration" in out
    assert (run / "config.until-000001.yaml").read_text() == before
    assert load(run / "config.yaml") == load(
        begun_with(before, run), {"output": str(run), "train.iterations": "2"}
    )
    assert [row["learning_rate"] for row in read_metrics(run / "metrics.jsonl")] == [3e-4, 3e-4]


def begun_with(text: str, folder: Path) -> Path:
    file = folder.parent / "before.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("kept", "ignored", "line"),
    [
        (["a:B", "c:D"], ["a:B", "e:F"], "stays with 'c:D' as in the run, not 'e:F' as in FILE"),
        (["a:B", "c:D"], ["c:D"], "stays with 'a:B' as in the run, which FILE lacks"),
        ([], ["a:B"], "stays as in the run, without 'a:B', which FILE has"),
        (["a:B", "c:D"], ["c:D", "a:B"], "stays ['a:B', 'c:D'] as in the run, not"),
    ],
)
def test_of_a_list_only_what_differs_is_named(
    kept: list[str], ignored: list[str], line: str, tmp_path: Path
) -> None:
    begun = build({"output": str(tmp_path / "run"), "callbacks": kept})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump(begun))
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"output": str(tmp_path / "run"), "callbacks": ignored}))
    _, lines = resumed_settings(str(file), {})
    (found,) = [found for found in lines if found.startswith("callbacks ")]
    assert line.replace("FILE", str(file)) in found
    assert found.endswith("; --callbacks changes it")


def test_a_resume_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is named has to be there; the run of a configuration begins."""
    assert main(["train", str(tmp_path), "--resume"]) == 2
    assert "no run to resume there; leave --resume out to start one" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    command = [
        "train",
        str(PAPER),
        "--output",
        str(tmp_path / "none"),
        *SMALL,
        "--train.iterations",
        "1",
    ]
    assert main([*command, "--resume", "--dry-run"]) == 0
    assert "does not start here" not in capsys.readouterr().out
    assert main([*command, "--resume"]) == 0
    assert f"no run in {tmp_path / 'none'} yet: it begins" in capsys.readouterr().out.splitlines()
    assert "resumed" not in RunFolder(tmp_path / "none").facts
    assert main([*command, "--resume"]) == 0
    assert "resumed after 1 iteration" in capsys.readouterr().out.splitlines()


OTHERS: dict[str, Any] = {
    "seed": 5,
    "model.path": "random:testbed",
    "model.dtype": "bfloat16",
    "model.tuning": "full",
    "model.weights": str(Path(__file__).parent),
    "model.lora_rank": 32,
    "model.lora_alpha": 32,
    "model.lora_targets": "x",
    "data.eval_prompts": "testbed:train",
    "sampling.num_frames": 13,
    "sampling.height": 64,
    "sampling.width": 64,
    "sampling.shift": 4.0,
    "sampling.guidance_scale": 2.0,
    "reward.name": "testbed-judge",
    "reward.args": {"folder": 1},
    "reward.prefix": "x_",
    "reward.several": [{"name": "testbed-judge", "weights": {"naturalness": 1}}],
    "eval.steps": 3,
    "data.negative_prompt": "grey",
    "eval.guidance_scale": 2.0,
    "eval.num_prompts": 1,
    "eval.seeds_per_prompt": 2,
    "eval.judge": "testbed",
    "tracking.project": "another",
}
KEPT = [name for name in settings_of(Config) if rule_of(name).kind == "kept"]


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.fault("a resume with a setting that a run keeps", "refused by name, nothing changed")
def test_what_a_run_keeps_is_refused_before_anything_is_touched(
    name: str, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(begun)
    assert main(["train", str(begun), "--resume", f"--{name}", str(OTHERS[name])]) == 2
    error = capsys.readouterr().err
    expected = (
        rf"{name} = '?{re.escape(str(OTHERS[name]))}'?: the run in '.*' began with .* and keeps "
        r"it; continue without"
    )
    assert re.search(expected, error)
    assert files(begun) == before


def test_where_a_reward_runs_and_what_its_parts_weigh_may_change(tmp_path: Path) -> None:
    """A restarted server has another address, but gives the same scores."""
    entry = {"name": "http://one:8000", "weights": {"vq": 1.0}, "args": {"dtype": "uint8"}}
    begun = [entry, {"name": "testbed", "weights": {}, "prefix": "x_"}]
    changes: list[tuple[int, dict[str, Any], bool]] = [
        (0, {"name": "http://two:9000", "args": {}, "workers": 3}, True),
        (1, {"device": "cpu", "weights": {"mq": 2.0}}, True),
        (1, {"name": "http://two:9000"}, False),
        (1, {"prefix": "y_"}, False),
        (1, {"args": {"fps": 3}}, False),
    ]
    (tmp_path / "config.yaml").write_text(
        dump(build({"output": str(tmp_path), "reward.several": begun}))
    )
    for place, change, allowed in changes:
        several = [values | change if i == place else values for i, values in enumerate(begun)]
        config = build({"output": str(tmp_path), "reward.several": several})
        if allowed:
            check_kept(config)
        else:
            with pytest.raises(UserError, match=r"^reward.several = .* began with .* and keeps it"):
                check_kept(config)


def test_fewer_iterations_than_are_done_are_refused(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(begun)
    (begun / "checkpoints" / "iteration-000002").mkdir()
    try:
        assert main(["train", str(begun), "--resume"]) == 2
    finally:
        (begun / "checkpoints" / "iteration-000002").rmdir()
    assert "train.iterations = 1: the run in" in (error := capsys.readouterr().err)
    assert "has done 2 already; nothing was changed" in error
    assert files(begun) == before


@pytest.mark.parametrize("setting", ["train.ema_decay", "train.optimizer", "model.attention"])
@pytest.mark.fault(
    "a resume with a setting that the checkpoint does not fit", "refused by name, nothing changed"
)
def test_what_only_the_checkpoint_can_refuse_touches_nothing_either(
    setting: str, begun: Path
) -> None:
    value = {"train.ema_decay": "0.9", "train.optimizer": "muon", "model.attention": "flash3"}[
        setting
    ]
    before = files(begun)
    assert (
        main(["train", str(begun), "--resume", "--train.iterations", "3", f"--{setting}", value])
        == 2
    )
    assert files(begun) == before


@pytest.mark.fault(
    "a resume with other evaluation prompts in the same file", "refused, nothing changed"
)
def test_other_evaluation_prompts_in_the_same_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise they would show only after all training, when the two evaluations are compared."""
    prompts, run = tmp_path / "heldout.jsonl", tmp_path / "run"
    first = '{"prompt": "a small red ball moves left quickly"}'
    second = '{"prompt": "a big blue ball moves up slowly", "negative_prompt": "red"}'
    prompts.write_text(f"{first}\n{second}\n")
    options = [
        "--data.prompts",
        str(prompts),
        "--data.eval_prompts",
        str(prompts),
        "--train.iterations",
        "1",
        "--quiet",
    ]
    assert main(["train", str(PAPER), "--output", str(run), *SMALL, *options]) == 0
    before = files(run)
    for other in (second.replace("big", "small"), second.replace('"red"', '"green"')):
        assert other != second
        prompts.write_text(f"{first}\n{other}\n")
        assert main(["train", str(run), "--resume", "--train.iterations", "2"]) == 2
        assert "holds other prompts than those that the run" in capsys.readouterr().err
        assert files(run) == before


@pytest.mark.fault(
    "a resume with another learning rate or weight decay", "applied from the next update on", 2
)
def test_learning_rate_and_weight_decay_reach_the_optimizer(tmp_path: Path) -> None:
    """The weights show it: Adam's step is proportional to the rate, the decay to the weights."""

    first = tiny_trainer(settings(train__weight_decay=0.0))
    first.iteration(0)
    save_checkpoint(tmp_path, 1, first.engine, first.state_dict(), first.anchor)

    def resumed(learning_rate: float, weight_decay: float) -> dict[str, torch.Tensor]:
        trainer = tiny_trainer(
            settings(train__learning_rate=learning_rate, train__weight_decay=weight_decay)
        )
        resume(trainer, tmp_path)
        assert trainer.iteration(1)["learning_rate"] == learning_rate
        return trainer.policy.snapshot()

    once, thrice, decayed = resumed(1e-3, 0.0), resumed(3e-3, 0.0), resumed(1e-3, 20.0)
    for name, weight in first.policy.snapshot().items():
        torch.testing.assert_close(
            thrice[name] - weight, 3 * (once[name] - weight), rtol=1e-3, atol=1e-7
        )
        torch.testing.assert_close(
            decayed[name], once[name] - 1e-3 * 20.0 * weight, rtol=1e-4, atol=1e-7
        )


def test_settings_of_a_resume_from_python(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All settings count as given: each difference is logged and applied, or refused."""
    caplog.set_level("INFO")
    config = load(
        run / "config.yaml",
        {"output": str(run), "train.iterations": "2", "train.max_grad_norm": "0.5"},
    )
    caplog.set_level(logging.INFO)
    train(config, resume=True)
    assert "train.max_grad_norm = 0.5 from here on; it was 1.0" in caplog.messages
    assert load(run / "config.yaml") == config


def test_a_resume_from_python_begins_a_run_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the command does; not where a run has left files."""
    caplog.set_level(logging.INFO)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        caplog.clear()
        config = settings(output=str(folder), train__iterations=1)
        train(config, resume=True)
        assert f"no run in {folder} yet: it begins" in caplog.messages
        assert "resumed" not in RunFolder(folder).facts
    caplog.clear()
    train(config.replace({"train.iterations": 2}), resume=True)
    assert "resumed after 1 iteration" in caplog.messages

    (tmp_path / "empty" / "config.yaml").unlink()
    before = files(tmp_path / "empty")
    with pytest.raises(UserError, match=r"config\.yaml is missing, and run\.json"):
        train(config, resume=True)
    assert files(tmp_path / "empty") == before


@pytest.mark.fault("a resume without metrics.jsonl", "refused, nothing changed", 2)
def test_a_run_without_its_metrics_is_not_resumed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would end as if its first iterations had never happened."""
    for damage in (lambda file: file.write_text(""), Path.unlink):
        damage(run / "metrics.jsonl")
        before = files(run)
        assert main(["train", str(run), "--resume", "--train.iterations", "2"]) == 2
        error = capsys.readouterr().err
        assert (
            f"{str(run / 'metrics.jsonl')!r}: the line of iteration 0 is missing; put a copy of"
            in error
        )
        assert files(run) == before


def checkpoint_of(run: Path, iteration: int, *, whole: bool = True) -> None:
    """Copy the run's checkpoint as one of another iteration."""
    folder = shutil.copytree(
        run / "checkpoints" / "iteration-000001", run / f"checkpoints/iteration-{iteration:06d}"
    )
    state, manifest = read_json(folder / STATE), read_json(folder / "manifest.json")
    write_json(state | {"iteration": iteration}, folder / STATE)
    if whole:
        manifest["files"][STATE] = digest(folder / STATE)
        write_json(manifest, folder / "manifest.json")


def write_lines(run: Path, iterations: list[int]) -> None:
    row = json.loads((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"iteration": i}) + "\n" for i in iterations)
    )


GAPS = {
    "first": ([1, 2, 3], 0),
    "middle": ([0, 2, 3], 1),
    "last": ([0, 1, 2], 3),
    "last before the checkpoint": ([0, 1, 2, 4], 3),
    "one twice": ([0, 1, 1, 2, 3], 2),
    "swapped": ([0, 2, 1, 3], 1),
}


@pytest.mark.parametrize("only", [True, False], ids=["only checkpoint", "newest checkpoint"])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.fault(
    "a resume with lines of metrics.jsonl missing, repeated or swapped", "refused, nothing changed"
)
def test_a_run_with_gaps_in_its_metrics_is_not_resumed(
    gap: str, only: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    iterations, missing = GAPS[gap]
    checkpoint_of(run, 4)
    if only:
        shutil.rmtree(run / "checkpoints" / "iteration-000001")
    write_lines(run, iterations)
    before = files(run)
    assert main(["train", str(run), "--resume", "--train.iterations", "5"]) == 2
    found = capsys.readouterr()
    assert f"metrics.jsonl': the line of iteration {missing} is missing; put a copy" in found.err
    assert files(run) == before


def test_a_damaged_checkpoint_needs_no_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was skipped by a resume that cut its lines off, and that was killed before it replaced the
    checkpoint."""
    checkpoint_of(run, 4, whole=False)
    write_lines(run, [0, 1])
    assert main(["train", str(run), "--resume", "--train.iterations", "4"]) == 0
    assert "resumed after 1 iteration" in capsys.readouterr().out
    assert [row["iteration"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3]


# -- weights of a run folder -----------------------------------------------------------------------


@pytest.mark.fault(
    "damaged weights in a run folder that is sampled or evaluated",
    "skipped for the sound ones before",
)
def test_damaged_weights_are_not_evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that only a resume reads may be damaged."""
    first, second = (run / "checkpoints" / f"iteration-{number:06d}" for number in (1, 2))
    shutil.rmtree(run / "weights")
    shutil.copytree(first, second)
    for file in (first / STATE, second / LORA_FILE):
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
    fault = f"{LORA_FILE} has changed since it was written (SHA-256)"
    assert main(["eval", str(run), "--json", str(run.parent / "scores.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"note: iteration-000002 cannot be used and is skipped: {fault}"
    assert lines[1] == f"weights of iteration 1: {first}"
    (first / "manifest.json").unlink()
    assert main(["sample", str(run), "--prompt", "a small red ball moves left quickly"]) == 2
    error = capsys.readouterr().err
    assert f"(iteration-000002: {fault}; iteration-000001: manifest.json is missing)" in error


@pytest.mark.fault(
    "a flipped bit in the final weights/", "skipped for the checkpoint of the same iteration"
)
def test_damaged_final_weights_are_not_used(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert RunFolder(run).newest_weights() == (run / "weights", 1)
    content = bytearray((run / "weights" / LORA_FILE).read_bytes())
    content[-3] ^= 4
    (run / "weights" / LORA_FILE).write_bytes(content)
    assert main(["eval", str(run), "--json", str(run.parent / "scores.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    fault = f"{LORA_FILE} has changed since it was written (SHA-256)"
    assert lines[0] == f"note: weights cannot be used and is skipped: {fault}"
    assert lines[1] == f"weights of iteration 1: {run / 'checkpoints' / 'iteration-000001'}"
    named = ["--model.weights", str(run / "weights")]
    for command in (["sample", str(PAPER), "--prompt", "a"], ["sample", str(run), "--prompt", "a"],
                    ["eval", str(run)],
                    ["train", str(PAPER), "--output", str(run.parent / "other")]):  # fmt: skip
        assert main([*command, *named]) == 2
        assert (
            f"model.weights = {str(run / 'weights')!r}: damaged: {fault}" in capsys.readouterr().err
        )


# -- evaluations -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "damage",
    [
        "missing",
        *(pytest.param(it, marks=pytest.mark.soak) for it in ("cut off", "of another size")),
    ],
)
@pytest.mark.fault(
    "the evaluation before training is missing, cut off, or of another size",
    "made again from the start weights",
)
def test_a_lost_evaluation_before_training_is_made_from_the_start_weights(
    damage: str, run: Path
) -> None:
    file = run / "eval" / "before.json"
    text = file.read_text()
    scores = json.loads(text)
    assert main(["train", str(run), "--resume", "--quiet", "--train.iterations", "2"]) == 0
    if damage == "missing":
        shutil.rmtree(run / "eval")
    elif damage == "cut off":
        file.write_text(text[:40])
    else:
        file.write_text(json.dumps(scores | {"reward": scores["reward"][:1]}))
    assert main(["train", str(run), "--resume", "--quiet", "--train.iterations", "3"]) == 0
    assert json.loads(file.read_text()) == scores
    assert json.loads((run / "eval" / "after.json").read_text())["reward"] != scores["reward"]


@pytest.mark.full
def test_the_start_weights_are_those_of_model_weights_and_not_their_average(
    begun: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [
        "--model.weights",
        str(begun / "weights"),
        "--train.ema_decay",
        "0.5",
        "--train.iterations",
        "2",
    ]
    assert main(["train", str(PAPER), "--output", str(run), "--quiet", *SMALL, *options]) == 0
    before = (run / "eval" / "before.json").read_text()
    shutil.rmtree(run / "eval")
    assert main(["train", str(run), "--resume", "--quiet"]) == 0
    assert (run / "eval" / "before.json").read_text() == before


EVALUATED = [*SMALL, "--train.iterations", "2", "--eval.interval", "1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run with an evaluation before, during and after training."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(PAPER), "--output", str(run), "--quiet", *EVALUATED]) == 0
    return run


@pytest.mark.full
@pytest.mark.parametrize("name", ["before", "iteration-000001", "after"])
@pytest.mark.fault(
    "Ctrl-C in an evaluation before, within and after training",
    "done again, with the scores of an undisturbed run",
)
def test_an_interrupted_evaluation_is_done_again(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves a checkpoint of the evaluated iteration, which is not repeated."""
    run = tmp_path / "run"
    number = ["before", "iteration-000001", "after"].index(name)
    calls = []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return evaluate(*arguments, **named)

    from sage_fast.eval.evaluation import evaluate

    with monkeypatch.context() as patch:
        patch.setattr("sage_fast.callbacks.evaluations.evaluate", interrupted)
        assert main(["train", str(PAPER), "--output", str(run), "--quiet", *EVALUATED]) == 130
    assert not (run / "eval" / f"{name}.json").exists()
    assert main(["train", str(run), "--resume", "--quiet"]) == 0
    for expected in (whole / "eval").iterdir():
        assert (run / "eval" / expected.name).read_text() == expected.read_text(), expected.name
