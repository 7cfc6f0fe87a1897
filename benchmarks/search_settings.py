"""`python -m benchmarks.search_settings {settings,ratio} FOLDER [--workers N]`: the demo's settings, by trial.

    settings   learning rate x KL x EMA
    advantage  `objective.advantage_std`, over a whole run
    ratio      `objective.ratio` in bfloat16

Every point of a grid gets the same number of iterations and the same seeds, through the command that a user runs; what
a grid does not name is as in configs/demo.yaml. Runs that stand in FOLDER already are kept, so that a search can go on
another day. The table goes to `FOLDER/search.json` and to the screen: held-out composite over the iterations, mean over
the seeds with a 95 % interval (Student's t), and the judge that no run is trained on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from sage_fast.environment import environment
from sage_fast.files import read_json, write_json

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
SEEDS = (0, 1, 2)
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t by number of seeds."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Settings to be combined: name -> the values tried; what all runs share; iterations."""

    axes: Mapping[str, tuple[object, ...]]
    iterations: int
    shared: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def points(self) -> list[dict[str, object]]:
        return [dict(zip(self.axes, values)) for values in itertools.product(*self.axes.values())]


GRIDS = {
    "settings": Grid(
        {
            "train.learning_rate": (3e-4, 1e-3),
            "kl.strategy": ("none", "dual"),
            "train.ema_decay": (0.0, 0.95),
        },
        iterations=60,
        shared={"train.schedule": "constant"},  # the fall at the end of a long run is not what is searched
    ),
    "advantage": Grid(
        {"objective.advantage_std": ("group", "batch")},
        iterations=300,
        shared={"eval.interval": 50},
    ),
    "ratio": Grid(
        {"objective.ratio": ("plain", "centred", "normalised")},
        iterations=60,
        shared={"train.schedule": "constant", "model.dtype": "bfloat16", "train.parity_gate": False},
    ),
}


def run(folder: Path, grid: Grid, overrides: Mapping[str, object]) -> None:
    """One run of the command, unless it is finished; continued where an earlier one was stopped."""
    if (folder / "eval" / "after.json").is_file():
        return
    settings = {
        "output": folder,
        "train.iterations": grid.iterations,
        "train.checkpoint_interval": grid.iterations,
        "eval.interval": 20,
        "tracking.trackers": "[]",
        **grid.shared,
        **overrides,
    }
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    if (folder / "run.json").is_file():
        arguments.append("--resume")
    command = [sys.executable, "-m", "sage_fast", "train", str(CONFIG), "--quiet", *arguments]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def scores(folder: Path) -> dict[int, dict[str, float]]:
    """iteration -> held-out means of the composite and of the judge's parts."""
    found = {}
    for file in (folder / "eval").glob("*.json"):
        row = read_json(file)
        parts = {part: values for part, values in row["parts"].items() if part.startswith("judge/")}
        found[row["iteration"]] = {
            name: statistics.mean(values) for name, values in {"composite": row["reward"], **parts}.items()
        }
    return dict(sorted(found.items()))


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    return statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    grid = GRIDS[options.grid]

    def place(point: Mapping[str, object], seed: int) -> Path:
        words = [f"{name.rpartition('.')[2]}-{value}" for name, value in point.items()]
        return options.folder / "-".join([*words, f"seed-{seed}"])

    options.folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        jobs = [
            pool.submit(run, place(point, seed), grid, point | {"seed": seed})
            for seed in SEEDS
            for point in grid.points()
        ]
        for job in concurrent.futures.as_completed(jobs):
            job.result()
    rows = []
    for point in grid.points():
        runs = [scores(place(point, seed)) for seed in SEEDS]
        course = {
            iteration: {name: interval([one[iteration][name] for one in runs]) for name in runs[0][iteration]}
            for iteration in runs[0]
        }
        rows.append({"settings": point, "course": course})
        means = {iteration: values["composite"] for iteration, values in course.items()}
        middle = "  ".join(f"{iteration}: {mean:.3f} +- {half:.3f}" for iteration, (mean, half) in means.items())
        print("  ".join(f"{name} {value}" for name, value in point.items()), middle, sep="   ")
    about = {"environment": environment(torch.device("cpu")), "config": CONFIG.read_text(), "seeds": SEEDS}
    shared = {"iterations": grid.iterations, "shared": grid.shared}
    write_json(about | shared | {"rows": rows}, options.folder / "search.json")


if __name__ == "__main__":
    main()
