"""Measure what an iteration's gradient says: its signal and noise at fixed weights, before a run is
paid for.

    <folder>/signal.json

K iterations run without an update. Their gradients g_k = s + n_k are those of the optimizer steps,
summed over an iteration, averaged over ranks and not clipped. Iterations draw their own prompts and
seeds, so products of two of them have the mean |s|^2 without the noise:

    signal |s|^2 = mean of g_k . g_l, k != l        noise E|n|^2 = mean of g_k . g_k - signal
    cosine of two configurations = mean of a_k . b_l, k != l / sqrt(signal of a x signal of b)

Errors are those of a jackknife over iterations, up to 1.4 times too large where the signal is
within the noise of its estimate. Prompts do not repeat within an epoch, which takes a little off
the signal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.kl_weight import KLController
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import TrainConfig
from sage_fast.loading import load_setup
from sage_fast.models.find import find_spec
from sage_fast.models.policy import Policy
from sage_fast.ops import implementation
from sage_fast.parallel.plain import PlainEngine
from sage_fast.tools.harness import head_line
from sage_fast.tools.phases import flops_of_phases
from sage_fast.tools.plan import plan, seconds_on_a_gpu
from sage_fast.trainer import Trainer
from sage_fast.util.console import progress, quiet, wrapped
from sage_fast.util.environment import environment, format_bytes
from sage_fast.util.errors import NonFiniteError, UserError
from sage_fast.util.files import json_value, write_json
from sage_fast.util.ranks import rank, world_size
from sage_fast.util.text import counted

log = logging.getLogger(__name__)

ROWS = (
    "squared signal",
    "noise",
    "signal / noise of an iteration",
    "signal / noise per PFLOP",
    "signal / noise per device second",
    "PFLOPs of an iteration",
    "device seconds of an iteration",
)
CHUNK = 2**20
"""Elements of a gradient that are in float64 at a time."""


class Collector(PlainEngine):
    """An engine that adds up gradients in host memory and never updates.

    Attributes:
        gradient: float32, of all trained weights one after the other; None on ranks other than 0.
    """

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        super().__init__(policy, config)
        self.clear()

    def clear(self) -> None:
        self.gradient = (
            torch.zeros(sum(p.numel() for p in self.parameters)) if rank() == 0 else None
        )

    def step(self) -> float:
        self._reduce_gradients()
        norm = float(self._gradient_norm())
        if not math.isfinite(norm):
            raise NonFiniteError(f"gradient norm is {norm}")
        if self.gradient is not None:
            for p, total in zip(
                self.parameters, self.gradient.split([p.numel() for p in self.parameters])
            ):
                if p.grad is not None:
                    total += p.grad.flatten().float().cpu()
        for p in self.parameters:
            p.grad = None
        return norm


class FixedWeight(KLController):
    """lambda_KL as it is at the start of a run."""

    def update(self, observed: float) -> None:
        pass


def collect(trainer: Trainer, count: int, warmup: int) -> tuple[list[Tensor], Tensor]:
    """Run iterations 0 to `count` - 1 without an update; the warm-up repeats the first.

    Returns:
        Each iteration's gradient, on rank 0, and `[2, count]`: PFLOPs and device seconds, all ranks
        together.
    """
    config = trainer.config
    engine = trainer.engine = Collector(trainer.policy, config.train)
    trainer.kl = FixedWeight(config.kl)
    trainer.anchor_is_current = False  # as after an update, so that its forwards are paid for
    gradients, costs = dict[int, Tensor | None](), dict[int, list[float]]()
    planned = [0 for _ in range(warmup)] + list(range(count))
    for index in progress(planned, "signal", len(planned), "iteration"):
        engine.clear()
        with quiet():
            row: dict[str, Any] = trainer.iteration(index)
        done, _ = flops_of_phases(trainer, config.train.samples)
        gradients[index] = engine.gradient
        costs[index] = [
            world_size() * cost for cost in (sum(done.values()) / 1e15, row["time/total"])
        ]
    whole = [gradient for gradient in gradients.values() if gradient is not None]
    return whole, torch.tensor(list(costs.values()), dtype=torch.float64).T


def load_trainer(resolved: ResolvedConfig, folder: Path) -> Trainer:
    """Load the model, and the prompts' embeddings into `folder`; return a trainer that belongs to
    no run."""
    log.info("loading the model")
    setup = load_setup(resolved)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        setup.encode(folder / "embeddings")
    return Trainer(
        setup.resolved,
        setup.model,
        setup.reward,
        setup.prompts,
        setup.embeddings,
        graphs=setup.graphs,
    )


def products(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Gram matrix, accumulated in float64."""
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for parts in zip(*(gradient.split(CHUNK) for gradient in gradients)):
        rows = torch.stack(parts).double()
        total += rows @ rows.T
    return total


def estimate(gram: Tensor, costs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `ROWS` of each of C configurations, flattened, and with two their cosine; then the
    standard errors.

    Args:
        gram: products of gradients, float64 `[C, K, C, K]`.
        costs: PFLOPs and device seconds, `[2, C, K]`.
    """
    count = gram.shape[1]
    others = [[k for k in range(count) if k != left] for left in range(count)]
    parts = torch.stack(
        [_statistics(gram[:, kept][..., kept], costs[..., kept]) for kept in others]
    )
    squares = (parts - parts.mean(0)).square().sum(0)
    errors = ((count - 1) / count * squares).sqrt()
    return _statistics(gram, costs), errors


def _statistics(gram: Tensor, costs: Tensor) -> Tensor:
    """Return the values of `estimate`; the cosine is NaN unless both signals are positive."""
    by_pair = gram.movedim(2, 1)
    same = torch.eye(gram.shape[1], dtype=torch.bool)
    between = by_pair[..., ~same].mean(-1)
    signal = between.diagonal()
    noise = by_pair[..., same].mean(-1).diagonal() - signal
    ratio, (pflops, seconds) = signal / noise, costs.mean(-1)
    rows = torch.stack([signal, noise, ratio, ratio / pflops, ratio / seconds, pflops, seconds])
    if len(gram) == 1:
        return rows.flatten()
    cosine = between[:1, 1] / signal.where(signal > 0, torch.nan).prod().sqrt()
    return torch.cat([rows.flatten(), cosine])


def check(measured: Sequence[ResolvedConfig], count: int) -> None:
    """Check that gradients can be collected and compared, and log the price.

    Raises:
        UserError: an engine shards gradients, or the configurations differ in what they train.
    """
    hours, size, trained = 0.0, 0.0, set()
    for config in (resolved.config for resolved in measured):
        sharded = (
            "gradients are taken where every rank has all of them; the nearest choice is "
            f"{next(iter(ENGINES))!r}"
        )
        config.train.require(not ENGINES[config.train.engine].shards, "engine", sharded)
        expected = plan(config, find_spec(config.model.path, fetch=True), ranks=world_size())
        longest = {
            part: work * expected.busiest[part]
            for part, work in expected.flops.items()
            if part != "forward"
        }
        hours += count * world_size() * seconds_on_a_gpu(longest)[1] / 3600
        size += 4.0 * count * expected.trainable
        trained.add(
            f"{config.model.path}, {config.model.weights}, {expected.trainable:,}, {config.seed}"
        )
    if len(trained) > 1:
        raise UserError(
            "--against: gradients are compared at the same weights; model.path, model.weights, the "
            "number of trained "
            "weights and the seed have to agree: " + " and ".join(sorted(trained))
        )
    what = f"{counted(count, 'iteration')} without an update"
    if len(measured) > 1:
        what += " of each configuration"
    price = (
        f"about {hours:.2g} GPU-hours at the rates measured on an H200, {format_bytes(size)} of "
        "gradients on the host"
    )
    log.info(wrapped(f"{what}: {price}"))


def measure_signal(
    measured: Mapping[str, ResolvedConfig],
    settings: Mapping[str, str],
    *,
    folder: Path,
    count: int,
    warmup: int,
) -> dict[str, Any]:
    """Measure one configuration, or two with their cosine. The ranks have joined.

    Args:
        measured: label -> settings.
        settings: the settings given with both.
        folder: folder for signal.json and the prompt embeddings.
        count: iterations, at least 3.
        warmup: iterations before them.

    Returns:
        The content of signal.json, on rank 0.

    Raises:
        UserError: as `check`, or the folder already holds a signal.
    """
    if (folder / "signal.json").exists():
        raise UserError(
            f"{str(folder)!r} already holds a signal; choose another folder with --folder"
        )
    check(list(measured.values()), count)
    gradients, costs = [], []
    for resolved in measured.values():
        trainer = load_trainer(resolved, folder)
        found, cost = collect(trainer, count, warmup)
        gradients += found
        costs.append(cost)
        device, dtype = trainer.device, trainer.policy.dtype
        del trainer  # before the next model is loaded
    if rank() != 0:
        return {}
    gram = products(gradients).view(len(measured), count, len(measured), count)
    values, errors = (
        [json_value(x) for x in found.tolist()] for found in estimate(gram, torch.stack(costs, 1))
    )
    cells = [{"value": value, "error": error} for value, error in zip(values, errors)]
    result = {
        "environment": environment(device, implementation(device))
        | {"dtype": str(dtype).removeprefix("torch.")},
        "ranks": world_size(),
        "settings": dict(settings),
        "iterations": count,
        "warmup": warmup,
        "signal": {
            label: dict(zip(ROWS, cells[place : len(ROWS) * len(measured) : len(measured)]))
            for place, label in enumerate(measured)
        },
        "cosine": cells[-1] if len(measured) > 1 else None,
        "gram": gram.tolist(),
    }
    write_json(result, folder / "signal.json")
    return result


def format_signal(result: Mapping[str, Any]) -> str:
    """Format the table for a terminal."""

    def cell(found: Mapping[str, float | None]) -> str:
        value, error = found["value"], found["error"]
        shown = "undefined" if value is None else f"{value:.3g}"
        margin = "undefined" if error is None else f"{error:.2g}"
        return f"{shown} ± {margin}"

    columns = result["signal"]
    lines = [
        head_line(result["environment"]),
        f"{counted(result['iterations'], 'iteration')} without an update",
        "",
    ]
    lines.append(f"{'':<33}" + "".join(f"{label:>26}" for label in columns))
    lines += [
        f"{row:<33}" + "".join(f"{cell(of[row]):>26}" for of in columns.values()) for row in ROWS
    ]
    if result["cosine"] is not None:
        lines.append(f"{'cosine of the two gradients':<33}{cell(result['cosine']):>26}")
    return "\n".join([*lines, "± is one standard error; the seconds are without the optimizer's"])
