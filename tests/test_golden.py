"""Metrics of three tiny iterations, kept in a file: a refactor reproduces them, a change of
numerics has to own up.

`python -m tests.test_golden` writes the file again. `python -m tests.golden_matrix` compares two
trees to the bit.
"""

import json
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


if __name__ == "__main__":
    FILE.write_text(json.dumps(rows(), indent=1) + "\n")
