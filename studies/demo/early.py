"""The runs of the first forty iterations: the demo, its challenger and what might gain more."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.loader import read_yaml
from sage_fast.config.schema import Config
from sage_fast.data.prompt_order import PromptOrder
from sage_fast.trainer import Trainer
from studies.demo.runs import QUICK
from studies.runs import (
    RANKS,
    TrainedRun,
    full_size,
    has_left,
    planned_flops,
    shipped,
    train_runs,
    without_left,
)

DEMO, NFT, ENDPOINT, HAND_OVER, GROWING, QUARTER, RANK = (
    "demo",
    "demo-nft",
    "endpoint",
    "hand-over",
    "growing",
    "anchor-quarter",
    "ranks",
)
"""The arms of the protocol."""
Runs = Mapping[str, Mapping[int, list[TrainedRun]]]
"""Arm -> iterations of its runs -> a run for each seed."""


@dataclasses.dataclass(frozen=True)
class Name:
    """Name of a run, such as `demo-it40-seed20`."""

    arm: str
    iterations: int
    seed: int

    @classmethod
    def parse(cls, text: str) -> Name:
        arm, _, rest = text.rpartition("-it")
        iterations, _, seed = rest.partition("-seed")
        return cls(arm, int(iterations), int(seed))

    def __str__(self) -> str:
        return f"{self.arm}-it{self.iterations}-seed{self.seed}"


@functools.cache
def _protocol() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("protocol.yaml"))["early"]


def arms() -> list[str]:
    """Return the names of the arms."""
    return list(_protocol()["arms"])


def lengths(arm: str) -> list[int]:
    """Return the iterations of an arm's runs."""
    return list(_protocol()["arms"][arm]["iterations"])


def looks() -> list[int]:
    """Return the iterations after which arms are compared."""
    return list(_protocol()["looks"])


def margin() -> float:
    """Return how much less reward still counts as no less."""
    return float(_protocol()["margin"])


def seeds(quick: bool) -> list[int]:
    """Return the seeds of each arm: with `quick` the first two."""
    found = list(_protocol()["seeds"])
    return found[:2] if quick else found


def _overlay(arm: str) -> dict[str, Any]:
    """Return the settings of an arm over its configuration."""
    return dict(_protocol()["arms"][arm].get("settings", {}))


def settings_of(run: str, quick: bool) -> Config:
    """Return the settings of a run by its name."""
    name = Name.parse(run)
    arm = _protocol()["arms"][name.arm]
    last = max(looks())
    of_length = {
        "train.iterations": name.iterations,
        # Runs up to the last look are evaluated at the others too.
        "eval.interval": min(looks()) if name.iterations == last else 10 * last,
    }
    return shipped(
        arm["configuration"],
        without_left(_protocol()["base"]),
        of_length,
        without_left(_overlay(name.arm)),
        QUICK | {"eval.seeds_per_prompt": 2} if quick else {},
        {"seed": name.seed},
    )


def prompts_at(iteration: int) -> int:
    """Return the prompts of an iteration of the growing batch."""
    steps = _protocol()["growing"]
    return int(steps[max(first for first in steps if first <= iteration)])


def before_iteration(run: str, trainer: Trainer, index: int) -> None:
    """Set the batch and the rate of an iteration of the growing batch; other arms keep theirs."""
    if Name.parse(run).arm != GROWING:
        return
    plain = shipped(DEMO).train
    prompts = prompts_at(index)
    rate = plain.learning_rate * math.sqrt(prompts / plain.prompts_per_iteration)
    train = dataclasses.replace(
        trainer.config.train, prompts_per_iteration=prompts, learning_rate=rate
    )
    trainer.config = dataclasses.replace(trainer.config, train=train)
    trainer.resolved = ResolvedConfig(trainer.config)

    # The next prompts follow the last ones taken, as after a resume with another batch.
    order = PromptOrder(trainer.prompts, prompts)
    order.load_state_dict(trainer.prompt_order.state_dict(), index)
    trainer.prompt_order = order


def make(folder: Path, *, quick: bool, workers: int) -> dict[str, dict[int, list[TrainedRun]]]:
    """Train the runs that `folder` lacks; return arm -> iterations -> its runs, by seed."""
    # Short runs are not in the archive.
    made_here = [arm for arm in arms() if not (quick and has_left(_overlay(arm)))]
    # Seed by seed, so that an interrupted study has whole seeds.
    names = [
        Name(arm, length, seed)
        for seed in seeds(quick)
        for arm in made_here
        for length in lengths(arm)
    ]
    settings = {str(name): settings_of(str(name), quick) for name in names}
    made = train_runs(
        __name__,
        settings,
        folder,
        quick=quick,
        workers=workers,
        only_read=[str(name) for name in names if has_left(_overlay(name.arm))],
    )
    found: dict[str, dict[int, list[TrainedRun]]] = {}
    for name, run in zip(names, made, strict=True):
        found.setdefault(name.arm, {}).setdefault(name.iterations, []).append(run)
    return found


@functools.cache
def _group_exaflops(configuration: str) -> float:
    """Return the exaFLOPs (1e18) of a group, planned for the 8.3 B model on eight GPUs."""
    config = shipped(configuration)
    whole = sum(planned_flops(full_size(config), ranks=RANKS).values()) / 1e18
    return whole / config.train.prompts_per_iteration


def flops_of(arm: str, iterations: int) -> float:
    """Return the exaFLOPs of a run without its evaluations, counted as at 8.3 B."""
    configuration = _protocol()["arms"][arm]["configuration"]
    groups = iterations * shipped(configuration).train.prompts_per_iteration
    if arm == GROWING:
        groups = sum(prompts_at(index) for index in range(iterations))
    return groups * _group_exaflops(configuration)


def by_label(found: Runs) -> dict[str, list[TrainedRun]]:
    """Return arm and iterations, such as `demo-it40` -> its runs."""
    return {f"{arm}-it{n}": runs for arm, of_arm in found.items() for n, runs in of_arm.items()}
