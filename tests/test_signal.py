"""The meter of `sage-fast profile --signal`: its estimates against closed forms, and that it
changes nothing."""

import dataclasses
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
from sage_fast.parallel.muon import MOMENTUM
from sage_fast.parallel.optimizers import BETAS, make_optimizers
from sage_fast.tools.signal_meter import (
    ADAMW,
    GRADIENT,
    MUON,
    ROWS,
    TrainedWeight,
    collect,
    estimate,
    format_signal,
    gram_matrices,
    trained_weights,
)
from tests.ranks import command_on_ranks
from tests.test_cli import PAPER, SMALL
from tests.tiny import CPU, settings, tiny_trainer

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


def gram_of(gradients: list[list[Tensor]]) -> Tensor:
    """Products of the gradients of a vector."""
    vector = TrainedWeight(name="w", shape=gradients[0][0].shape, by_muon=False)
    grams = gram_matrices(gradients, [vector], [1e-8] * len(gradients), CPU)
    assert grams.keys() == {GRADIENT, ADAMW}  # Muon has no matrix
    return grams[GRADIENT]


def estimated(gradients: list[list[Tensor]]) -> tuple[dict[str, float], dict[str, float]]:
    """The values and errors of the first configuration, and of the cosine; an iteration has 2
    PFLOPs in 4 seconds."""
    number = len(gradients)
    gram = gram_of(gradients)
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


# -- what optimizers make of a gradient ------------------------------------------------------------


def ratio_of(rows: Tensor) -> tuple[float, float]:
    """Signal / noise of K vectors, `[K, n]`, and their noise: the U-statistic by its definition."""
    count = len(rows)
    pairs = [(k, other) for k in range(count) for other in range(count) if k != other]
    signal = sum(float((rows[k] * rows[other]).sum()) for k, other in pairs) / len(pairs)
    noise = sum(float(row.square().sum()) for row in rows) / count - signal
    return signal / noise, noise


def muon_update(trainer: Any, gradient: Tensor) -> dict[str, Tensor]:
    """Weight -> the first update that `train.optimizer: muon` makes of a gradient of all weights,
    at a learning rate of 1."""
    weights = {name: torch.zeros_like(p) for name, p in trainer.policy.parameters().items()}
    train = dataclasses.replace(
        trainer.config.train, optimizer="muon", learning_rate=1.0, weight_decay=0.0
    )
    matrices = {name for name, p in weights.items() if trainer.policy.is_muon(name, p)}
    optimizers = make_optimizers(weights, train, matrices, {}, trainer.policy.trains_adapter)
    sizes = [p.numel() for p in weights.values()]
    first = (1 - MOMENTUM) * (1 + MOMENTUM)  # of a gradient in Nesterov's direction
    for p, part in zip(weights.values(), gradient.split(sizes)):
        p.grad = part.view_as(p) / first
    for optimizer in optimizers:
        optimizer.step()
    return {name: -weights[name].flatten().double() for name in matrices}


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_ratios_of_optimizers_agree_with_float64_sums(
    tuning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices move as the optimizer moves them; the rest as AdamW's formula says."""
    monkeypatch.setattr("sage_fast.tools.signal_meter.CHUNK", 999)
    monkeypatch.setattr("sage_fast.tools.signal_meter.BATCH_ELEMENTS", 2**14)
    count, eps = 5, 1e-6
    trainer = tiny_trainer(settings(model__tuning=tuning, train__eps=eps))
    for name, p in trainer.policy.parameters().items():
        if ".lora_B." in name:  # of zeros, from which the gradients of A would be 0
            torch.nn.init.normal_(p, std=0.02)
    gradients, costs = collect(trainer, count, warmup=0)
    weights = trained_weights(trainer.policy)
    names = [weight.name for weight in weights]
    grams = gram_matrices([gradients], weights, [eps], CPU)

    rows = torch.stack(gradients).double()
    adamw = rows / (rows.square().sum(0).div(count).sqrt() + eps)
    updates = [muon_update(trainer, gradient) for gradient in gradients]
    # what momentum leaves of noise: the squares of (1 - beta) beta^t add up to this
    left = sum(((1 - BETAS[0]) * BETAS[0] ** age) ** 2 for age in range(1000)) ** 0.5
    muon = left * adamw
    sizes = [weight.shape.numel() for weight in weights]
    for row, update in zip(muon, updates):
        for name, part in zip(names, row.split(sizes)):
            if name in update:
                part.copy_(update[name])
    assert updates[0]
    assert (len(updates[0]) == len(names)) == (tuning == "lora")

    # Muon's matrices are in bfloat16
    for kind, directions, tolerance in (
        (GRADIENT, rows, 1e-9),
        (ADAMW, adamw, 1e-9),
        (MUON, muon, 0.02),
    ):
        expected, noise = ratio_of(directions)
        signal, found_noise, found, *_ = estimate(grams[kind], costs[:, None])[0].tolist()
        assert found_noise == pytest.approx(noise, rel=tolerance), kind
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), kind
        assert signal == pytest.approx(expected * noise, rel=tolerance, abs=tolerance * noise), kind
    assert len({round(ratio_of(each)[0], 6) for each in (rows, adamw, muon)}) == 3


def test_directions_of_two_configurations_are_their_own() -> None:
    """Each has its own second moment and eps."""
    torch.manual_seed(3)
    vector = TrainedWeight(name="w", shape=torch.Size([40]), by_muon=False)
    a, b = list(torch.randn(4, 40)), list(1e-3 * torch.randn(4, 40))
    both = gram_matrices([a, b], [vector], [1e-8, 1e-3], CPU)
    for number, (of, eps) in enumerate(((a, 1e-8), (b, 1e-3))):
        alone = gram_matrices([of], [vector], [eps], CPU)
        for kind, gram in alone.items():
            torch.testing.assert_close(both[kind][number, :, number], gram[0, :, 0])


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

SIGNAL = ["--signal", "3", "--warmup", "0"]


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
    assert result["gram"].keys() == {GRADIENT, ADAMW, MUON}
    assert result["weights"] is None
    gram = torch.tensor(result["gram"][GRADIENT]).double()
    assert gram.shape == (2, 3, 2, 3)
    torch.testing.assert_close(gram, gram.permute(2, 3, 0, 1), rtol=1e-12, atol=0)
    torch.testing.assert_close(gram[0, :, 1], gram[0, :, 0], rtol=1e-12, atol=0)
    assert (gram[0, :, 0].diagonal() > 0).all()
    ours, copy = result["signal"].values()
    signal = ours["squared signal"]["value"]
    assert signal == pytest.approx((gram[0, :, 0].sum() - gram[0, :, 0].trace()) / 6)
    assert {*ours} == {*ROWS, "signal / noise by Muon", "signal / noise by AdamW"}
    for row in ours:
        assert "second" in row or copy[row] == pytest.approx(ours[row])
    for kind in (MUON, ADAMW):
        of_kind = torch.tensor(result["gram"][kind]).double()[0, :, 0]
        between = (of_kind.sum() - of_kind.trace()) / 6
        ratio = between / (of_kind.trace() / 3 - between)
        assert ours[f"signal / noise by {kind}"]["value"] == pytest.approx(float(ratio))
    assert result["cosine"]["value"] == (pytest.approx(1) if signal > 0 else None)
    printed = format_signal(result)
    assert str(PAPER) in printed
    assert "cosine of the two gradients" in printed
    assert "signal / noise by Muon" in printed
    assert "at the weights a run begins with" in printed
    assert ("undefined" in printed) == (
        None in [x for row in (*ours.values(), result["cosine"]) for x in row.values()]
    )


def test_a_signal_is_not_overwritten(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (measured / "signal.json").read_bytes()
    assert main(["profile", str(PAPER), "--folder", str(measured), "--signal", "3", *SMALL]) == 2
    assert "already holds a signal; choose another folder with --folder" in capsys.readouterr().err
    assert (measured / "signal.json").read_bytes() == before


def gram_at(source: Path, folder: Path, *words: str) -> Tensor:
    """Measure a source; return the products of its gradients, with those of OTHER if there is
    one."""
    assert main(["profile", str(source), "--folder", str(folder), *SIGNAL, *words]) == 0
    result = json.loads((folder / "signal.json").read_text())
    return torch.tensor(result["gram"][GRADIENT]).double()


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_run_is_measured_at_its_checkpoint(tuning: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model.tuning", tuning, "--train.checkpoint_interval", "1", "--eval.interval", "0"]
    assert main(["train", str(PAPER), "--output", str(run), "--quiet", *SMALL, *words]) == 0
    settings_file = run / "config.yaml"
    earlier = run / "checkpoints" / "iteration-000001"

    base = gram_at(settings_file, tmp_path / "base")
    newest = gram_at(run, tmp_path / "newest", "--against", str(settings_file))
    by_setting = gram_at(
        settings_file, tmp_path / "setting", "--model.weights", str(run / "weights")
    )
    at_checkpoint = gram_at(earlier, tmp_path / "earlier")
    at_earlier_weights = gram_at(settings_file, tmp_path / "at", "--model.weights", str(earlier))

    torch.testing.assert_close(newest[0, :, 0], by_setting[0, :, 0], rtol=1e-12, atol=0)
    torch.testing.assert_close(newest[1, :, 1], by_setting[0, :, 0], rtol=1e-12, atol=0)
    torch.testing.assert_close(at_checkpoint, at_earlier_weights, rtol=1e-12, atol=0)
    found = [base[0, :, 0], newest[0, :, 0], at_checkpoint[0, :, 0]]
    assert len({float(gram.trace()) for gram in found}) == 3
    printed = format_signal(json.loads((tmp_path / "newest" / "signal.json").read_text()))
    assert f"3 iterations without an update, at {run / 'weights'}" in printed


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


def test_configurations_that_train_other_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Equally many of the same shapes, or from other weights."""
    monkeypatch.setattr("sage_fast.tools.signal_meter.load_trainer", None)  # nothing is loaded
    model = {"a": "lora_targets: .*to_q", "b": "lora_targets: .*to_k", "c": f"weights: {tmp_path}"}
    for name, setting in model.items():
        text = f"base: {PAPER}\nmodel: {{tuning: lora, {setting}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)

    def refusal(first: str, second: str) -> str:
        words = [str(tmp_path / first), "--signal", "3", "--against", str(tmp_path / second)]
        assert main(["profile", *words, "--folder", str(tmp_path / "none"), *SMALL]) == 2
        return " ".join(capsys.readouterr().err.split())

    by_layout = refusal("a.yaml", "b.yaml")
    assert "these differ: " in by_layout
    assert "to_q.lora_A" in by_layout
    assert "to_k.lora_A" in by_layout
    assert "model.tuning and model.lora_targets have to agree" in by_layout
    by_weights = refusal("a.yaml", "c.yaml")
    assert "compared at the same weights" in by_weights
    assert "a YAML file without model.weights is measured at those of CONFIG" in by_weights


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
    assert " of gradients on the host, and " in said
    assert "for what Muon makes of a matrix" in said


@pytest.mark.soak
def test_two_ranks_find_what_one_finds(measured: Path, tmp_path: Path) -> None:
    words = ["profile", str(PAPER), "--folder", "two", "--signal", "3", "--warmup", "0", *SMALL]
    assert command_on_ranks(words, tmp_path).count("squared signal") == 1
    two, one = (
        json.loads((folder / "signal.json").read_text()) for folder in (tmp_path / "two", measured)
    )
    gram, expected = (
        torch.tensor(result["gram"][GRADIENT]).double()[0, :, 0] for result in (two, one)
    )
    torch.testing.assert_close(
        gram, expected, rtol=1e-3, atol=1e-3 * float(expected.diagonal().mean())
    )
    for row in ("PFLOPs of an iteration", "squared signal"):
        assert next(iter(two["signal"].values()))[row]["value"] == pytest.approx(
            next(iter(one["signal"].values()))[row]["value"], rel=0.05
        )
