"""The runs of the search: cells of two searches, and the confirmation."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.config.loader import load, read_yaml
from sage_fast.config.schema import Config
from studies.runs import TrainedRun, has_left, shipped, train_runs, without_left
from studies.shapes.world import WORLD_SETTINGS
from studies.testbed.look import rewards_of_correct_clips

SAGE, NFT = "demo", "demo-nft"
"""The shipped configurations that are compared."""
QUICK = 2
"""Iterations of a run with `--quick`."""


@functools.cache
def _protocol() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("protocol.yaml"))


def protocol_text() -> list[str]:
    """Return the protocol's paragraphs, which were written before the runs."""
    return list(_protocol()["text"])


def cells() -> dict[str, Mapping[str, Any]]:
    """Return cell of the first search -> its settings over `search.yaml`."""
    return dict(_protocol()["cells"])


def variants(method: str) -> dict[str, Mapping[str, Any]]:
    """Return variant of the second search -> its settings over a shipped configuration, `SAGE` or
    `NFT`."""
    return dict(_protocol()["second"]["cells"][method])


def looks() -> int:
    """Return how often the confirmation's runs were looked at, the last time included."""
    return int(_protocol()["confirmation"]["looks"])


def looks_at_variant() -> int:
    """Return how often `SAGE` and its variant were looked at."""
    return int(_protocol()["confirmation"]["looks_at_variant"])


def settings_of(run: str, quick: bool) -> Config:
    """Return the settings of a run by its name."""
    name, _, seed = run.rpartition("-seed")
    overlays: list[Mapping[str, Any]] = [{"seed": int(seed)}]
    if name in cells():
        read = functools.partial(_over_search, cells()[name])
    else:
        method = NFT if name in (NFT, *variants(NFT)) else SAGE
        overlay = without_left(variants(method)[name]) if name != method else {}
        second = _protocol()["second"]
        read = functools.partial(shipped, method, WORLD_SETTINGS, second["base"], overlay)
    if int(seed) in _protocol()["confirmation"]["seeds"]:
        overlays.append(_protocol()["confirmation"]["base"])
        overlays.append({"eval.interval": read(*overlays).train.iterations})  # none before the end
    small = {
        "train.iterations": QUICK,
        "eval.interval": QUICK,
        "eval.seeds_per_prompt": 1,
        "eval.num_prompts": 2,
    }
    return read(*overlays, small if quick else {})


def _over_search(cell: Mapping[str, Any], *overlays: Mapping[str, Any]) -> Config:
    return load(str(Path(__file__).with_name("search.yaml")), overlays=[cell, *overlays])


def own_settings(name: str) -> Config:
    """Return the settings of a variant, whose name is without a seed."""
    return settings_of(f"{name}-seed0", quick=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """The runs of the study.

    Attributes:
        search: cell of the first search -> its runs: on the first seed, and for the best cells on
            the others.
        second: variant of the second search -> its run.
        confirmation: `SAGE`, its variant and `NFT` -> runs on seeds and prompts that chose nothing.
        correct: mean reward of correct clips of the confirmation's prompts, as drawn and through
            the autoencoder.
    """

    search: Mapping[str, Sequence[TrainedRun]]
    second: Mapping[str, Sequence[TrainedRun]]
    confirmation: Mapping[str, Sequence[TrainedRun]]
    correct: tuple[float, float]

    @property
    def all(self) -> dict[str, Sequence[TrainedRun]]:
        both = {
            name: [*self.second.get(name, []), *runs] for name, runs in self.confirmation.items()
        }
        return {**self.search, **self.second, **both}

    def best(self, method: str) -> str:
        """Return the variant of `SAGE` or `NFT` with the highest score in the second search."""
        made = [name for name in variants(method) if name in self.second]
        return max(made, key=lambda name: score(self.second[name]))


def score(runs: Sequence[TrainedRun]) -> float:
    """Return the mean held-out score at the end of the runs."""
    return statistics.fmean(run.mean() for run in runs)


def make(folder: Path, *, quick: bool, workers: int) -> Made:
    """Train the runs that `folder` lacks: both searches, and the confirmation."""

    def train(names: Sequence[str], seeds: Sequence[int]) -> dict[str, list[TrainedRun]]:
        settings = {
            f"{name}-seed{seed}": settings_of(f"{name}-seed{seed}", quick)
            for seed in seeds
            for name in names
        }
        made = train_runs(
            __package__ + ".runs",
            settings,
            folder,
            quick=quick,
            workers=workers,
            only_read=[run for run in settings if run.rpartition("-seed")[0] in gone],
        )
        return {name: made[i :: len(names)] for i, name in enumerate(names)}

    every = {**variants(SAGE), **variants(NFT)}
    gone = {name for name, overlay in every.items() if has_left(overlay)}
    first, *others = _protocol()["search"]["seeds"]
    search = train(list(cells()), [first])
    ranked = sorted(search, key=lambda cell: score(search[cell]), reverse=True)
    again = train(ranked[: _protocol()["search"]["best"]], others)
    # Short runs are not in the archive.
    names = [name for name in every if not (quick and name in gone)]
    second = train(names, [_protocol()["second"]["seed"]])
    found = Made(
        search={cell: runs + again.get(cell, []) for cell, runs in search.items()},
        second=second,
        confirmation={},
        correct=rewards_of_correct_clips(
            settings_of(f"{SAGE}-seed{_protocol()['confirmation']['seeds'][0]}", quick), "shapes"
        ),
    )
    confirmed = train([SAGE, found.best(SAGE), NFT], _protocol()["confirmation"]["seeds"])
    return dataclasses.replace(found, confirmation=confirmed)
