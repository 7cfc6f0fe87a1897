"""The runs of the protocol: their settings."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sage_fast.config.loader import read_yaml
from sage_fast.config.schema import Config
from studies.runs import TrainedRun, shipped, train_runs
from studies.shapes.world import WORLD_SETTINGS

SEEDS, QUICK_SEEDS = 5, 2
QUICK: Mapping[str, object] = {
    "train.iterations": 3,
    "eval.interval": 3,
    "eval.seeds_per_prompt": 1,
}
"""Overrides of `--quick`: enough to check that everything works, too little to decide anything."""


@functools.cache
def _protocol() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("protocol.yaml"))


def protocol() -> dict[str, dict[str, Any]]:
    """Return variant -> its overrides of configs/recipes/paper.yaml."""
    tree = _protocol()
    return {name: tree["base"] | settings for name, settings in tree["variants"].items()}


def protocol_text() -> list[str]:
    """Return the protocol's paragraphs, which were written before the runs."""
    return list(_protocol()["text"])


def config_of(variant: str, seed: int, quick: bool = False) -> Config:
    """Return the settings of a run."""
    small = QUICK if quick else {}
    return shipped("recipes/paper", WORLD_SETTINGS, protocol()[variant], small, {"seed": seed})


def settings_of(run: str, quick: bool) -> Config:
    """Return the settings of a run by its name."""
    return config_of(*_runs(protocol(), quick)[run], quick)


def train_variants(
    variants: Iterable[str], folder: Path, *, quick: bool, workers: int
) -> dict[str, list[TrainedRun]]:
    """Train the runs of these variants that `folder` lacks; return variant -> its runs, by seed."""
    names = _runs(dict.fromkeys(variants), quick)
    settings = {name: config_of(*run, quick) for name, run in names.items()}
    runs = train_runs(__name__, settings, folder, quick=quick, workers=workers)
    found: dict[str, list[TrainedRun]] = {}
    for (variant, _), run in zip(names.values(), runs):
        found.setdefault(variant, []).append(run)
    return found


def _runs(variants: Iterable[str], quick: bool) -> dict[str, tuple[str, int]]:
    """Return run name -> variant and seed."""
    seeds = range(QUICK_SEEDS if quick else SEEDS)
    return {
        f"{variant.replace('/', '-')}-seed{seed}": (variant, seed)
        for variant in variants
        for seed in seeds
    }
