"""The runs of the race: recipes, the cells of their search, and their settings."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.algorithm.objective import Objective
from sage_fast.config.loader import read_yaml
from sage_fast.config.schema import Config
from studies.race.ratio import gains, mean_of
from studies.runs import TrainedRun, exaflops, shipped, train_runs
from studies.shapes.world import WORLD_SETTINGS

EVALUATIONS = 6
"""Evaluations of a run after the first; the last two are its score."""

FIRST, SECOND = "shapes", "pairs"
"""The two worlds: `studies.shapes`, and `studies.pairs`."""


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


def _of_world(world: str) -> dict[str, Any]:
    """Return the part of the protocol for a world."""
    return _protocol()["second"] if world == SECOND else _protocol()


def _base(world: str) -> dict[str, Any]:
    """Return the settings of all runs in a world."""
    of_world = WORLD_SETTINGS if world == FIRST else {}
    return of_world | _protocol()["base"] | _of_world(world)["base"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recipe at a point of the search. lambda_KL is constant, and 0 for a recipe without KL."""

    recipe: str
    learning_rate: float
    kl_weight: float
    world: str = FIRST

    def __str__(self) -> str:
        prefix = f"{self.world}-" if self.world != FIRST else ""
        return f"{prefix}{self.recipe}-lr{self.learning_rate:g}-kl{self.kl_weight:g}"


def cells(recipe: str) -> list[Cell]:
    """Return the cells of a recipe's search in the first world."""
    weights = _protocol()["search"]["kl_weight"] if Objective(_shipped(recipe)).kl_acts else [0.0]
    return [Cell(recipe, rate, weight) for rate in _rates(recipe) for weight in weights]


def _rates(recipe: str) -> list[float]:
    """Return the learning rates of a recipe's search: other ones for a LoRA, for all weights, and
    for Muon."""
    config, rates = _shipped(recipe), _protocol()["search"]["learning_rate"]
    return list(rates.get(config.train.optimizer, rates[config.model.tuning]))


def second_cells(best: Cell) -> list[Cell]:
    """Return the cells of the search in the second world, with the weight of the KL that was best
    in the first."""
    return [
        dataclasses.replace(best, learning_rate=rate, world=SECOND) for rate in _rates(best.recipe)
    ]


def comparisons(world: str) -> int:
    """Return how often the claims of a world have been decided, for which intervals of a
    confirmation are corrected."""
    return int(_of_world(world)["confirmation"]["comparisons"])


def sage_at_its_best() -> str:
    """Return the recipe that is confirmed beside the one ahead: SAGE-GRPO at the settings that its
    search found."""
    return str(_protocol()["confirmation"]["beside"])


def seeds(purpose: str, quick: bool, world: str = FIRST) -> list[int]:
    """Return the seeds of `search`, `final` or `confirmation`."""
    found = _of_world(world)[purpose]["seeds"]
    return list(found[:2] if quick else found)


@functools.cache
def _shipped(recipe: str, world: str = FIRST) -> Config:
    return shipped(f"recipes/{recipe}", _base(world))


@functools.cache
def cost(recipe: str, world: str = FIRST) -> float:
    """Return planned exaFLOPs (1e18) of an iteration on the 8.3 B model, a LoRA or all weights,
    which share the budget.

    They are of rollouts, decoding, anchor and training; the plan has the anchor run in every
    iteration.
    """
    return sum(exaflops(_shipped(recipe, world)).values())


@functools.cache
def used(recipe: str, world: str = FIRST, count: int = 0) -> float:
    """Return exaFLOPs of `count` iterations, or of a whole run: without the anchor in those after
    its refresh."""
    config = _shipped(recipe, world)
    parts = exaflops(config)
    count = count or iterations(recipe, world)
    of_all = count * sum(parts.values())

    objective = Objective(config)
    if not (objective.strategy.moves and objective.reuses_velocities):
        return of_all
    cycle = math.ceil(config.kl.anchor_interval / config.train.optimizer_steps)
    refreshes = math.ceil(count / cycle)
    return of_all - refreshes * parts["anchor"]


@functools.cache
def affordable(recipe: str, world: str = FIRST) -> int:
    """Return the number of iterations that the budget pays, rounded down to a multiple of the
    evaluations."""
    paid = _of_world(world)["budget"]["iterations"] * cost(reference(), world) / cost(recipe, world)
    return EVALUATIONS * max(int(paid + 1e-9) // EVALUATIONS, 1)


def iterations(recipe: str, world: str = FIRST) -> int:
    """Return the number of iterations of a run: of the archived ones where there are any."""
    return int(_of_world(world)["made"].get(recipe) or affordable(recipe, world))


def config_of(cell: Cell, seed: int, quick: bool) -> Config:
    """Return the settings of a run."""
    count = EVALUATIONS if quick else iterations(cell.recipe, cell.world)
    settings: Mapping[str, Any] = {
        **_base(cell.world),
        "seed": seed,
        "train.learning_rate": cell.learning_rate,
        "train.iterations": count,
        "eval.interval": count // EVALUATIONS,
        **(
            {"kl.lambda_min": cell.kl_weight, "kl.lambda_max": cell.kl_weight}
            if cell.kl_weight
            else {}
        ),
        **({"eval.seeds_per_prompt": 1} if quick else {}),
    }
    return shipped(f"recipes/{cell.recipe}", settings)


def settings_of(run: str, quick: bool) -> Config:
    """Return the settings of a run by its name."""
    name, _, seed = run.rpartition("-seed")
    first = [cell for recipe in recipes() for cell in cells(recipe)]
    known = {
        str(cell): cell
        for cell in (*first, *(other for cell in first for other in second_cells(cell)))
    }
    return config_of(known[name], int(seed), quick)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raced:
    """What a recipe's search and final runs gave.

    Attributes:
        search: cell -> runs on the seeds of the search.
        best: cell with the highest mean score in the search.
        final: runs of `best` on new seeds.
        confirmation: runs of `best` on further seeds: of the reference, of the recipe ahead in the
            first world, and there of `sage_at_its_best`.
    """

    search: Mapping[Cell, Sequence[TrainedRun]]
    best: Cell
    final: Sequence[TrainedRun]
    confirmation: Sequence[TrainedRun] = ()


def race(chosen: Sequence[str], folder: Path, *, quick: bool, workers: int) -> dict[str, Raced]:
    """Train the runs that `folder` lacks: each recipe's search, its best cell on new seeds, then
    the confirmation."""
    train = functools.partial(_train, folder=folder, quick=quick, workers=workers)
    raced = _search({recipe: cells(recipe) for recipe in chosen}, train, quick, FIRST)
    return _confirm(raced, ahead(raced), train, quick, FIRST)


def ahead(raced: Mapping[str, Raced]) -> str:
    """Return the recipe with the highest gain in the final runs, other than the reference."""
    others = [recipe for recipe in raced if recipe != reference()]
    return max(others, key=lambda recipe: mean_of(gains(raced[recipe].final)).value)


def best_cell(search: Mapping[Cell, Sequence[TrainedRun]]) -> Cell:
    """Return the cell with the highest mean held-out score over its seeds."""
    return max(search, key=lambda cell: statistics.fmean(run.mean() for run in search[cell]))


def race_again(
    raced: Mapping[str, Raced], folder: Path, *, quick: bool, workers: int
) -> dict[str, Raced]:
    """Train the runs that `folder` lacks in the second world: of the reference, the one ahead, and
    the protocol's."""
    train = functools.partial(_train, folder=folder, quick=quick, workers=workers)
    first = ahead(raced)
    listed = dict.fromkeys((reference(), first, *_protocol()["second"]["recipes"]))
    chosen = [recipe for recipe in listed if recipe in raced]
    again = _search(
        {recipe: second_cells(raced[recipe].best) for recipe in chosen}, train, quick, SECOND
    )
    return _confirm(again, first, train, quick, SECOND)


Train = Callable[[Sequence[Cell], Sequence[int]], dict[Cell, list[TrainedRun]]]
"""(cells, seeds) -> runs of each cell."""


def _confirm(
    raced: Mapping[str, Raced], first: str, train: Train, quick: bool, world: str
) -> dict[str, Raced]:
    """Train the reference, the recipe ahead, `first`, and `sage_at_its_best` on the seeds of the
    confirmation."""
    chosen = (reference(), first, sage_at_its_best())
    compared = {recipe: found for recipe, found in raced.items() if recipe in chosen}
    made = train([found.best for found in compared.values()], seeds("confirmation", quick, world))
    return {**raced} | {
        recipe: dataclasses.replace(found, confirmation=made[found.best])
        for recipe, found in compared.items()
    }


def _search(
    tried: Mapping[str, Sequence[Cell]], train: Train, quick: bool, world: str
) -> dict[str, Raced]:
    """Train each recipe's cells on the seeds of the search, and its best cell on those of the
    final."""
    search = train(
        [cell for recipe in tried.values() for cell in recipe], seeds("search", quick, world)
    )
    best = {
        recipe: best_cell({cell: search[cell] for cell in found}) for recipe, found in tried.items()
    }
    final = train(list(best.values()), seeds("final", quick, world))
    return {
        recipe: Raced(
            search={cell: search[cell] for cell in tried[recipe]}, best=cell, final=final[cell]
        )
        for recipe, cell in best.items()
    }


def _train(
    chosen: Sequence[Cell], over: Sequence[int], *, folder: Path, quick: bool, workers: int
) -> dict[Cell, list[TrainedRun]]:
    settings = {
        f"{cell}-seed{seed}": config_of(cell, seed, quick) for cell in chosen for seed in over
    }
    made = iter(train_runs(__name__, settings, folder, quick=quick, workers=workers))
    return {cell: [next(made) for _ in over] for cell in chosen}
