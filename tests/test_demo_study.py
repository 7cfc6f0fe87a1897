"""The study of the demo: what it runs, and its verdicts."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from sage_fast.data.prompts import read_prompts
from studies.demo import findings, runs
from studies.demo.runs import NFT, SAGE, make, seeds, settings_of
from studies.runs import TrainedRun, shipped
from studies.testbed.look import rewards_of_correct_clips
from tests.test_race import made

pytestmark = pytest.mark.soak

CAPTIONS = [
    "a small red ball moves left slowly",
    "a small yellow ball moves down quickly",
    "a big yellow ball moves left slowly",
    "a small blue ball moves up slowly",
    "a big blue ball moves right slowly",
    "a big green ball moves left quickly",
]
"""Every word is in one of them."""
PARTS = ("vq", "mq", "ta", *findings.SCORES.values(), "judge/naturalness")


def run_of(score: float, seed: int, lost: str | None = None) -> TrainedRun:
    """A run of the demo from 1 to `score`; a part that is `lost` falls as much as the others
    rise."""
    plain = made(score, seed, noise=0.01)
    evaluations = []
    for evaluation in plain.evaluations:
        column = evaluation["parts"]["vq"]
        fallen = [2 / 3 - value for value in column]
        parts = {name: fallen if name == lost else column for name in PARTS}
        evaluations.append({**evaluation, "prompts": CAPTIONS, "parts": parts})
    return dataclasses.replace(plain, evaluations=evaluations)


def found_of(sage: float, nft: float, lost: str | None = None) -> dict[str, list[TrainedRun]]:
    return {
        SAGE: [run_of(sage, seed, lost) for seed in range(4)],
        NFT: [dataclasses.replace(run_of(nft, seed + 4), seed=seed) for seed in range(4)],
    }


def test_the_runs_are_the_shipped_configurations_on_seeds_that_chose_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def train(study: str, settings: dict[str, Any], folder: Path, **_: object) -> list[TrainedRun]:
        asked.update(settings)
        return [run_of(1.5, config.seed) for config in settings.values()]

    monkeypatch.setattr(runs, "train_runs", train)
    made_runs = make(tmp_path, quick=False, workers=1)
    assert {name: [run.seed for run in group] for name, group in made_runs.items()} == {
        SAGE: seeds(quick=False),
        NFT: seeds(quick=False),
    }
    assert len(seeds(quick=False)) == 10
    assert not {0, 1} & {*seeds(quick=False)}
    for name, config in asked.items():
        plain = shipped(name.rpartition("-seed")[0])
        assert (config.train, config.objective, config.kl) == (
            plain.train,
            plain.objective,
            plain.kl,
        )
        heldout = {prompt.text for prompt in read_prompts(config.data.eval_prompts or "")}
        assert config.eval.num_prompts == len(heldout)
        assert not heldout & {prompt.text for prompt in read_prompts(config.data.prompts)}


@pytest.mark.parametrize(
    ("score", "lost", "verdict"),
    [(1.9, None, "held"), (1.9, "judge/speed", "not held"), (1.0, None, "not decidable")],
)
def test_every_word_has_to_gain(score: float, lost: str | None, verdict: str) -> None:
    found = found_of(score, 1.5, lost)
    words, _ = (claim.find(None) for claim in findings.claims(found, (2.9, 2.75)))
    assert words.verdict == verdict
    assert [row[0] for row in words.table[1:]] == [*findings.PARTS]
    assert float(words.table[1][3]) == pytest.approx(
        statistics.fmean(run.mean() for run in found[SAGE]), abs=1e-3
    )
    assert "2.90 as drawn, and of 2.75 through the autoencoder" in words.text


@pytest.mark.parametrize(
    ("score", "verdict"), [(1.9, "held"), (1.5, "not decidable"), (1.1, "not held")]
)
def test_the_challenger_is_met_on_the_same_seeds(score: float, verdict: str) -> None:
    found = found_of(score, 1.5)
    _, challenger = (claim.find(None) for claim in findings.claims(found, (2.9, 2.75)))
    assert challenger.verdict == verdict
    assert [row[1] for row in challenger.table[1:]] == ["SAGE-GRPO", "DiffusionNFT"]


def test_a_correct_clip_scores_less_through_the_autoencoder() -> None:
    drawn, decoded = rewards_of_correct_clips(shipped(SAGE), "testbed")
    assert 2.6 < decoded < drawn < 3


def test_quick_runs_are_short() -> None:
    assert settings_of(f"{SAGE}-seed10", quick=True).train.iterations == 2
