"""Measure how much each `objective.ratio` is clipped, in bfloat16 and float32: `python -m
studies.ratio FILE`.

Runs configs/recipes/paper.yaml in the world of shapes with the published clip range, eta and
learning rate: 1e-4, 0.5, 1e-5. Each iteration makes two updates on the same rollouts; only the
second can be clipped.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch

from sage_fast.config.loader import load
from sage_fast.config.schema import Config, DType, Ratio
from sage_fast.loading import load_setup, resolve
from sage_fast.ops import implementation
from sage_fast.trainer import Trainer
from sage_fast.util.environment import environment
from sage_fast.util.errors import ParityError
from sage_fast.util.files import write_json
from studies.shapes.world import WORLD_SETTINGS

ITERATIONS, SEEDS = 6, (0, 1)
SETTINGS = {
    "objective.clip_range": "1e-4",
    "sampling.eta": "0.5",
    "sampling.steps": "10",
    "train.learning_rate": "1e-5",
    "train.optimizer_steps": "2",
}
MEANS = ("ratio/clip_fraction", "ratio/mean", "kl/anchor", "kl/gradient_share")


def trainer(config: Config) -> Trainer:
    setup = load_setup(resolve(config))
    with tempfile.TemporaryDirectory() as folder:
        setup.encode(Path(folder))
    return Trainer(
        setup.resolved,
        setup.model,
        setup.reward,
        setup.prompts,
        setup.embeddings,
        graphs=setup.graphs,
    )


def gate(config: Config) -> dict[str, Any]:
    """Return what the parity check at the start of a run finds."""
    try:
        return {"rounding": trainer(config).iteration(0)["log_prob/rounding"], "stops": False}
    except ParityError as error:
        return {"rounding": None, "stops": True, "message": str(error)}


def measure(dtype: str, ratio: str, seed: int) -> dict[str, Any]:
    """Return the means over the iterations, and each iteration's clip fraction."""
    overrides = SETTINGS | {"model.dtype": dtype, "objective.ratio": ratio, "seed": str(seed)}
    recipe = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"
    config = load(recipe, overrides, [WORLD_SETTINGS])
    found = gate(config)
    run = trainer(
        dataclasses.replace(config, train=dataclasses.replace(config.train, parity_gate=False))
    )
    rows: list[dict[str, Any]] = [run.iteration(index) for index in range(ITERATIONS)]
    return {
        "dtype": dtype, "ratio": ratio, "seed": seed, **found,
        "clip_fractions": [row["ratio/clip_fraction"] for row in rows],
        **{name: sum(row[name] for row in rows) / len(rows) for name in MEANS},
    }  # fmt: skip


def main(file: Path) -> None:
    about = {
        "environment": environment(torch.device("cpu"), implementation(torch.device("cpu"))),
        "settings": SETTINGS,
        "iterations": ITERATIONS,
    }
    rows = []
    for dtype in get_args(DType):
        for ratio in get_args(Ratio):
            for seed in SEEDS:
                rows.append(row := measure(dtype, ratio, seed))
                start = "stops" if row["stops"] else f"{row['rounding']:.1e}"
                print(
                    f"{dtype:<9} {ratio:<11} seed {seed}  rounding {start}  clipped "
                    f"{row['ratio/clip_fraction']:.4f}  KL {row['kl/anchor']:.1e}  share of the "
                    f"KL {row['kl/gradient_share']:.1e}",
                    flush=True,
                )
    write_json(about | {"rows": rows}, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
