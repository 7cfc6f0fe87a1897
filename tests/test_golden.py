"""Metrics of three tiny iterations, kept in a file: a refactor reproduces them, a change of
numerics has to own up.

`python -m tests.test_golden` writes the file again. `python -m tests.golden_matrix` compares two
trees to the bit.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import golden_matrix
from tests.tiny import settings, tiny_trainer

SETTINGS = {
    "train__optimizer_steps": 2, "train__learning_rate": 2e-2, "kl__lambda_min": 1e-3,
    "kl__lambda_max": 0.1,
    "sampling__num_frames": 17,
}  # fmt: skip
"""Large updates and a KL that acts, so that every metric is far above rounding."""
FILE = Path(__file__).parent / "golden" / "tiny_metrics.json"
KEYS = (
    "reward/mean", "reward/std", "advantage/abs_mean", "grad_norm", "kl/anchor", "kl/velocity",
    "kl/lambda",
    "kl/gradient_share", "loss", "ratio/max", "ratio/min",
)  # fmt: skip


class FixedReward:
    """The same rewards whatever the videos: those of a random model differ in their last digits
    alone."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        return {
            part: torch.arange(len(prompts)).float() * weight % 7
            for part, weight in zip(("vq", "mq", "ta"), (2, 3, 5))
        }


def rows() -> list[dict[str, float]]:
    """Metrics by iteration; the ratios as their distance from 1, which is what moves."""
    trainer = tiny_trainer(settings(**SETTINGS), FixedReward())
    found = [{key: float(row[key]) for key in KEYS} for row in map(trainer.iteration, range(3))]  # type: ignore[arg-type]
    return [
        {key: value - 1 if "ratio/m" in key else value for key, value in row.items()}
        for row in found
    ]


def test_golden_metrics() -> None:
    """Numbers of threads and instruction sets differ by up to 3.2e-8, in the loss, of which the
    smallest is 6e-6."""
    for actual, expected in zip(rows(), json.loads(FILE.read_text()), strict=True):
        for key in KEYS:
            assert actual[key] == pytest.approx(expected[key], rel=1e-3, abs=5e-8), key


def test_the_matrix_sees_what_changes_and_nothing_else() -> None:
    """Stored rollouts in host memory are the same bits; another sampler is not."""
    plain, offloaded, other = (
        golden_matrix.tiny(golden_matrix.TINY[name]) for name in ("plain", "offload", "sampler-cps")
    )
    assert plain == offloaded
    assert not set(plain.split()) & set(other.split())


def test_a_reward_that_compares_trains_as_one_that_gives_the_same_scores() -> None:
    """To the bit, whichever way the scores came."""
    known = dict(golden_matrix.cases())
    assert known["levels"]() == known["compared"]()


def test_advantages_of_places_are_those_of_own_sums() -> None:
    """A group of three places, 0 to 2: (place - 1) / (sqrt(2 / 3) + eps), in float64."""

    class Places(golden_matrix.ComparedLevels):
        def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
            values = super().score(videos, prompts)["vq"]
            return {"vq": values, "place": values.argsort().argsort().double()}

    trainer = tiny_trainer(settings(reward__weights={"place": 1.0}), Places())
    batch, scores = trainer.rollout(trainer.plan(0))
    found, kept = trainer.advantages(batch, scores)
    expected = []
    for group in scores.parts["vq"].view(-1, 3).tolist():
        for value in group:
            place = sum(other < value for other in group)
            expected.append((place - 1) / (math.sqrt(2 / 3) + 1e-6))
    assert batch.numbers == sorted(batch.numbers)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert kept == [True for _ in expected]


if __name__ == "__main__":
    FILE.write_text(json.dumps(rows(), indent=1) + "\n")
