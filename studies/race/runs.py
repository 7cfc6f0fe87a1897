"""The runs of the race: recipes, the cells of their search, and their settings."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.algorithm.objective import kl_acts, spares_anchor, strategy_of
from sage_fast.config.load import read_yaml
from sage_fast.config.schema import Config
from studies.race.ratio import gains, mean_of
from studies.runs import TrainedRun, exaflops, shipped, train_runs

EVALUATIONS = 6
"""Evaluations of a run after the first; the last two are its score."""


@functools.cache
def _protocol() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("protocol.yaml"))


def protocol_text() -> list[str]:
    """Return the protocol's paragraphs, which were written before the runs."""
    return list(_protocol()["text"])


def recipes() -> list[str]:
    """Return the names of the recipes: files of `configs/recipes`."""
    return list(_protocol()["recipes"])


def reference() -> str:
    """Return the recipe that the others are compared with."""
    return str(_protocol()["budget"]["recipe"])


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recipe at a point of the search. lambda_KL is constant, and 0 for a recipe without KL."""

    recipe: str
    learning_rate: float
    kl_weight: float

    def __str__(self) -> str:
        return f"{self.recipe}-lr{self.learning_rate:g}-kl{self.kl_weight:g}"


def cells(recipe: str) -> list[Cell]:
    """Return the cells of a recipe's search."""
    search = _protocol()["search"]
    weights = search["kl_weight"] if kl_acts(_shipped(recipe).kl) else [0.0]
    return [Cell(recipe, rate, weight) for rate in search["learning_rate"] for weight in weights]


def seeds(purpose: str, quick: bool) -> list[int]:
    """Return the seeds of `search`, `final` or `confirmation`."""
    found = _protocol()[purpose]["seeds"]
    return list(found[:2] if quick else found)


@functools.cache
def _shipped(recipe: str) -> Config:
    return shipped(f"recipes/{recipe}", _protocol()["base"])


@functools.cache
def cost(recipe: str) -> float:
    """Return planned exaFLOPs (1e18) of an iteration on the 8.3 B model, which share the budget.

    They are of rollouts, scouting, decoding, anchor and training; the plan has the anchor run in every iteration.
    """
    return sum(exaflops(_shipped(recipe)).values())


@functools.cache
def used(recipe: str) -> float:
    """Return exaFLOPs of a whole run as it is made: without the anchor in the iterations after its refresh."""
    config, parts = _shipped(recipe), exaflops(_shipped(recipe))
    count, cycle = iterations(recipe), math.ceil(config.kl.anchor_interval / config.train.optimizer_steps)
    free = math.ceil(count / cycle) * (strategy_of(config.kl).moves and spares_anchor(config))
    return count * sum(parts.values()) - free * parts["anchor"]


@functools.cache
def iterations(recipe: str) -> int:
    """Return the number of iterations that the budget pays, rounded down to a multiple of the evaluations."""
    budget = _protocol()["budget"]
    affordable = budget["iterations"] * cost(budget["recipe"]) / cost(recipe)
    return EVALUATIONS * max(int(affordable + 1e-9) // EVALUATIONS, 1)


def config_of(cell: Cell, seed: int, quick: bool) -> Config:
    """Return the settings of a run."""
    count = EVALUATIONS if quick else iterations(cell.recipe)
    settings: Mapping[str, Any] = {
        **_protocol()["base"],
        "seed": seed,
        "train.learning_rate": cell.learning_rate,
        "train.iterations": count,
        "eval.interval": count // EVALUATIONS,
        **({"kl.lambda_min": cell.kl_weight, "kl.lambda_max": cell.kl_weight} if cell.kl_weight else {}),
        **({"eval.seeds_per_prompt": 1} if quick else {}),
    }
    return shipped(f"recipes/{cell.recipe}", settings)


def settings_of(run: str, quick: bool) -> Config:
    """Return the settings of a run by its name."""
    name, _, seed = run.rpartition("-seed")
    (cell,) = (cell for recipe in recipes() for cell in cells(recipe) if str(cell) == name)
    return config_of(cell, int(seed), quick)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raced:
    """What a recipe's search and final runs gave.

    Attributes:
        search: cell -> runs on the seeds of the search.
        best: cell with the highest mean score in the search.
        final: runs of `best` on new seeds.
        confirmation: runs of `best` on further seeds, of the reference and of the recipe that `final` chooses.
    """

    search: Mapping[Cell, Sequence[TrainedRun]]
    best: Cell
    final: Sequence[TrainedRun]
    confirmation: Sequence[TrainedRun] = ()


def race(chosen: Sequence[str], folder: Path, *, quick: bool, workers: int) -> dict[str, Raced]:
    """Train the runs that `folder` lacks: each recipe's search, its best cell on new seeds, then the confirmation."""
    train = functools.partial(_train, folder=folder, quick=quick, workers=workers)
    search = train([cell for recipe in chosen for cell in cells(recipe)], seeds("search", quick))
    found: dict[str, Mapping[Cell, Sequence[TrainedRun]]] = {
        recipe: {cell: search[cell] for cell in cells(recipe)} for recipe in chosen
    }
    best = {recipe: best_cell(of) for recipe, of in found.items()}
    final = train(list(best.values()), seeds("final", quick))
    raced = {recipe: Raced(search=found[recipe], best=cell, final=final[cell]) for recipe, cell in best.items()}
    compared = reference(), ahead(raced)
    confirmation = train([best[recipe] for recipe in compared], seeds("confirmation", quick))
    confirmed = {
        recipe: dataclasses.replace(raced[recipe], confirmation=confirmation[best[recipe]]) for recipe in compared
    }
    return raced | confirmed


def ahead(raced: Mapping[str, Raced]) -> str:
    """Return the recipe with the highest gain per FLOP in the final runs, other than the reference."""
    others = [recipe for recipe in raced if recipe != reference()]
    return max(others, key=lambda recipe: mean_of(gains(raced[recipe].final)).value / used(recipe))


def best_cell(search: Mapping[Cell, Sequence[TrainedRun]]) -> Cell:
    """Return the cell with the highest mean held-out score over its seeds."""
    return max(search, key=lambda cell: statistics.fmean(run.mean() for run in search[cell]))


def _train(
    chosen: Sequence[Cell], over: Sequence[int], *, folder: Path, quick: bool, workers: int
) -> dict[Cell, list[TrainedRun]]:
    settings = {f"{cell}-seed{seed}": config_of(cell, seed, quick) for cell in chosen for seed in over}
    made = iter(train_runs(__name__, settings, folder, quick=quick, workers=workers))
    return {cell: [next(made) for _ in over] for cell in chosen}
