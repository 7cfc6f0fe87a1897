"""How much of the clip range rounding takes up after an update: how it is measured, and what
follows."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.objective import Objective
from sage_fast.rollout.parity import (
    Moments,
    check_rounding,
    moments_after_an_update,
    moved,
    rounding_of,
)
from sage_fast.trainer import Trainer
from sage_fast.util.errors import ParityError
from tests.tiny import paper_trainer, settings, tiny_trainer


def test_rounding_is_told_from_the_response() -> None:
    """Twice the movement keeps the rounding and quadruples the KL of the response; noise is split
    like the bias."""
    floor, true = torch.tensor([3e-6, 0.0, 3e-6, 0.0]), torch.tensor([1e-6, 2e-6, 0.0, 0.0])
    near, far = (
        torch.stack([floor + scale * true, 4 * (floor + scale * true)], dim=1) for scale in (1, 4)
    )
    bias, noise = rounding_of(near, far)
    assert bias.tolist() == pytest.approx(floor.tolist(), rel=1e-5, abs=1e-12)
    assert noise.tolist() == pytest.approx((4 * floor).sqrt().tolist(), rel=1e-5, abs=1e-7)


def moments(bias: float, noise: float) -> tuple[Tensor, Tensor]:
    """Moments of three steps without response: the second has this rounding, the first a tenth, the
    third none."""
    at = torch.tensor(
        [[0.1 * bias, 0.01 * noise**2], [bias, noise**2], [0.0, 0.0]], dtype=torch.float64
    )
    return at, at


@pytest.mark.parametrize(
    ("ratio", "share"), [("plain", 0.25), ("centred", 0.05), ("normalised", 0.1)]
)
def test_what_counts_is_the_rounding_of_the_ratio_that_is_clipped(
    ratio: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = settings(objective__ratio=ratio, objective__clip_range=1e-4, train__optimizer_steps=2)
    value = check_rounding(
        *moments(2e-5, 5e-6), torch.tensor([0.5, 2.0, 0.0]), Objective(config), 1e-5
    )
    assert value == pytest.approx(share * 1e-4)
    shown = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(shown) == 1  # in one line if it is fine; the log file has the rest
    if ratio != "plain":
        assert shown == [
            f"rounding moves the ratio by {100 * share:.1g} % of the clip range (fine)"
        ]
    line = " ".join(caplog.messages[-1].split())
    assert (
        f"{value:.1e} in the log-ratio that is clipped, at step 1 (bias -2.0e-05, noise 5.0e-06)"
        in line
    )
    advice = (
        "more than a tenth: the limit acts on rounding, not on the policy. Use "
        "train.optimizer_steps = 1, objective"
    )
    assert (advice in line) == (ratio == "plain")


def test_more_than_a_third_stops() -> None:
    objective = Objective(settings(objective__clip_range=1e-4, train__optimizer_steps=2))
    ones = torch.ones(3)
    with pytest.raises(
        ParityError,
        match=r"4.0e-01 of objective.clip_range \(1e-04\), more than a third: .*centred",
    ):
        check_rounding(*moments(3.5e-5, 5e-6), ones, objective, 1e-5)
    with pytest.raises(
        ParityError, match=r"Use train.optimizer_steps = 1, a wider objective.clip_range"
    ):
        # centring would remove little of it
        check_rounding(*moments(5e-6, 3.5e-5), ones, objective, 1e-5)
    with pytest.raises(ParityError, match="nan"):
        check_rounding(*moments(float("nan"), 5e-6), ones, objective, 1e-5)


def test_what_counts_for_a_mask_by_the_kl_is_the_kl_of_rounding() -> None:
    """Its noise does no harm: the KL, which rounding raises, decides what is masked."""
    given = {
        "objective__surrogate": "kl_mask",
        "objective__kl_limit": 1e-4,
        "train__optimizer_steps": 2,
    }
    objective, ones = Objective(settings(**given)), torch.ones(3)
    assert check_rounding(*moments(2e-5, 1.0), ones, objective, 1e-5) == pytest.approx(2e-5)
    with pytest.raises(
        ParityError, match=r"4.0e-01 of objective.kl_limit .* a wider objective.kl_limit"
    ):
        check_rounding(*moments(4e-5, 0.0), ones, objective, 1e-5)
    assert 0 <= first_row(tiny_trainer(settings(**given)))["log_prob/rounding"] < 1e-5
    with pytest.raises(ParityError, match="in the KL that masks"):
        tiny_trainer(settings(**given | {"objective__kl_limit": 1e-20})).iteration(0)


def test_movement_of_one_update() -> None:
    state = {"a": torch.zeros(50, 3), "b": torch.ones(40)}
    near, far = moved(state, 1e-3, seed=1), moved(state, 2e-3, seed=1)
    for name, tensor in state.items():
        torch.testing.assert_close(
            (near[name] - tensor).abs(), torch.full_like(tensor, 1e-3), rtol=1e-4, atol=0
        )
        torch.testing.assert_close(
            far[name] - tensor, 2 * (near[name] - tensor), rtol=1e-3, atol=1e-9
        )
    assert abs(float(near["a"].mean())) < 5e-4
    assert not torch.equal(near["a"], moved(state, 1e-3, seed=2)["a"])


def first_row(trainer: Trainer) -> dict[str, Any]:
    before = trainer.policy.snapshot()
    seen: list[bool] = []
    original = trainer.update

    def update(*args: Any) -> None:
        seen.append(
            all(
                torch.equal(tensor, before[name])
                for name, tensor in trainer.policy.snapshot().items()
            )
        )
        original(*args)

    trainer.update = update  # type: ignore[method-assign]
    row = trainer.iteration(0)
    assert seen[0], "the weights were not put back"
    return row


def test_a_kl_that_acts_is_told_from_rounding() -> None:
    """It is measured whether or not a limit sees an update; without a KL and a limit there is
    nothing to measure."""
    row = first_row(tiny_trainer(settings(kl__strategy="fixed")))
    assert 0 < row["kl/rounding"] < 1e-10
    assert "log_prob/rounding" not in row
    row = tiny_trainer(settings(kl__strategy="none")).iteration(0)
    assert "kl/rounding" not in row


def test_one_update_an_iteration_needs_no_measurement() -> None:
    assert "log_prob/rounding" not in tiny_trainer(settings()).iteration(0)
    assert "log_prob/rounding" not in tiny_trainer(
        settings(train__optimizer_steps=2, objective__surrogate="log_prob")
    ).iteration(0)
    assert (
        0 <= first_row(tiny_trainer(settings(train__optimizer_steps=2)))["log_prob/rounding"] < 1e-5
    )


def test_the_gate_keeps_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would hold the activations of every micro-batch that the gate looks at, all at
    once."""
    seen: list[Moments] = []

    def noted(*arguments: Any, **keywords: Any) -> Moments:
        seen.append(moments_after_an_update(*arguments, **keywords))
        return seen[-1]

    monkeypatch.setattr("sage_fast.rollout.parity.moments_after_an_update", noted)
    tiny_trainer(settings(train__optimizer_steps=2)).iteration(0)
    assert not any(moment.requires_grad for moment in (*seen[0].log_ratio, *seen[0].kl))


@pytest.mark.parametrize("ratio", ["plain", "centred", "normalised"])
def test_float32_is_far_below_every_limit(ratio: str, tmp_path: Path) -> None:
    """The settings are those of `recipes/paper.yaml`, with a tenth of its clip range."""
    row = first_row(
        paper_trainer(
            tmp_path,
            objective__ratio=ratio,
            objective__clip_range=1e-4,
            train__prompts_per_iteration=2,
        )
    )
    assert row["log_prob/rounding"] < 1e-6


def test_bfloat16_takes_up_the_clip_range(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rounding clips 14 to 20 % of the transitions of a second update here, so the run warns or
    ends."""
    trainer = paper_trainer(
        tmp_path, model__dtype="bfloat16", objective__clip_range=1e-4, train__learning_rate=1e-5,
        train__prompts_per_iteration=2,
    )  # fmt: skip
    caplog.set_level(logging.INFO)
    try:
        row = trainer.iteration(0)
    except ParityError as error:
        said, value = str(error), 1.0
    else:
        said, value = " ".join(" ".join(caplog.messages).split()), row["log_prob/rounding"]
    assert value > 1e-5
    assert "the limit acts on rounding, not on the policy. Use train.optimizer_steps = 1" in said
