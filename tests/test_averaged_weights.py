"""Rollouts of averaged weights: which weights roll out, score and anchor, and what is left
afterwards."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.config.schema import TrainConfig
from sage_fast.parallel.ema import ema_decay
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.trainer import Trainer, TrainerHooks
from sage_fast.util.errors import UserError
from tests.tiny import perturb, settings, tiny_trainer

AVERAGED = {
    "sampling__averaged_weights": True,
    "train__ema_decay": 0.9,
    "kl__velocity_term": "closed_form",
}
NFT = {"objective__surrogate": "nft", "sampling__sampler": "ode"}


def moved(**overrides: Any) -> Trainer:
    """A trainer whose present weights have left their average, with the anchor at the present
    ones."""
    trainer = tiny_trainer(settings(**AVERAGED, **overrides))
    perturb(trainer)
    trainer.anchor = trainer.policy.snapshot()
    return trainer


@pytest.mark.parametrize(
    "overrides", [{}, NFT, {"model__tuning": "full"}], ids=["steps", "noised", "full"]
)
def test_the_average_rolls_out_and_is_the_old_policy(overrides: dict[str, Any]) -> None:
    """The rewards are those of the average, and the first update is away from it; the anchor is not
    the average."""
    trainer = moved(**overrides, train__learning_rate=1e-12)
    row = trainer.iteration(0)
    assert row["reward/mean"] == tiny_trainer(settings(**overrides)).iteration(0)["reward/mean"]
    assert row["kl/velocity"] > 1e-6
    assert row["log_prob/max_delta"] > 1e-4
    assert row["kl/anchor"] < 1e-9
    # the gate replays with the weights of the rollout
    assert row.get("log_prob/parity", 0.0) < 1e-5


def test_the_present_weights_are_what_is_trained() -> None:
    """A rollout leaves them as they were, to the bit; the average then follows by its decay."""
    trainer = moved(kl__anchor_interval=100)
    present, was = trainer.policy.snapshot(), dict(trainer.engine.ema or {})
    seen = []

    class Hooks(TrainerHooks):
        def before_update(self, number: int) -> None:
            seen.append(trainer.policy.snapshot())

    trainer.hooks = Hooks()
    was = {name: tensor.clone() for name, tensor in was.items()}
    trainer.iteration(0)
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in present.items())
    assert trainer.engine.ema is not None
    for name, tensor in trainer.policy.snapshot().items():
        torch.testing.assert_close(
            trainer.engine.ema[name], was[name].lerp(tensor, 0.1), rtol=1e-5, atol=1e-8
        )


def test_an_average_for_export_alone_warms_up(tmp_path: Path) -> None:
    """The decay is (1 + t) / (10 + t) at first, as in the code of DiffusionNFT; a resume continues
    it."""
    config = settings(train__ema_decay=0.2)
    trainer = tiny_trainer(config)
    expected = trainer.policy.snapshot()
    for index, decay in enumerate((2 / 11, 0.2, 0.2)):
        trainer.iteration(index)
        expected = {
            name: part.lerp(expected[name], decay)
            for name, part in trainer.policy.snapshot().items()
        }
        assert trainer.engine.ema is not None
        for name, average in trainer.engine.ema.items():
            torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-8)
        if index == 0:
            save_checkpoint(
                tmp_path, index + 1, trainer.engine, trainer.state_dict(), trainer.anchor
            )
            trainer = tiny_trainer(config)
            _, state, anchor = load_checkpoint(tmp_path, trainer.engine)  # type: ignore[misc]
            trainer.load_state_dict(state, anchor)


def test_an_average_for_export_does_not_keep_the_start() -> None:
    decays = [
        ema_decay(TrainConfig(ema_decay=0.99), step, warms_up=True) for step in range(1, 2001)
    ]
    assert math.prod(decays[:50]) < 1e-6  # without a warm-up 0.61
    assert decays == sorted(decays)
    assert decays[-1] == 0.99
    assert ema_decay(TrainConfig(ema_decay=0.99), 1, warms_up=False) == 0.99


def test_one_update_needs_the_velocities_of_the_rollout_too() -> None:
    config = settings(**AVERAGED, kl__strategy="stepwise")
    assert Objective(config).stores_velocities
    check_trainable(config)  # without the average this KL is always 0, and refused


def test_averaged_weights_need_an_average() -> None:
    with pytest.raises(
        UserError, match=r"averaged_weights = True.*train.ema_decay = 0; .*nearest choice is false"
    ):
        check_trainable(settings(sampling__averaged_weights=True))
