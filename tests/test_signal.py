"""The meter of `sage-fast profile --signal`: its estimates against closed forms, and that it
changes nothing."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.advantages import group_advantages
from sage_fast.cli import main
from sage_fast.tools.signal_meter import ROWS, collect, estimate, format_signal, products
from tests.ranks import command_on_ranks
from tests.test_cli import PAPER, SMALL
from tests.tiny import settings, tiny_trainer

COUNT, SIZE = 24, 12

# -- the estimates ---------------------------------------------------------------------------------


def drawn() -> tuple[list[list[Tensor]], dict[str, float]]:
    """Gradients of two configurations whose noise is the same in an iteration, and what is true of
    them."""
    a, b = torch.zeros(2, SIZE, dtype=torch.float64)
    a[0], b[0], b[1] = 1.0, 0.8, 0.6
    noise = 0.5 * torch.randn(COUNT, SIZE, dtype=torch.float64)
    variance = 0.25 * SIZE
    truth = {
        "squared signal": 1.0,
        "noise": variance,
        "signal / noise of an iteration": 1 / variance,
        "cosine": 0.8,
    }
    return [list(a + noise), list(b + noise)], truth


def policy_gradients() -> tuple[list[list[Tensor]], dict[str, float]]:
    """Of a Gaussian with a linear reward, by group-relative advantages.

    A sample is mu + sigma z, its reward r . x and its score z / sigma. With the deviation s of a
    group's G rewards, over |r| sigma, the gradient is s / sigma along r; across r it is Gaussian,
    with the variance 1 / (sigma^2 G), since the squares of the advantages add up to G. The moments
    of s are those of a chi distribution with G - 1 degrees.
    """
    groups, size, sigma = 2, 6, 0.7
    reward = torch.arange(1.0, SIZE + 1).double()
    z = torch.randn(COUNT, groups, size, SIZE, dtype=torch.float64)
    rewards = (3.0 + sigma * z @ reward).view(-1, size)
    advantages, _ = group_advantages(rewards, torch.ones_like(rewards, dtype=torch.bool))
    gradients = (advantages.view(COUNT, groups, size, 1) * z / sigma).mean((1, 2))
    mean = math.sqrt(2 / size) * math.exp(math.lgamma(size / 2) - math.lgamma((size - 1) / 2))
    along, across = (size - 1) / size - mean**2, (SIZE - 1) / size
    signal, noise = mean**2 / sigma**2, (along + across) / sigma**2 / groups
    return [list(gradients)], {
        "squared signal": signal,
        "noise": noise,
        "signal / noise of an iteration": signal / noise,
    }


def estimated(gradients: list[list[Tensor]]) -> tuple[dict[str, float], dict[str, float]]:
    """The values and errors of the first configuration, and of the cosine; an iteration has 2
    PFLOPs in 4 seconds."""
    number = len(gradients)
    gram = products([one for of in gradients for one in of]).view(number, COUNT, number, COUNT)
    costs = torch.tensor([2.0, 4.0]).double().view(2, 1, 1).expand(2, number, COUNT)
    names = [*ROWS, *["cosine"] * (number > 1)]
    values, errors = (
        [*x.tolist()[: len(ROWS) * number : number], x.tolist()[-1]] for x in estimate(gram, costs)
    )
    return dict(zip(names, values)), dict(zip(names, errors))


@pytest.mark.parametrize("draw", [drawn, policy_gradients])
def test_estimates_agree_with_the_closed_form_within_their_errors(
    draw: Callable[[], tuple[list[list[Tensor]], dict[str, float]]],
) -> None:
    torch.manual_seed(0)
    repetitions, (_, truth) = 200, draw()
    found = [estimated(draw()[0]) for _ in range(repetitions)]
    for name, true in truth.items():
        values, errors = (
            torch.tensor([one[kind][name] for one in found]).double() for kind in (0, 1)
        )
        spread = float(values.std())
        assert abs(float(errors.mean()) / spread - 1) < 0.3, name
        # a quotient of estimates has a bias of the order of its variance
        bias = 0.0 if name in ("squared signal", "noise") else spread**2 / true
        assert abs(float(values.mean()) - true) < 3 * spread / math.sqrt(repetitions) + bias, name


def test_ratios_by_cost() -> None:
    torch.manual_seed(1)
    values, errors = estimated(drawn()[0])
    for of in (values, errors):
        ratio = of["signal / noise of an iteration"]
        assert of["signal / noise per PFLOP"] == pytest.approx(ratio / 2)
        assert of["signal / noise per device second"] == pytest.approx(ratio / 4)
    assert (values["PFLOPs of an iteration"], errors["PFLOPs of an iteration"]) == (2.0, 0.0)


def test_no_signal_has_no_cosine_and_an_error_on_the_safe_side() -> None:
    torch.manual_seed(2)
    found = [
        estimated([list(torch.randn(COUNT, SIZE)), list(torch.randn(COUNT, SIZE))])
        for _ in range(200)
    ]
    signals, errors = (
        torch.tensor([one[kind]["squared signal"] for one in found]) for kind in (0, 1)
    )
    assert abs(float(signals.mean())) < 3 * float(signals.std()) / math.sqrt(200)
    assert 1 < float(errors.square().mean().sqrt() / signals.std()) < 1.6
    assert all(math.isnan(values["cosine"]) for values, _ in found if values["squared signal"] <= 0)
    assert any(math.isnan(values["cosine"]) for values, _ in found)


def test_products_are_those_of_whole_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sage_fast.tools.signal_meter.CHUNK", 7)
    rows = torch.randn(4, 30)
    torch.testing.assert_close(
        products(list(rows)), rows.double() @ rows.double().T, rtol=1e-14, atol=1e-14
    )


# -- gradients of iterations -----------------------------------------------------------------------


def test_gradients_are_those_of_the_updates_and_nothing_changes() -> None:
    kl = {"strategy": "dual", "velocity_term": "closed_form", "lambda_min": 0.1}
    train = {"train__optimizer_steps": 2, "train__ema_decay": 0.5, "train__max_grad_norm": 1e-6}
    config = settings(
        **{f"kl__{name}": value for name, value in kl.items()},
        **train,
        kl__anchor_interval=1,
        kl__lambda_max=1.0,
    )
    trainer = tiny_trainer(config)
    before, anchor, lambda_kl = trainer.policy.snapshot(), trainer.anchor, trainer.kl.state_dict()
    gradients, costs = collect(trainer, 3, warmup=1)
    after = trainer.policy.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.anchor is anchor
    assert (trainer.kl.state_dict(), trainer.engine.steps) == (lambda_kl, 0)
    assert all(torch.equal(before[name], average) for name, average in trainer.engine.ema.items())
    assert not any(state for state in trainer.engine.optimizer_state.values())
    assert all(p.grad is None for p in trainer.engine.parameters)
    assert len({float(gradient.norm()) for gradient in gradients}) == 3
    assert costs.shape == (2, 3)
    assert (costs > 0).all()
    again, _ = collect(trainer, 3, warmup=0)
    assert all(map(torch.equal, gradients, again))


def test_the_gradient_is_taken_before_clipping() -> None:
    config = settings(train__optimizer_steps=1, train__max_grad_norm=1e-6, kl__strategy="none")
    (gradient, *_), _ = collect(tiny_trainer(config), 3, warmup=0)
    row: dict[str, Any] = tiny_trainer(config).iteration(0)
    assert float(gradient.norm()) == pytest.approx(row["grad_norm"], rel=1e-5)
    assert row["grad_norm"] > 1e-4


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the signal of a configuration against a copy of itself."""
    folder = tmp_path_factory.mktemp("signal")
    shutil.copy(PAPER, folder / "copy.yaml")
    words = ["--signal", "3", "--against", str(folder / "copy.yaml"), "--warmup", "0"]
    assert main(["profile", str(PAPER), "--folder", str(folder), *words, *SMALL]) == 0
    return folder


def test_a_configuration_against_itself(measured: Path) -> None:
    result = json.loads((measured / "signal.json").read_text())
    gram = torch.tensor(result["gram"]).double()
    assert gram.shape == (2, 3, 2, 3)
    torch.testing.assert_close(gram, gram.permute(2, 3, 0, 1), rtol=1e-12, atol=0)
    torch.testing.assert_close(gram[0, :, 1], gram[0, :, 0], rtol=1e-12, atol=0)
    assert (gram[0, :, 0].diagonal() > 0).all()
    ours, copy = result["signal"].values()
    signal = ours["squared signal"]["value"]
    assert signal == pytest.approx((gram[0, :, 0].sum() - gram[0, :, 0].trace()) / 6)
    for row in ROWS:
        assert "second" in row or copy[row] == pytest.approx(ours[row])
    assert result["cosine"]["value"] == (pytest.approx(1) if signal > 0 else None)
    printed = format_signal(result)
    assert str(PAPER) in printed
    assert "cosine of the two gradients" in printed
    assert ("undefined" in printed) == (
        None in [x for row in (*ours.values(), result["cosine"]) for x in row.values()]
    )


def test_a_signal_is_not_overwritten(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (measured / "signal.json").read_bytes()
    assert main(["profile", str(PAPER), "--folder", str(measured), "--signal", "3", *SMALL]) == 2
    assert "already holds a signal; choose another folder with --folder" in capsys.readouterr().err
    assert (measured / "signal.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--signal", "2"], "--signal 2: expected 3 or more iterations"),
        (
            ["--signal", "3", "--window-only"],
            "expected 3 or more iterations, without --window-only",
        ),
        (
            ["--against", "other.yaml"],
            "--against other.yaml: expected another configuration than CONFIG, and --signal",
        ),
        (["--signal", "3", "--against", str(PAPER)], "expected another configuration than CONFIG"),
        (
            ["--signal", "3", "--train.engine", "zero2"],
            "train.engine = 'zero2': gradients are taken where every rank",
        ),
        (["--signal", "3", "--train.engine", "zero3"], "the nearest choice is 'plain'"),
        (
            ["--signal", "3", "--against", str(PAPER.parents[1] / "demo.yaml")],
            "compared at the same weights",
        ),
    ],
)
def test_messages(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("sage_fast.tools.signal_meter.load_trainer", None)  # nothing is loaded
    assert (
        main(["profile", str(PAPER), "--folder", str(tmp_path / "none"), *SMALL, *arguments]) == 2
    )
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


def test_the_price_comes_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("sage_fast.tools.signal_meter.load_trainer", None)
    arguments = ["--signal", "16", "--model.path", "random:hunyuanvideo15-480p"]
    with pytest.raises(TypeError):
        main(["profile", str(PAPER), "--folder", str(tmp_path / "large"), *arguments])
    said = " ".join("".join(capfd.readouterr()).split())
    assert "16 iterations without an update: about " in said
    assert "GPU-hours at the rates measured on an H200, " in said


@pytest.mark.soak
def test_two_ranks_find_what_one_finds(measured: Path, tmp_path: Path) -> None:
    words = ["profile", str(PAPER), "--folder", "two", "--signal", "3", "--warmup", "0", *SMALL]
    assert command_on_ranks(words, tmp_path).count("squared signal") == 1
    two, one = (
        json.loads((folder / "signal.json").read_text()) for folder in (tmp_path / "two", measured)
    )
    gram, expected = (torch.tensor(result["gram"]).double()[0, :, 0] for result in (two, one))
    torch.testing.assert_close(
        gram, expected, rtol=1e-3, atol=1e-3 * float(expected.diagonal().mean())
    )
    for row in ("PFLOPs of an iteration", "squared signal"):
        assert next(iter(two["signal"].values()))[row]["value"] == pytest.approx(
            next(iter(one["signal"].values()))[row]["value"], rel=0.05
        )
