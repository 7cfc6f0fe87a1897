"""Time whole iterations of a configuration: diffusers' forward and decode against ours, under the
same trainer.

`sage-fast bench iteration --config FILE`. On a GPU it also shows the peak of allocated memory per
phase, which includes both models if both paths run.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sage_fast.benchmarks.stock import STOCK, StockDecoder, StockPolicy
from sage_fast.benchmarks.timing import Save, save_nothing

from sage_fast.config.schema import Config
from sage_fast.loading import load_setup, resolve
from sage_fast.ops import implementation
from sage_fast.parallel.muon import Muon
from sage_fast.testbed.tiny_model import TestbedTransformer
from sage_fast.tools.harness import head_line
from sage_fast.trainer import Trainer
from sage_fast.util.console import progress, quiet
from sage_fast.util.environment import environment

log = logging.getLogger(__name__)

PATHS = (*STOCK, "eager")
"""Those of `STOCK` are diffusers' forward and decode, `eager` is ours."""


def run(
    config: Config,
    source: str,
    rounds: int,
    paths: Sequence[str] | None = None,
    save: Save = save_nothing,
) -> dict[str, Any]:
    """Time iterations through the stock forward and decode and through ours, interleaved.

    Args:
        config: validated settings.
        source: the configuration as given on the command line.
        rounds: timed iterations per path, after an untimed one.
        paths: a subset of PATHS, `stock` and `eager` by default; each holds a model. A single path
            is not checked.
        save: called with the result after every round.
    """
    trainers = {name: _trainer(config, name) for name in paths or ("stock", "eager")}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
    result: dict[str, Any] = {}
    rounds_and_names = [(index, name) for index in range(rounds + 1) for name in trainers]
    for index, name in progress(rounds_and_names, "iterations", len(rounds_and_names), "iteration"):
        with quiet():
            rows[name].append(trainers[name].iteration(index))
        if name != list(trainers)[-1]:
            continue
        if index == 0:
            first = {name: row[0]["reward/mean"] for name, row in rows.items()}
            assert math.isclose(min(first.values()), max(first.values()), rel_tol=1e-3), (
                f"the first rollouts differ: {first}"
            )
        else:
            result = {"source": source, **_result(config, trainers[name].device, rows)}
            save(result)
    return result


def _trainer(config: Config, name: str) -> Trainer:
    log.info(f"loading the model for {name}")
    setup = load_setup(resolve(config))
    for note in setup.model.notes:
        log.info(f"note: {note}")
    if name in STOCK:
        policy = setup.model.policy
        transformer = policy.networks["transformer"]
        options = {"dtype": policy.dtype, "guidance_scale": policy.guidance_scale}
        setup.model.policy = StockPolicy(transformer, **STOCK[name], **options)
        batches = isinstance(transformer, TestbedTransformer)
        setup.model.decoder = StockDecoder(setup.model.decoder.vae, batches)
    with quiet():
        setup.encode()
    graphs = None if name in STOCK else setup.graphs  # the stock forward synchronises with the host
    trainer = Trainer(
        setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings, graphs=graphs
    )
    if name in STOCK:
        engine: Any = trainer.engine
        engine.optimizers = [_stock_optimizer(optimizer) for optimizer in engine.optimizers]
    return trainer


def _stock_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return PyTorch's Muon in place of ours, with the same updates, and any other optimizer as it
    is."""
    if not isinstance(optimizer, Muon):
        return optimizer
    (group,) = optimizer.param_groups
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    return torch.optim.Muon(group["params"], adjust_lr_fn="match_rms_adamw", **settings)


def _result(
    config: Config, device: torch.device, rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the medians by phase, without the first round."""

    def medians(prefix: str) -> dict[str, dict[str, Any]]:
        keys = [key for key in next(iter(rows.values()))[0] if key.startswith(prefix)]
        return {
            key.removeprefix(prefix): {
                name: statistics.median(row[key] for row in history[1:])
                for name, history in rows.items()
            }
            for key in keys
        }

    return {
        "environment": environment(device, implementation(device)) | {"dtype": config.model.dtype},
        "rounds": len(next(iter(rows.values()))) - 1,
        "phases": medians("time/"),
        "peak_bytes": medians("memory/"),
    }


def format_iterations(result: Mapping[str, Any]) -> str:
    """Format the table for a terminal."""
    names = list(result["phases"]["total"])
    head = "".join(f"{'ours' if name == 'eager' else name:>22}" for name in names)
    lines = [
        head_line(result["environment"]),
        result.get("source", ""),
        "",
        f"{'phase':<12}{head}{'ratio':>8}",
    ]
    for phase, row in result["phases"].items():
        times = "".join(f"{1e3 * row[name]:>19.1f} ms" for name in names)
        ratio = (
            f"{row[names[0]] / row['eager']:>7.2f}x"
            if "eager" in names[1:] and row["eager"] > 0
            else ""
        )
        lines.append(f"{phase:<12}{times}{ratio}".rstrip())
    for phase, peaks in result["peak_bytes"].items():
        sizes = "".join(f"{peaks[name] / 2**30:>18.2f} GiB" for name in names)
        lines.append(f"{phase + ', peak':<12}{sizes}".rstrip())
    lines += [
        "",
        f"medians of {result['rounds']} interleaved iterations; stock: diffusers' forward, with "
        "its masked",
    ]
    lines += ["attention, and decode, under the same trainer; ratio: the first path to ours"]
    return "\n".join(lines)
