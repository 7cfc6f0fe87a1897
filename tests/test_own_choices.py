"""Samplers, surrogates, KL strategies and feedbacks of a user's own, named `module:name`."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.algorithm.advantages import group_advantages
from sage_fast.algorithm.flops import training_flops
from sage_fast.algorithm.kl_weight import KLController
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.algorithm.transitions import (
    SAMPLERS,
    SamplerRow,
    TransitionTable,
    sigma_schedule,
    transition_table,
)
from sage_fast.cli import main
from sage_fast.config.loader import build, load
from sage_fast.config.rank_checks import check_plugins
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError
from tests.tiny import settings, tiny_trainer, train

REPOSITORY = Path(__file__).parent.parent
MODULE = '''
import torch

from sage_fast.algorithm.kl_weight import FeedbackRow
from sage_fast.algorithm.objective import KLStrategy, SurrogateRow
from sage_fast.algorithm.transitions import SamplerRow

gain = 0.25

def quiet(s, n, eta):
    """First order of the SDE of flow, with a quarter of its variance."""
    below_one = torch.where(s == 1, n, s)
    variance = gain * eta**2 * (s - n) * s / (1 - below_one)
    a = 1 - variance / (2 * s)
    b = -(s - n) - variance * (1 - s) / (2 * s)
    return a, b, variance.sqrt()

bounded = SamplerRow(step=quiet, largest_eta=0.75)
weighted = SurrogateRow(title="Weighted", value=lambda s, _: s.log_ratio * s.advantage)
to_start = KLStrategy(anchor="start", velocity=True)
steep = FeedbackRow(factors=(2.0, 0.5))

# -- mistakes

def two(s, n, eta):
    return s, n

def scalar(s, n, eta):
    return s, n, 0.1

def narrow(s, n, eta):
    return tuple(x.float() for x in quiet(s, n, eta))

def infinite(s, n, eta):
    return s, n, 1 / (1 - s)

def negative(s, n, eta):
    return s, n, -s

def failing(s, n, eta):
    raise RuntimeError("no such step")

number = 3

class Sampler:
    pass

def total(scored, objective):
    return (scored.log_ratio * scored.advantage).mean()

summed = SurrogateRow(title="Summed", value=total)
detached = SurrogateRow(title="Detached", value=lambda scored, _: scored.advantage)
confused = SurrogateRow(title="x", value=lambda scored, _: scored.log_ratio, uses_errors=True)
nowhere = KLStrategy(anchor="begin", velocity=True)
one_factor = FeedbackRow(factors=(2.0,))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's module. Python has one module of a name, so all tests share it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_choices.py").write_text(MODULE)
    return folder


def test_all_four_train_from_a_settings_file(folder: Path) -> None:
    """Names are relative to the settings file, as those of rewards and models are."""
    file = folder / "config.yaml"
    file.write_text(
        "sampling: {sampler: 'own_choices:quiet'}\n"
        "objective: {surrogate: 'own_choices:weighted'}\n"
        "kl: {strategy: 'own_choices:to_start', feedback: 'own_choices:steep'}\n"
    )
    config = load(file)
    place = f"{folder}/own_choices"
    assert config.plugins == {
        "sampling.sampler": f"{place}:quiet",
        "objective.surrogate": f"{place}:weighted",
        "kl.strategy": f"{place}:to_start",
        "kl.feedback": f"{place}:steep",
    }
    objective = Objective(config)
    assert objective.surrogate.title == "Weighted"
    assert (objective.strategy.anchor, objective.strategy.velocity) == ("start", True)
    assert KLController(config.kl).row.factors == (2.0, 0.5)

    chosen = {name.replace(".", "__"): value for name, value in config.plugins.items()}
    found = tiny_trainer(settings(**chosen)).iteration(0)
    assert found["loss"] != tiny_trainer(settings()).iteration(0)["loss"]
    assert found["velocity_grad_norm"] is not None


def test_the_page_trains_as_it_is_written(tmp_path: Path) -> None:
    """docs/how-to/extend.md: its settings, and its Python as one module beside them."""
    page = (REPOSITORY / "docs" / "how-to" / "extend.md").read_text()
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    python = [text for language, text in found if language == "python"]
    (yaml,) = (text for language, text in found if language == "yaml")
    (tmp_path / "my_choices.py").write_text("\n".join(python))
    (tmp_path / "config.yaml").write_text(yaml)

    written = load(tmp_path / "config.yaml")
    given = dict(written.plugins) | {"kl.lambda_max": 0.1}
    config = settings(**{name.replace(".", "__"): value for name, value in given.items()})
    assert sorted(written.plugins) == [
        "kl.feedback",
        "kl.strategy",
        "objective.surrogate",
        "sampling.sampler",
    ]
    trainer = tiny_trainer(config)
    row = trainer.iteration(0)
    assert row["loss"] == row["loss"]  # not NaN
    assert trainer.objective.surrogate.title == "CISPO"
    assert trainer.kl.row.factors == (1.1, 0.9)


def test_a_sampler_of_ones_own_equals_its_formula(folder: Path) -> None:
    sigmas = sigma_schedule(6, 3.0)
    own = transition_table(sigmas, f"{folder}/own_choices:quiet", eta=1.0)
    flow = transition_table(sigmas, "flow", eta=0.5)
    assert torch.equal(own.coefficients(), flow.coefficients())
    with pytest.raises(UserError, match=r"eta = 0.8: .*:bounded is defined up to 0.75"):
        transition_table(sigmas, f"{folder}/own_choices:bounded", eta=0.8)


def test_a_sampler_may_be_the_object_itself() -> None:
    sigmas = sigma_schedule(6, 3.0)
    by_name = transition_table(sigmas, "cps", eta=0.5)
    for given in (SAMPLERS["cps"].step, SAMPLERS["cps"], SamplerRow(step=SAMPLERS["cps"].step)):
        assert torch.equal(transition_table(sigmas, given, eta=0.5).c, by_name.c)
    with pytest.raises(UserError, match=r"sampling.eta = 1.5: the sampler is defined up to 1"):
        transition_table(sigmas, SAMPLERS["cps"], eta=1.5)


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        ("sampling.sampler", "quit", r"module own_choices has no 'quit'; .*did you mean 'quiet'\?"),
        ("sampling.sampler", "two", r"expected three tensors a, b, c; it returned \(tensor"),
        ("sampling.sampler", "scalar", r"expected c as a tensor \[4\]; it returned 0.1"),
        ("sampling.sampler", "narrow", r"expected a in float64, as s and n are; got torch.float32"),
        ("sampling.sampler", "infinite", r"c is not finite at eta 0.5"),
        ("sampling.sampler", "negative", r"c is a standard deviation, so at least 0"),
        ("sampling.sampler", "failing", r"own_choices.py:\d+: RuntimeError: no such step"),
        ("sampling.sampler", "number", r"expected a function of \(s, n, eta\) .* got 3"),
        ("sampling.sampler", "Sampler", r"expected a function of .*SamplerRow; got <class"),
        ("objective.surrogate", "total", r"expected a .*SurrogateRow; got <function total"),
        ("objective.surrogate", "summed", r"value: expected a tensor \[3\]; it returned tensor\("),
        ("objective.surrogate", "detached", r"value: has no gradient in log_ratio"),
        ("objective.surrogate", "confused", r"uses_errors .*expected scores_rollout=False"),
        ("kl.strategy", "nowhere", r"anchor = 'begin': expected None, 'start' or 'moving'"),
        ("kl.strategy", "number", r"expected a sage_fast.algorithm.objective.KLStrategy; got 3"),
        ("kl.feedback", "one_factor", r"factors = \(2.0,\): expected two numbers above 0"),
        ("kl.feedback", "number", r"expected a .*FeedbackRow; got 3"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, setting: str, name: str, message: str) -> None:
    config = build({setting: f"{folder}/own_choices:{name}"})

    def resolve() -> None:
        check_trainable(config)
        KLController(config.kl)

    with pytest.raises(UserError, match=message) as caught:
        resolve()
    text = str(caught.value)
    assert text.startswith(f"{setting} = '{folder}/own_choices:{name}': ")
    assert "\n" not in text


def test_a_missing_module_is_told_before_pytorch_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"sampling.sampler = 'no_such_module:x': .*no module"):
        check_plugins(build({"sampling.sampler": "no_such_module:x"}).plugins)
    output = tmp_path / "run"
    file = tmp_path / "config.yaml"
    file.write_text("sampling: {sampler: 'no_such_module:x'}\n")
    assert main(["train", str(file), "--output", str(output)]) == 2
    assert "no module 'no_such_module'" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("value", ["saeg", "a module:name", ":x", "x:", 3, None])
def test_what_is_neither_a_choice_nor_a_place_is_refused(value: Any) -> None:
    with pytest.raises(
        UserError, match=r"sampling.sampler = .*: expected one of sage, .*, or package.module:name"
    ):
        build({"sampling.sampler": value})


def test_a_resume_says_that_the_code_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "changing_sampler.py"
    file.write_text(MODULE)
    caplog.set_level(logging.INFO)
    given = {
        "sampling__sampler": f"{tmp_path}/changing_sampler:quiet",
        "output": str(tmp_path / "run"),
        "train__iterations": 1,
        "eval__num_prompts": 1,
        "eval__steps": 1,
        "tracking__trackers": [],
    }
    train(settings(**given))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    before = facts["contents"]["sampling.sampler"]
    assert before.startswith("code (SHA-256 ")

    file.write_text(MODULE + "\n# changed\n")
    train(settings(**given | {"train__iterations": 2}), resume=True)
    said = " ".join(" ".join(caplog.messages).split())
    assert "note: sampling.sampler holds code (SHA-256 " in said
    assert f"from here on; it held {before}" in said
    assert RunFolder(tmp_path / "run").facts["contents"]["sampling.sampler"] != before


def test_functions_that_take_names_say_which_there_are() -> None:
    sigmas = sigma_schedule(4, 3.0)
    with pytest.raises(UserError, match=r"sampling.sampler = 'sagee': .*did you mean 'sage'\?"):
        transition_table(sigmas, "sagee", 0.5)

    table: TransitionTable = transition_table(sigmas, "sage", 0.5)
    for method in (table.coefficients, table.equalizer, table.gradient_scale, table.log_ratio_bias):
        with pytest.raises(UserError, match=r"log_prob = 'maen': .*did you mean 'mean'\?"):
            method("maen")

    rewards = torch.tensor([[1.0, 2.0]])
    with pytest.raises(UserError, match=r"advantage_std = 'bacth': .*did you mean 'batch'\?"):
        group_advantages(rewards, rewards > 0, std="bacth")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"checkpointing = 'ful': .*did you mean 'full'\?"):
        training_flops(2.0, 1.0, checkpointing="ful", trains_adapter=True)
