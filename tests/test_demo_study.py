"""The study of the demo: what it runs, and its verdicts."""

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from sage_fast.data.prompts import read_prompts
from studies.demo import early, early_findings, findings, runs
from studies.demo.runs import NFT, SAGE, make, seeds, settings_of
from studies.differences import Difference
from studies.runs import TrainedRun, shipped
from studies.testbed.look import rewards_of_correct_clips
from tests.test_race import made
from tests.tiny import settings, tiny_trainer

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


def early_run(gains: dict[int, float], seed: int) -> TrainedRun:
    """A run with this gain in the composite after each of these iterations, on three prompts."""
    noise = 0.01 * math.sin(seed)
    evaluations = []
    for iteration, gain in {0: 0.0, **gains}.items():
        third = (1 + gain + noise * (iteration > 0)) / 3
        parts = {part: [third] * 3 for part in early_findings.PARTS} | {"rank": [0.5] * 3}
        evaluations.append({"iteration": iteration, "prompts": list("abc"), "parts": parts})
    return TrainedRun(seed=seed, evaluations=evaluations, rows=[], environment={})


def found_on_the_way(**gains: dict[int, dict[int, float]]) -> early.Runs:
    """Arm -> length -> three runs; `gains` is arm -> length -> iteration -> gain."""
    return {
        arm.replace("_", "-"): {
            length: [early_run(course, seed) for seed in range(3)]
            for length, course in of_arm.items()
        }
        for arm, of_arm in gains.items()
    }


def interval(low: float, high: float) -> Difference:
    return Difference(value=(low + high) / 2, low=low, high=high, p=0.5, corrected=0.5)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (((0.01, 0.1), (0.01, 0.1), (-0.1, 0.1)), "held"),
        (((0.01, 0.1), (-0.01, 0.1), (0.1, 0.2)), "not decidable"),
        (((0.01, 0.1), (0.01, 0.1), (-0.2, -0.1)), "not held"),
        (((-0.2, -0.1), (0.01, 0.1), (0.1, 0.2)), "not held"),
    ],
)
def test_the_hand_over_is_decided_at_three_looks(
    after: tuple[tuple[float, float], ...], verdict: str
) -> None:
    by_look = {look: interval(*ends) for look, ends in zip(early.looks(), after, strict=True)}
    assert early_findings.hand_over_verdict(by_look) == verdict


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [((-0.02, 0.1), "held"), ((-0.04, 0.1), "not decidable"), ((-0.1, -0.04), "not held")],
)
def test_no_lower_is_decided_by_the_margin(ends: tuple[float, float], verdict: str) -> None:
    assert early.margin() == 0.03
    assert early_findings.no_lower(interval(*ends)) == verdict


def test_the_mean_gain_on_the_way_by_hand() -> None:
    """0.1, 0.2 and 0.4 after 10, 20 and 40 iterations: trapezoids of 0.5, 1.5 and 6 over 40."""
    found = found_on_the_way(demo={10: {10: 0.1}, 20: {20: 0.2}, 40: {40: 0.4}})
    budget = early.flops_of(early.DEMO, 40)
    [first, *_] = early_findings.gains_on_the_way(found, early.DEMO, budget)
    assert first["a"] == pytest.approx((0.5 + 1.5 + 6) / 40)
    # half of the budget: it ends at the second of them
    [first, *_] = early_findings.gains_on_the_way(found, early.DEMO, budget / 2)
    assert first["a"] == pytest.approx((0.5 + 1.5) / 20)


def test_a_course_that_ends_before_the_budget_stays_where_it_is() -> None:
    lengths = early.lengths(early.GROWING)
    found = found_on_the_way(growing={length: {length: 0.2} for length in lengths})
    flops = [early.flops_of(early.GROWING, length) for length in lengths]
    budget = 2 * flops[-1]
    [first, *_] = early_findings.gains_on_the_way(found, early.GROWING, budget)
    assert first["a"] == pytest.approx(0.2 * (budget - flops[0] / 2) / budget)


def test_the_growing_batch_costs_about_as_much_as_the_demo() -> None:
    for length, plain in zip(early.lengths(early.GROWING), early.looks(), strict=True):
        ratio = early.flops_of(early.GROWING, length) / early.flops_of(early.DEMO, plain)
        assert ratio == pytest.approx(1, abs=0.03)


def test_the_growing_batch_goes_on_behind_the_last_prompt() -> None:
    trainer = tiny_trainer(settings(train__prompts_per_iteration=2))
    run = str(early.Name(early.GROWING, 44, 20))
    taken = []
    for index, prompts in enumerate([2] * 5 + [4] * 10 + [8] * 3):
        early.before_iteration(run, trainer, index)
        plan = trainer.plan(index)
        assert len(plan.samples) == prompts * trainer.config.train.group_size
        rate = shipped(SAGE).train.learning_rate * math.sqrt(prompts / 8)
        assert trainer.config.train.learning_rate == pytest.approx(rate)
        taken += [sample.prompt for sample in plan.samples if sample.index == 0]
    # every prompt once in each epoch
    epoch = len(trainer.prompts)
    for first in range(0, len(taken) - epoch, epoch):
        assert len({*taken[first : first + epoch]}) == epoch


def test_other_arms_keep_their_batch() -> None:
    trainer = tiny_trainer(settings(train__prompts_per_iteration=2))
    config = trainer.config
    early.before_iteration("demo-it40-seed20", trainer, 7)
    assert trainer.config is config


def test_early_runs_differ_from_the_demo_in_what_the_protocol_says() -> None:
    plain = early.settings_of("demo-it40-seed20", quick=False)
    shipped_demo = shipped(SAGE)
    assert plain.objective == shipped_demo.objective
    assert plain.kl == shipped_demo.kl
    quarter = early.settings_of("anchor-quarter-it40-seed20", quick=False)
    assert quarter == plain.replace({"kl.anchor_fraction": 0.25})
    # what their runs had has left: these are read, and never made
    assert early.settings_of("hand-over-it40-seed20", quick=False) == plain
    chosen = {*seeds(quick=False), 0, 1}
    assert not chosen & {*early.seeds(quick=False)}


def test_the_page_of_the_first_forty_iterations() -> None:
    courses = {10: {10: 0.1}, 20: {20: 0.2}, 40: {10: 0.1, 20: 0.2, 40: 0.4}}
    higher = {10: 0.2, 20: 0.3, 40: 0.4}
    found = found_on_the_way(
        demo=courses,
        demo_nft=courses,
        endpoint={40: higher},
        hand_over={40: higher},
        growing={length: {length: 0.3} for length in early.lengths(early.GROWING)},
        anchor_quarter={40: {10: 0.1, 20: 0.2, 40: 0.39}},
        ranks={40: {10: 0.1, 20: 0.2, 40: 0.2}},
    )
    claims = early_findings.claims(found, [("at", "ratio"), ("the base model", "1")])
    verdicts = {claim.name: claim.find(None).verdict for claim in claims}
    assert verdicts == {
        "demo-course": "held",  # the same gains for fewer FLOPs
        "demo-hand-over": "held",
        "demo-growing": "held",
        "demo-anchor": "held",
        "demo-ranks": "not held",
    }
    # short runs have no arm whose setting has left
    short = {arm: runs for arm, runs in found.items() if arm != early.HAND_OVER}
    names = [claim.name for claim in early_findings.claims(short, [])]
    assert "demo-hand-over" not in names
