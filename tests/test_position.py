"""kl.position_fraction: the KL to the anchor on a random share of the trained steps, without bias."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.schedule import position_steps
from sage_fast.trainer import Trainer
from tests.tiny import perturb, settings, tiny_trainer

STEPS = (0, 1, 2, 3, 4)


def test_the_draw() -> None:
    """The draw is a pure function of seed and iteration, so a resume repeats it; every step is drawn equally often."""
    draws = [position_steps(0.4, STEPS, 0, iteration) for iteration in range(400)]
    assert all(len(set(draw)) == 2 and draw == sorted(draw) for draw in draws)
    assert draws == [position_steps(0.4, STEPS, 0, iteration) for iteration in range(400)]
    assert draws != [position_steps(0.4, STEPS, 1, i) for i in range(400)]
    for step in STEPS:
        assert sum(step in draw for draw in draws) == pytest.approx(160, abs=5 * (400 * 0.4 * 0.6) ** 0.5)
    assert position_steps(1.0, STEPS, 0, 3) == list(STEPS)
    assert len(position_steps(0.01, STEPS, 0, 3)) == 1


class Seen:
    """Record of an iteration whose policy has left its anchor: forwards, metrics, gradients, squared norms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drawn: Sequence[int] | None = None, **overrides: Any) -> None:
        trainer = tiny_trainer(settings(kl__lambda_min=1.0, kl__lambda_max=1.0, train__parity_gate=False, **overrides))
        perturb(trainer)
        trainer.anchor_is_current = False
        self.forwards, self.kl_square = 0, 0.0
        self.gradients: list[Tensor] = []
        velocity, loss, step = trainer.policy.velocity, trainer._loss, trainer.engine.step

        def counted(*arguments: Any) -> Tensor:
            self.forwards += 1
            return velocity(*arguments)

        def summed(*arguments: Any) -> Any:
            result = loss(*arguments)
            self.kl_square += float(result[2].square().sum())
            return result

        def noted() -> Any:
            self.gradients = [p.grad.clone() for p in trainer.engine.parameters if p.grad is not None]
            return step()

        with monkeypatch.context() as patch:
            patch.setattr(trainer.policy, "velocity", counted)
            patch.setattr(Trainer, "_loss", staticmethod(summed))
            patch.setattr(trainer.engine, "step", noted)
            if drawn is not None:
                patch.setattr("sage_fast.trainer.position_steps", lambda *_: list(drawn))
            self.row = trainer.iteration(0)


def test_the_mean_over_all_draws_is_that_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for the gradient, for the logged KL that steers lambda, and for the squared norm that `share` reads."""
    whole = Seen(monkeypatch, kl__strategy="fixed")
    draws = [Seen(monkeypatch, drawn, kl__strategy="fixed") for drawn in itertools.combinations(STEPS, 2)]
    assert whole.row["kl/anchor"] > 0
    kl = [seen.row["kl/anchor"] for seen in draws]
    assert sum(kl) / len(draws) == pytest.approx(whole.row["kl/anchor"], rel=1e-4)
    assert sum(seen.kl_square for seen in draws) / len(draws) == pytest.approx(whole.kl_square, rel=1e-4)
    assert len(set(kl)) == len(draws)  # single draws differ
    for i, gradient in enumerate(whole.gradients):
        mean = torch.stack([seen.gradients[i] for seen in draws]).mean(0)
        torch.testing.assert_close(mean, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-9)


def test_the_anchor_runs_for_the_drawn_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, some = Seen(monkeypatch), Seen(monkeypatch, kl__position_fraction=0.4)
    none = Seen(monkeypatch, kl__strategy="none")
    assert (whole.forwards - none.forwards, some.forwards - none.forwards) == (5, 2)  # one forward per step


@pytest.mark.parametrize("size", [1, 8])
def test_micro_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Steps with and without the term may share a forward or not."""
    seen = [Seen(monkeypatch, kl__position_fraction=0.6, train__batch_size=n) for n in (size, 64)]
    for name in ("kl/anchor", "grad_norm", "kl/gradient_share"):
        assert seen[0].row[name] == pytest.approx(seen[1].row[name], rel=1e-4), name
    # The loss is a mean of advantages x ratios that nearly cancel; only the ratios differ, by a few roundings.
    rounding = 4 * 2**-23 * seen[1].row["advantage/abs_mean"]
    assert seen[0].row["loss"] == pytest.approx(seen[1].row["loss"], rel=1e-4, abs=rounding)


def test_nothing_is_drawn_while_the_anchor_is_the_rollout_policy() -> None:
    """The anchor's velocities are then known at every step, and the KL uses all of them."""
    rows = [tiny_trainer(settings(kl__position_fraction=f, train__optimizer_steps=2)).iteration(0) for f in (0.2, 1.0)]
    assert rows[0]["kl/anchor"] == rows[1]["kl/anchor"]
    assert rows[0]["grad_norm"] == rows[1]["grad_norm"]
