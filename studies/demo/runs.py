"""The runs of the demo's study: two shipped configurations on ten seeds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from sage_fast.config.loader import read_yaml
from sage_fast.config.schema import Config
from studies.runs import TrainedRun, shipped, train_runs

SAGE, NFT = "demo", "demo-nft"
"""The configurations that are run."""
QUICK = {
    "train.iterations": 2,
    "eval.seeds_per_prompt": 1,
    "eval.num_prompts": 2,
}
"""Settings of a run with `--quick`."""


@functools.cache
def _protocol() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("protocol.yaml"))


def protocol_text() -> list[str]:
    """Return the protocol's paragraphs, which were written before the runs."""
    return list(_protocol()["text"])


def seeds(quick: bool) -> list[int]:
    """Return the seeds of each configuration's runs: with `quick` the first two."""
    found = list(_protocol()["seeds"])
    return found[:2] if quick else found


def settings_of(run: str, quick: bool) -> Config:
    """Return the settings of a run by its name, such as `demo-seed10`."""
    name, _, seed = run.rpartition("-seed")
    return shipped(name, _protocol()["base"], QUICK if quick else {}, {"seed": int(seed)})


def make(folder: Path, *, quick: bool, workers: int) -> dict[str, list[TrainedRun]]:
    """Train the runs that `folder` lacks; return configuration -> its runs, by seed."""
    names = [f"{name}-seed{seed}" for name in (SAGE, NFT) for seed in seeds(quick)]
    settings = {name: settings_of(name, quick) for name in names}
    made = train_runs(__name__, settings, folder, quick=quick, workers=workers)
    by_name = dict(zip(names, made, strict=True))
    return {name: [by_name[f"{name}-seed{seed}"] for seed in seeds(quick)] for name in (SAGE, NFT)}
