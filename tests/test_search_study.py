"""The study of the demo's settings: what it runs, which cell it chooses, and its verdict."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from sage_fast.config.loader import build, leaves
from sage_fast.data.prompts import read_prompts
from studies.runs import TrainedRun, shipped
from studies.search import findings, runs
from studies.search.runs import NFT, SAGE, Made, cells, make, settings_of, variants
from studies.shapes.world import WORLD_SETTINGS, heldout_prompts, train_prompts
from tests.test_race import made

pytestmark = pytest.mark.soak


def test_the_confirmation_trains_and_scores_on_prompts_that_chose_nothing() -> None:
    for name in (SAGE, NFT, *variants(SAGE)):
        config = settings_of(f"{name}-seed10", quick=False)
        trained, scored = (
            {prompt.text for prompt in read_prompts(source)}
            for source in (config.data.prompts, config.data.eval_prompts or "")
        )
        assert (len(trained), len(scored)) == (24, config.eval.num_prompts) == (24, 48)
        assert trained | scored == set(train_prompts())
        assert not (trained | scored) & set(heldout_prompts())
        assert config.seed not in (
            *runs._protocol()["search"]["seeds"],
            runs._protocol()["second"]["seed"],
        )


def test_every_cell_of_the_search_loads_and_differs_from_the_others() -> None:
    names = [*cells(), *variants(SAGE), *variants(NFT)]
    configs = [settings_of(f"{name}-seed0", quick=False) for name in names]
    assert len({str(config) for config in configs}) == len(configs)


def test_the_demo_is_the_cell_that_was_chosen() -> None:
    """Apart from its length, what it writes and how often it evaluates."""
    # by `build`, so that a relative path is the same file in both
    chosen, demo = (
        build(leaves(dataclasses.asdict(config)))
        for config in (
            settings_of(f"{runs._protocol()['chosen']}-seed0", quick=False),
            shipped(SAGE, WORLD_SETTINGS),
        )
    )
    train = dataclasses.replace(
        demo.train,
        iterations=chosen.train.iterations,
        checkpoint_interval=chosen.train.checkpoint_interval,
    )
    assert dataclasses.replace(
        demo, output=chosen.output, train=train, eval=chosen.eval
    ) == dataclasses.replace(chosen, tracking=demo.tracking)


def test_the_best_cells_are_run_on_every_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    names = [*cells(), *variants(SAGE), *variants(NFT)]
    level = {cell: 1 + 0.01 * i for i, cell in enumerate(names)}

    def train(study: str, settings: dict[str, Any], folder: Path, **_: object) -> list[TrainedRun]:
        asked.extend(settings)
        return [
            made(level.get(name.rpartition("-seed")[0], 1.5), config.seed)
            for name, config in settings.items()
        ]

    monkeypatch.setattr(runs, "train_runs", train)
    monkeypatch.setattr(runs, "rewards_of_correct_clips", lambda config, lesson: (2.9, 2.8))
    found = make(tmp_path, quick=True, workers=1)
    best = list(cells())[-4:]
    assert sorted(cell for cell, trained in found.search.items() if len(trained) == 2) == sorted(
        best
    )
    assert {f"{cell}-seed1" for cell in best} == {name for name in asked if name.endswith("-seed1")}
    assert [run.seed for run in found.confirmation[SAGE]] == runs._protocol()["confirmation"][
        "seeds"
    ]
    assert list(found.confirmation) == [SAGE, found.best(SAGE), NFT]
    assert (found.best(SAGE), found.best(NFT)) == (
        list(variants(SAGE))[-1],
        list(variants(NFT))[-1],
    )


@pytest.mark.parametrize(
    ("score", "verdict"), [(1.9, "held"), (1.5, "not decidable"), (1.1, "not held")]
)
def test_the_verdict_follows_the_difference(score: float, verdict: str) -> None:
    second = {name: [made(1.0, 0)] for name in (*variants(SAGE), *variants(NFT))}
    best = list(variants(SAGE))[1]
    second[best] = [made(1.3, 0)]
    confirmation = {
        SAGE: [made(score, seed, noise=0.01) for seed in range(3)],
        best: [made(1.5, seed, noise=0.01) for seed in range(3)],
        NFT: [dataclasses.replace(made(1.5, seed + 7, noise=0.01), seed=seed) for seed in range(3)],
    }
    first, later, *_, last = cells()
    search = {last: [made(1.9, 0)]} | {
        cell: [made(score, seed) for seed in range(2)]
        for cell, score in ((first, 1.4), (later, 1.5))
    }
    found = Made(search=search, second=second, confirmation=confirmation, correct=(2.886, 2.747))
    gain, variant, search_finding = (claim.find(None) for claim in findings.claims(found))
    opposite = {"held": "not held", "not held": "held"}
    assert variant.verdict == opposite.get(verdict, verdict)
    assert variant.table[1][0] == f"`{best}`"
    assert "2.89 as drawn, and 2.75 through the autoencoder" in gain.text
    assert gain.verdict == verdict
    assert float(gain.table[1][3]) == pytest.approx(
        statistics.fmean(run.mean() for run in confirmation[SAGE]), abs=1e-3
    )
    assert f"`{later}` has the highest mean" in search_finding.text
    assert [row[0] for row in search_finding.table] == [
        "cell",
        f"`{later}`",
        f"`{first}`",
        f"`{last}`",
    ]


def test_a_correct_clip_scores_less_through_the_autoencoder() -> None:
    drawn, decoded = runs.rewards_of_correct_clips(
        settings_of(f"{SAGE}-seed10", quick=True), "shapes"
    )
    assert 2.6 < decoded < drawn < 3
