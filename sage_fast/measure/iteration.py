"""Whole iterations of a configuration: diffusers' forward and decode against ours, under the same trainer.

`sage-fast bench iteration --config FILE`.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.config import Config
from sage_fast.console import progress, say
from sage_fast.environment import environment
from sage_fast.measure.harness import head_line
from sage_fast.measure.stock import StockDecoder, StockPolicy
from sage_fast.run.setup import load_setup
from sage_fast.testbed.model import TestbedTransformer
from sage_fast.trainer import Trainer


def run(config: Config, rounds: int) -> dict[str, Any]:
    """Whole iterations of one configuration through the stock forward and decode, and through ours, interleaved."""
    trainers = {}
    for name in ("stock", "eager"):
        say(f"loading the model for {name}")
        setup = load_setup(config)
        if name == "stock":
            policy = setup.model.policy
            setup.model.policy = StockPolicy(
                policy.transformer, dtype=policy.dtype, guidance_scale=policy.guidance_scale
            )
            batches = isinstance(policy.transformer, TestbedTransformer)
            setup.model.decoder = StockDecoder(setup.model.vae, batches)
        with tempfile.TemporaryDirectory() as folder:
            setup.encode(Path(folder), quiet=True)
        trainers[name] = Trainer(config, setup.model, setup.reward, setup.prompts, setup.embeddings, quiet=True)
    trainers["stock"].graphs = None  # its forward synchronises with the host
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
    rounds_and_names = [(index, name) for index in range(rounds + 1) for name in trainers]
    for index, name in progress(rounds_and_names, "iterations", len(rounds_and_names), "iteration"):
        rows[name].append(trainers[name].iteration(index))
    first = {name: row[0]["reward/mean"] for name, row in rows.items()}
    assert math.isclose(*first.values(), rel_tol=1e-3), f"the first rollouts differ: {first}"
    phases = [key for key in rows["eager"][0] if key.startswith("time/")]
    device = trainers["eager"].device
    return {
        "environment": environment(device) | {"dtype": config.model.dtype},
        "phases": {
            phase.removeprefix("time/"): {
                name: statistics.median(row[phase] for row in of[1:]) for name, of in rows.items()
            }
            for phase in phases
        },
    }


def format_iterations(result: Mapping[str, Any]) -> str:
    """The table for a terminal."""
    lines = [head_line(result["environment"]), "", f"{'phase':<12}{'stock':>11}{'ours':>11}{'ratio':>8}"]
    for phase, row in result["phases"].items():
        ratio = row["stock"] / row["eager"] if row["eager"] > 0 else math.nan
        lines.append(f"{phase:<12}{1e3 * row['stock']:>8.1f} ms{1e3 * row['eager']:>8.1f} ms{ratio:>7.2f}x")
    lines += ["", "medians of interleaved iterations; stock: diffusers' forward and decode under the same trainer"]
    return "\n".join(lines)
