"""The race of recipes: its interval, its search, its verdicts and its command."""

import copy
import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from sage_fast.config.loader import load
from sage_fast.tools.plan import plan
from studies.race import findings, runs
from studies.race.__main__ import main
from studies.race.ratio import ratio
from studies.race.runs import (
    EVALUATIONS,
    SECOND,
    Cell,
    Raced,
    affordable,
    best_cell,
    cells,
    config_of,
    cost,
    iterations,
    second_cells,
    settings_of,
    used,
)
from studies.runs import RANKS, TrainedRun, exaflops, full_size

pytestmark = pytest.mark.soak

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"


# -- the interval ----------------------------------------------------------------------------------


def scores_of(values: np.ndarray) -> list[dict[str, float]]:
    """`[seeds, prompts]` as the study holds it."""
    return [{f"prompt {i}": float(value) for i, value in enumerate(row)} for row in values]


def half_width(values: np.ndarray, comparisons: int) -> float:
    """Half the interval of the mean of `[seeds, prompts]`, clustered by both, written out."""
    seeds, prompts = values.shape
    residual, n = values - values.mean(), values.size
    by_seed = seeds / (seeds - 1) * (residual.sum(1) ** 2).sum() / n**2
    by_prompt = prompts / (prompts - 1) * (residual.sum(0) ** 2).sum() / n**2
    by_cell = n / (n - 1) * (residual**2).sum() / n**2
    error = math.sqrt(max(by_seed + by_prompt - by_cell, by_seed, by_prompt))
    return float(stats.t.ppf(1 - 0.025 / comparisons, seeds - 1)) * error


@pytest.mark.parametrize("comparisons", [1, 6])
def test_the_interval_of_a_ratio_is_fiellers(comparisons: int) -> None:
    """It holds the ratios that are not refuted, found on a grid."""
    generator = np.random.default_rng(0)
    shared = generator.normal(0, 0.1, (5, 8))
    second = 0.5 + shared + generator.normal(0, 0.05, (5, 8))
    first = 1.1 + 2 * shared + generator.normal(0, 0.05, (5, 8))
    found = ratio(scores_of(first), scores_of(second), comparisons=comparisons)
    grid = np.arange(0, 5, 1e-3)
    kept = [
        rho
        for rho in grid
        if abs((first - rho * second).mean()) <= half_width(first - rho * second, comparisons)
    ]
    assert found.value == pytest.approx(first.mean() / second.mean())
    assert found.low == pytest.approx(min(kept), abs=2e-3)
    assert found.high == pytest.approx(max(kept), abs=2e-3)


def test_there_is_no_ratio_to_what_may_be_zero() -> None:
    second = np.array([[-1.0, 1.2], [1.1, -0.8], [0.5, -0.6]])
    assert ratio(scores_of(np.ones((3, 2)) + second / 9), scores_of(second)) is None


# -- the search ------------------------------------------------------------------------------------


def test_every_recipe_is_a_file_that_the_race_runs() -> None:
    # the demo's study runs it
    assert {file.stem for file in RECIPES.glob("*.yaml")} == {*runs.recipes()}
    for file in RECIPES.glob("*.yaml"):
        load(str(file))


@pytest.mark.parametrize("recipe", runs.recipes())
def test_a_recipe_gets_the_budget_and_no_more(recipe: str) -> None:
    budget = 42 * cost("paper")
    assert budget - EVALUATIONS * cost(recipe) < affordable(recipe) * cost(recipe) <= budget
    for cell in cells(recipe):
        config = settings_of(f"{cell}-seed11", quick=False)
        assert config == config_of(cell, 11, quick=False)
        assert (config.seed, config.train.learning_rate) == (11, cell.learning_rate)
        assert (
            config.kl.strategy == "none"
            or config.kl.lambda_min == config.kl.lambda_max == cell.kl_weight
        )
        assert config.train.iterations == EVALUATIONS * config.eval.interval


def test_the_second_world_searches_the_learning_rate_alone() -> None:
    found = second_cells(Cell("paper", 3e-3, 0.05))
    assert {(cell.kl_weight, cell.world) for cell in found} == {(0.05, SECOND)}
    assert len(found) == 3
    config = settings_of(f"{found[0]}-seed10", quick=False)
    assert config.sampling.guidance_scale == 2
    assert config.sampling.height == 64
    assert config.train.iterations == 36
    assert config.train.learning_rate == 1.5e-3
    assert sum(exaflops(config).values()) == pytest.approx(cost("paper", SECOND))


@pytest.mark.parametrize(("recipe", "engine"), [("nft_half", "plain"), ("nft_full", "zero3")])
def test_a_recipe_is_planned_as_its_weights_are_shipped(recipe: str, engine: str) -> None:
    """All weights do not fit one GPU, where the plan would have every activation recomputed."""
    config = load(str(RECIPES / f"{recipe}.yaml"))
    assert full_size(config).train.engine == engine
    assert (
        exaflops(config)["training"]
        == plan(full_size(config), ranks=RANKS).flops["training"] / 1e18
    )


def test_archived_runs_keep_their_iterations_and_a_new_recipe_gets_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protocol = copy.deepcopy(runs._protocol())
    protocol["made"] = {"nft_full": 30}
    monkeypatch.setattr(runs, "_protocol", lambda: protocol)
    assert iterations("nft_full") == 30 < affordable("nft_full")
    assert iterations("nft_full", SECOND) == protocol["second"]["made"]["nft_full"]
    assert iterations("precise") == affordable("precise")
    assert used("nft_full", count=60) == pytest.approx(60 * cost("nft_full"))


def test_the_anchor_is_free_in_the_iterations_after_its_refresh() -> None:
    """Every 10 of 4 updates an iteration, so in one iteration of three; `nft` has no anchor."""
    anchor = exaflops(load(str(RECIPES / "paper.yaml")))["anchor"]
    assert used("paper") == pytest.approx(42 * cost("paper") - 14 * anchor)
    assert used("nft") == pytest.approx(iterations("nft") * cost("nft"))


def test_the_paper_recipe_has_the_papers_method() -> None:
    config = load(str(RECIPES / "paper.yaml"))
    assert (config.sampling.sampler, config.sampling.eta, config.kl.strategy) == (
        "sage",
        1.0,
        "dual",
    )
    assert config.objective.equalizer


def made(score: float, seed: int = 0, noise: float = 0.0) -> TrainedRun:
    """A run from 1 to `score` on six prompts; the judge's parts are those of the reward."""
    generator = np.random.default_rng(seed)
    evaluations = []
    for i in range(EVALUATIONS + 1):
        column = 1 / 3 + (score - 1) / 3 * (i > 0) + noise * generator.normal(size=6)
        parts = {name: column.tolist() for name in ("vq", "mq", "ta", *findings.JUDGE)}
        evaluations.append({"iteration": 7 * i, "prompts": list("abcdef"), "parts": parts})
    return TrainedRun(seed=seed, evaluations=evaluations, rows=[], environment={})


def test_the_best_cell_has_the_highest_mean_over_the_seeds() -> None:
    found = {
        Cell("paper", 1e-3, 0.1): [made(1.2), made(1.9)],
        Cell("paper", 2e-3, 0.1): [made(1.7), made(1.6)],
    }
    assert best_cell(found).learning_rate == 2e-3


def raced(**scores: float) -> dict[str, Raced]:
    found = {}
    for name, score in scores.items():
        cell = cells(name)[1]
        final = [made(score, seed, noise=0.01) for seed in range(5)]
        found[name] = Raced(search={cell: final[:2]}, best=cell, final=final, confirmation=final)
    return found


def again_of(found: dict[str, Raced]) -> dict[str, Raced]:
    return {
        name: dataclasses.replace(one, best=second_cells(one.best)[0])
        for name, one in found.items()
    }


@pytest.mark.parametrize(
    ("score", "verdict"), [(1.9, "held"), (1.3, "not decidable"), (0.6, "not held")]
)
def test_the_verdict_follows_the_difference(score: float, verdict: str) -> None:
    """The paper's method gains 0.3."""
    both = raced(paper=1.3, precise=score)
    (claim, judge, second) = findings.claims(both, again_of(both))
    found = claim.find(None)
    assert found.verdict == second.find(None).verdict == verdict
    assert judge.find(None).verdict == ("held" if score > 1 else "not held")
    assert float(re.findall(r" ends (\S+) \[", found.text)[0]) == pytest.approx(
        score - 1.3, abs=0.02
    )
    expected = (score - 1) / 0.3 * used("paper") / used("precise")
    assert used("paper", SECOND) > 1.5 * used("paper") * 36 / 42  # guidance
    assert float(re.findall(r"Per FLOP it gains (\S+) ", found.text)[0]) == pytest.approx(
        expected, rel=0.05
    )


def test_differences_of_the_table_are_corrected_for_its_recipes() -> None:
    both = raced(paper=1.3, nft=1.9)
    both["nft"] = dataclasses.replace(
        both["nft"], final=[made(1.9, seed, noise=0.02) for seed in range(5, 10)]
    )
    alone, found = (
        findings.differences(raced)["nft"] for raced in (both, both | raced(precise=1.4))
    )
    assert found.value == alone.value
    assert (found.high - found.value) / (alone.high - alone.value) == pytest.approx(
        3.495 / 2.776, rel=1e-3
    )


def test_no_ratio_is_printed_to_a_gain_that_may_be_zero() -> None:
    nothing = [
        made(score, seed, noise=0.01) for seed, score in enumerate((0.9, 1.1, 0.8, 1.2, 1.01))
    ]
    found = raced(paper=1.3, precise=1.9)
    found["paper"] = dataclasses.replace(found["paper"], confirmation=nothing)
    text = findings.claims(found, {})[0].find(None).text
    assert "Per FLOP" not in text
    assert "inf" not in text


def test_iterations_that_are_not_those_of_the_budget_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the others would do is said by the end of the curve, and by a ratio in which they gain
    nothing."""
    protocol = copy.deepcopy(runs._protocol())
    protocol["made"] = {"precise": 24}
    monkeypatch.setattr(runs, "_protocol", lambda: protocol)
    monkeypatch.setattr(
        runs, "used", lambda recipe, world=None, count=0: 1.0 * (count or iterations(recipe))
    )
    monkeypatch.setattr(findings, "used", runs.used)
    text = findings.claims(raced(paper=1.3, precise=1.9), {})[0].find(None).text
    assert f"precise 24 ({affordable('precise')})" in text
    ratio, flat = (float(found) for found in re.findall(r" (\d\.\d\d) \[", text))
    assert flat == pytest.approx(ratio * 24 / affordable("precise"), abs=0.01)
    assert "precise 24" not in findings.claims(raced(paper=1.3, nft=1.9), {})[0].find(None).text


def test_a_recipe_that_loses_in_the_second_world_is_drawn_and_said() -> None:
    both = raced(paper=1.3, precise=1.6)
    fell = again_of(both)
    lost = [made(0.5, seed, noise=0.01) for seed in range(5)]
    fell["precise"] = dataclasses.replace(fell["precise"], final=lost, confirmation=lost)
    found = findings.claims(both, fell)[2].find(None)
    assert found.verdict == "not held"
    assert re.search(r" -\d\.\d+ \[-\d\.\d+, -\d\.\d+\] above paper", found.text)
    figure = Figure()
    found.draw(figure)
    (bar, *_) = figure.axes[1].lines
    assert list(bar.get_xdata()) == sorted(bar.get_xdata())
    assert max(bar.get_xdata()) < 0


def test_the_recipes_laid_down_and_the_one_ahead_are_run_in_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = raced(paper=1.3, precise=1.4, nft=1.5, awm=1.2, kl_mask=1.9, nft_half=1.7)
    asked: list[set[str]] = []

    def train(cells: list[Cell], over: list[int], **_: object) -> dict[Cell, list[TrainedRun]]:
        asked.append({cell.recipe for cell in cells})
        return {cell: [made(1.5, seed) for seed in over] for cell in cells}

    monkeypatch.setattr(runs, "_train", train)
    again = runs.race_again(found, RECIPES, quick=False, workers=1)
    assert asked == [set(again), set(again), {"paper", "kl_mask"}]
    assert set(again) == {"paper", "kl_mask", "nft", "nft_half"}
    assert {name for name, one in again.items() if len(one.confirmation) == 10} == {
        "paper",
        "kl_mask",
    }


def test_the_confirmation_decides() -> None:
    """The five final seeds choose the recipe; what they gained does not count, in either world."""
    found = raced(paper=1.3, precise=1.6, nft=1.9)
    assert runs.ahead(found) == "nft"
    fell = dataclasses.replace(
        found["nft"], confirmation=[made(1.2, seed, noise=0.01) for seed in range(5)]
    )
    assert findings.claims(found | {"nft": fell}, {})[0].find(None).verdict == "not held"
    again = again_of(found)
    assert findings.claims(found, again)[2].find(None).verdict == "held"
    again["nft"] = dataclasses.replace(again["nft"], confirmation=fell.confirmation)
    assert findings.claims(found, again)[2].find(None).verdict == "not held"


def test_sage_best_is_compared_with_the_reference_and_the_recipe_ahead() -> None:
    found = raced(paper=1.3, nft=1.9, sage_best=1.6)
    one, best, *_ = findings.claims(found, again_of(found))
    assert (one.name, best.name) == ("race", "race-sage")
    text = best.find(None).text
    assert best.find(None).verdict == "held"
    assert re.search(r" \+0\.30\d .* above paper", text)
    assert re.search(r" -0\.30\d .* above nft", text)
    worse = dataclasses.replace(
        found["sage_best"], confirmation=[made(1.1, seed, noise=0.01) for seed in range(5)]
    )
    assert findings.claims(found | {"sage_best": worse}, {})[1].find(None).verdict == "not held"


# -- the command -----------------------------------------------------------------------------------


def test_the_reference_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper"]) == 2
    assert "name one more" in capsys.readouterr().err


def test_an_unknown_recipe_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precize"]) == 2
    assert "did you mean 'precise'?" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.usefixtures("study_in_process")
def test_from_the_recipes_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = copy.deepcopy(runs._protocol())
    protocol["search"] |= {
        "learning_rate": {"lora": [1e-3], "full": [1e-3]},
        "kl_weight": [0.05, 0.2],
    }
    protocol["base"] |= {
        "train.prompts_per_iteration": 1,
        "train.group_size": 2,
        "eval.num_prompts": 2,
    }
    protocol["base"] |= {"train.optimizer_steps": 2, "sampling.steps": 2, "eval.steps": 1}
    monkeypatch.setattr(runs, "_protocol", lambda: protocol)
    monkeypatch.setattr(runs, "EVALUATIONS", 2)

    command = ["precise", "--quick", "--workers", "1", "--output", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "8 runs, 8 of them to be made" in printed  # two recipes, two cells, two seeds
    # Each recipe's best cell on two seeds, and on two more; then again in the second world.
    assert printed.count("4 runs, 4 of them to be made") == 4
    # the search there: one cell and one seed of each
    assert "2 runs, 2 of them to be made" in printed
    assert printed.splitlines()[-1] == str(tmp_path / "results.html")
    page, text = (
        (tmp_path / "results.html").read_text(),
        (tmp_path / "results" / "results.md").read_text(),
    )
    for shown in (page, text):
        assert "python -m studies.race precise --quick" in shown
    assert len((tmp_path / "results" / "race.csv").read_text().splitlines()) == 1 + 16
    assert len((tmp_path / "results" / "race-pairs.csv").read_text().splitlines()) == 1 + 10
    assert main(command) == 0
    assert "to be made" not in capsys.readouterr().out
