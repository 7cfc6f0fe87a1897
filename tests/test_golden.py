"""Metrics of three tiny iterations, kept in a file: a refactor reproduces them, a change of numerics has to own up.

`python -m tests.test_golden` writes the file again.
"""

import json
from pathlib import Path

import pytest

from tests.tiny import settings, tiny_trainer

FILE = Path(__file__).parent / "golden" / "tiny_metrics.json"
KEYS = (
    "reward/mean", "reward/std", "advantage/abs_mean", "grad_norm", "kl/anchor", "kl/velocity", "kl/lambda",
    "ratio/max", "ratio/min", "update/relative",
)  # fmt: skip


def rows() -> list[dict[str, float]]:
    trainer = tiny_trainer(settings(train__optimizer_steps=2))
    return [{key: row[key] for key in KEYS} for row in map(trainer.iteration, range(3))]  # type: ignore[misc]


def test_golden_metrics() -> None:
    """To 1 %: the rewards of a random model differ in their last digits alone, which is what advantages are made of."""
    for actual, expected in zip(rows(), json.loads(FILE.read_text()), strict=True):
        assert actual["reward/mean"] == pytest.approx(expected["reward/mean"], rel=1e-5)
        for key in KEYS:
            assert actual[key] == pytest.approx(expected[key], rel=1e-2, abs=2e-7), key


if __name__ == "__main__":
    FILE.write_text(json.dumps(rows(), indent=1) + "\n")
