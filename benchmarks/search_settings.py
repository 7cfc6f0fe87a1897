"""`python -m benchmarks.search_settings FOLDER [--workers N]`: the demo's learning rate, KL and EMA, chosen by trial.

Every point of the grid gets the same number of iterations and the same seeds, through the command that a user runs.
Runs that stand in FOLDER already are kept, so that the search can go on another day. The table goes to
`FOLDER/search.json` and to the screen: held-out composite after `ITERATIONS` and its course, mean over the seeds with a
95 % interval (Student's t), and the judge that no run is trained on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sage_fast.environment import environment
from sage_fast.files import read_json, write_json

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
ITERATIONS = 150
SEEDS = (0, 1, 2)
LEARNING_RATES = (3e-4, 1e-3)
KLS: dict[str, dict[str, Any]] = {
    "none": {"kl.strategy": "none"},
    "0.2": {"kl.lambda_min": 0.2, "kl.lambda_max": 0.2},
    "1": {"kl.lambda_min": 1.0, "kl.lambda_max": 1.0},
}
"""By lambda; the rest of the KL as in the demo."""
EMAS = (0.0, 0.9)
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t by number of seeds."""


def run(folder: Path, overrides: Mapping[str, Any]) -> None:
    """One run of the command, unless it is finished; continued where an earlier one was stopped."""
    if (folder / "eval" / "after.json").is_file():
        return
    settings = {
        "output": folder,
        "train.iterations": ITERATIONS,
        "train.checkpoint_interval": ITERATIONS,
        "eval.interval": 30,
        "tracking.trackers": "[]",
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
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.mean(values), T_95.get(len(values), 1.96) * spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    points = {
        (rate, kl, ema, seed): options.folder / f"lr{rate:g}-kl-{kl}-ema{ema:g}-seed{seed}"
        for seed, rate, kl, ema in itertools.product(SEEDS, LEARNING_RATES, KLS, EMAS)
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        jobs = [
            pool.submit(run, folder, {"train.learning_rate": rate, "train.ema_decay": ema, "seed": seed, **KLS[kl]})
            for (rate, kl, ema, seed), folder in points.items()
        ]
        for job in concurrent.futures.as_completed(jobs):
            job.result()
    rows = []
    for rate, kl, ema in itertools.product(LEARNING_RATES, KLS, EMAS):
        runs = [scores(points[rate, kl, ema, seed]) for seed in SEEDS]
        course = {
            iteration: {name: interval([one[iteration][name] for one in runs]) for name in runs[0][iteration]}
            for iteration in runs[0]
        }
        rows.append({"learning_rate": rate, "kl": kl, "ema": ema, "course": course})
        mean, half = course[ITERATIONS]["composite"]
        middle = "  ".join(f"{iteration}: {value['composite'][0]:.3f}" for iteration, value in course.items())
        print(f"lr {rate:g}  kl {kl:4s}  ema {ema:g}  {mean:.3f} +- {half:.3f}   {middle}")
    about = {"environment": environment(torch.device("cpu")), "iterations": ITERATIONS, "seeds": SEEDS}
    write_json(about | {"rows": rows}, options.folder / "search.json")


if __name__ == "__main__":
    main()
