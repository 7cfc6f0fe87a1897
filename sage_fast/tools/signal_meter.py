"""Measure what an iteration's gradient says: its signal and noise at fixed weights, before a run is
paid for.

    <folder>/signal.json

K iterations run without an update. Their gradients g_k = s + n_k are those of the optimizer steps,
summed over an iteration, averaged over ranks and not clipped. Iterations draw their own prompts and
seeds, so products of two of them have the mean |s|^2 without the noise:

    signal |s|^2 = mean of g_k . g_l, k != l        noise E|n|^2 = mean of g_k . g_k - signal
    cosine of two configurations = mean of a_k . b_l, k != l / sqrt(signal of a x signal of b)

An optimizer does not move the weights along the gradient, so signal / noise is estimated in the
same way for what Muon and AdamW make of each g_k:

    AdamW     g / (sqrt(v) + eps), v = mean over the K iterations of g^2
    Muon      0.2 sqrt(max(m, n)) x the orthogonalised g of each m x n matrix of the blocks;
              for the rest 0.23 x AdamW's direction

v is what AdamW's second moment tends to at fixed weights. With the v of a single iteration, a
direction would be the sign of its gradient. Momentum, which averages over iterations, is not
modelled. But noise through AdamW's has an rms of sqrt((1 - beta) / (1 + beta)) = 0.23, to which
Muon's 0.2 is matched; without this factor the rest would drown the matrices.

Errors are those of a jackknife over iterations, with v as it is, up to 1.4 times too large where
the signal is within the noise of its estimate. Prompts do not repeat within an epoch, which takes a
little off the signal.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from sage_fast.models.trainable import meta_policy
from sage_fast.ops import implementation
from sage_fast.parallel.muon import BATCH_ELEMENTS, UPDATE_RMS, orthogonalized
from sage_fast.parallel.optimizers import BETAS, epsilon
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

RATIO = "signal / noise of an iteration"
ROWS = (
    "squared signal",
    "noise",
    RATIO,
    "signal / noise per PFLOP",
    "signal / noise per device second",
    "PFLOPs of an iteration",
    "device seconds of an iteration",
)
GRADIENT, MUON, ADAMW = "gradient", "Muon", "AdamW"
"""What Gram matrices are of: the gradients, or what an optimizer makes of them."""
MOMENTUM_RMS = math.sqrt((1 - BETAS[0]) / (1 + BETAS[0]))
"""Root mean square of AdamW's update over the learning rate where gradients are noise."""
CHUNK = 2**18
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


# -- what optimizers make of a gradient ------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedWeight:
    """A trained weight, whose gradient is a part of the collected one.

    Attributes:
        by_muon: whether `train.optimizer: muon` updates it by Muon.
    """

    name: str
    shape: torch.Size
    by_muon: bool


def trained_weights(policy: Policy) -> list[TrainedWeight]:
    """Return the trained weights in the order in which `Collector` has their gradients."""
    return [
        TrainedWeight(name=name, shape=p.shape, by_muon=policy.is_muon(name, p))
        for name, p in policy.parameters().items()
    ]


def adamw_directions(rows: Tensor, eps: float) -> Tensor:
    """Return AdamW's directions of K gradients, `[K, n]`: their mean square is its second
    moment."""
    return rows / (rows.square().mean(0).sqrt() + eps)


def muon_directions(
    rows: Sequence[Tensor], shape: torch.Size, eps: float, device: torch.device
) -> Tensor:
    """Return Muon's directions of K gradients of one matrix, before their factor `muon_factor`.

    Args:
        rows: K flat gradients, on the host.
        shape: shape of the matrix.
        eps: that of `orthogonalized`.
        device: where the matrices are orthogonalised.

    Returns:
        bfloat16 `[K, n]`, on the host.
    """
    size = max(1, BATCH_ELEMENTS // max(shape.numel(), 1))
    made = []
    for start in range(0, len(rows), size):
        matrices = torch.stack(list(rows[start : start + size])).view(-1, *shape)
        made.append(orthogonalized(matrices.to(device), eps).cpu().flatten(1))
    return torch.cat(made)


def muon_factor(shape: torch.Size) -> float:
    """Return the length of Muon's update of a matrix over learning rate and direction."""
    return UPDATE_RMS * math.sqrt(max(shape))


def gram_matrices(
    gradients: Sequence[Sequence[Tensor]],
    weights: Sequence[TrainedWeight],
    epsilons: Sequence[float],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the Gram matrices of C configurations' gradients and of what optimizers make of them.

    Directions are made of one weight at a time, so they need little memory beside the gradients.

    Args:
        gradients: the K gradients of each configuration.
        weights: whose parts they have.
        epsilons: `train.eps` of each configuration.
        device: where matrices are orthogonalised.

    Returns:
        `GRADIENT`, `ADAMW` and, if a weight is updated by it, `MUON` -> float64 `[C, K, C, K]`.
    """
    count = len(gradients[0])
    kinds = [GRADIENT, ADAMW]
    if any(weight.by_muon for weight in weights):
        kinds.append(MUON)
    size = len(gradients) * count
    grams = {kind: torch.zeros(size, size, dtype=torch.float64) for kind in kinds}

    sizes = [weight.shape.numel() for weight in weights]
    parts_of_gradients = [gradient.split(sizes) for of in gradients for gradient in of]
    for weight, parts in zip(weights, zip(*parts_of_gradients, strict=True), strict=True):
        for rows in _chunks(parts):
            directions = [adamw_directions(of, eps) for of, eps in zip(rows.split(count), epsilons)]
            by_adamw = _products(torch.cat(directions))
            grams[GRADIENT] += _products(rows)
            grams[ADAMW] += by_adamw
            if MUON in grams and not weight.by_muon:
                grams[MUON] += MOMENTUM_RMS**2 * by_adamw
        if weight.by_muon:
            by_muon = torch.cat(
                [
                    muon_directions(
                        parts[number * count : (number + 1) * count], weight.shape, eps, device
                    )
                    for number, eps in enumerate(epsilons)
                ]
            )
            for rows in _chunks(by_muon):
                grams[MUON] += muon_factor(weight.shape) ** 2 * _products(rows)
    return {
        kind: gram.view(len(gradients), count, len(gradients), count)
        for kind, gram in grams.items()
    }


def _chunks(rows: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield equally long rows side by side, a `CHUNK` of each at a time, float64 `[N, n]`."""
    for parts in zip(*(row.split(CHUNK) for row in rows)):
        yield torch.stack(parts).double()


def _products(rows: Tensor) -> Tensor:
    return rows @ rows.T


# -- the estimates ---------------------------------------------------------------------------------


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
    layouts: list[list[TrainedWeight]] = []
    for config in (resolved.config for resolved in measured):
        sharded = (
            "gradients are taken where every rank has all of them; the nearest choice is "
            f"{next(iter(ENGINES))!r}"
        )
        config.train.require(not ENGINES[config.train.engine].shards, "engine", sharded)
        spec = find_spec(config.model.path, fetch=True)
        expected = plan(config, spec, ranks=world_size())
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
        layouts.append(trained_weights(meta_policy(spec, config.model)))
    if len(trained) > 1:
        raise UserError(
            "--against: gradients are compared at the same weights; model.path, model.weights, the "
            "number of trained "
            "weights and the seed have to agree: " + " and ".join(sorted(trained)) + "; a YAML "
            "file without model.weights is measured at those of CONFIG"
        )
    _check_same_layout(layouts)

    matrices = [weight.shape.numel() for weight in layouts[0] if weight.by_muon]
    beside = 2.0 * count * len(measured) * max(matrices, default=0)  # bfloat16
    what = f"{counted(count, 'iteration')} without an update"
    if len(measured) > 1:
        what += " of each configuration"
    price = (
        f"about {hours:.2g} GPU-hours at the rates measured on an H200, {format_bytes(size)} of "
        f"gradients on the host, and {format_bytes(beside)} for what Muon makes of a matrix"
    )
    log.info(wrapped(f"{what}: {price}"))


def _check_same_layout(layouts: Sequence[Sequence[TrainedWeight]]) -> None:
    """Check that a part of one configuration's gradient belongs to the same weight in the other's.

    Raises:
        UserError: it does not.
    """
    first, *others = layouts
    for other in others:
        for ours, theirs in zip(first, other):
            if ours != theirs:
                raise UserError(
                    "--against: gradients are compared weight by weight, and these differ: "
                    f"{ours.name} {list(ours.shape)} and {theirs.name} {list(theirs.shape)}; "
                    "model.tuning and model.lora_targets have to agree"
                )


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
    gradients: list[list[Tensor]] = []
    epsilons: list[float] = []
    costs: list[Tensor] = []
    for resolved in measured.values():
        trainer = load_trainer(resolved, folder)
        found, cost = collect(trainer, count, warmup)
        gradients.append(found)
        costs.append(cost)
        epsilons.append(epsilon(resolved.config.train, trainer.policy.trains_adapter))
        weights = trained_weights(trainer.policy)
        device, dtype = trainer.device, trainer.policy.dtype
        del trainer  # before the next model is loaded
    if rank() != 0:
        return {}

    grams = gram_matrices(gradients, weights, epsilons, device)
    estimates = {kind: _cells(gram, torch.stack(costs, 1)) for kind, gram in grams.items()}
    of_gradient = estimates[GRADIENT]
    result = {
        "environment": environment(device, implementation(device))
        | {"dtype": str(dtype).removeprefix("torch.")},
        "ranks": world_size(),
        "settings": dict(settings),
        "weights": next(iter(measured.values())).config.model.weights,
        "iterations": count,
        "warmup": warmup,
        "signal": {
            label: _table(estimates, number, len(measured)) for number, label in enumerate(measured)
        },
        "cosine": of_gradient[-1] if len(measured) > 1 else None,
        "gram": {kind: gram.tolist() for kind, gram in grams.items()},
    }
    write_json(result, folder / "signal.json")
    return result


def _cells(gram: Tensor, costs: Tensor) -> list[dict[str, Any]]:
    """Return each number of `estimate` with its error."""
    values, errors = ([json_value(x) for x in found.tolist()] for found in estimate(gram, costs))
    return [{"value": value, "error": error} for value, error in zip(values, errors)]


def _table(
    estimates: Mapping[str, Sequence[dict[str, Any]]], number: int, configurations: int
) -> dict[str, dict[str, Any]]:
    """Return row -> cell of one configuration, its optimizers' ratios below that of its gradient.

    Args:
        estimates: kind of Gram matrix -> `_cells`.
        number: index of the configuration.
        configurations: how many were measured.
    """
    table = {}
    for index, row in enumerate(ROWS):
        place = index * configurations + number
        table[row] = estimates[GRADIENT][place]
        if row == RATIO:
            for kind in (MUON, ADAMW):
                if kind in estimates:
                    table[f"signal / noise by {kind}"] = estimates[kind][place]
    return table


def format_signal(result: Mapping[str, Any]) -> str:
    """Format the table for a terminal."""

    def cell(found: Mapping[str, float | None]) -> str:
        value, error = found["value"], found["error"]
        shown = "undefined" if value is None else f"{value:.3g}"
        margin = "undefined" if error is None else f"{error:.2g}"
        return f"{shown} ± {margin}"

    columns = result["signal"]
    weights = result["weights"] or "the weights a run begins with"
    lines = [
        head_line(result["environment"]),
        f"{counted(result['iterations'], 'iteration')} without an update, at {weights}",
        "",
    ]
    width = max(26, *(2 + len(label) for label in columns))  # two spaces between long labels
    lines.append(f"{'':<33}" + "".join(f"{label:>{width}}" for label in columns))
    for row in next(iter(columns.values())):
        lines.append(f"{row:<33}" + "".join(f"{cell(of[row]):>{width}}" for of in columns.values()))
    if result["cosine"] is not None:
        lines.append(f"{'cosine of the two gradients':<33}{cell(result['cosine']):>{width}}")
    return "\n".join([*lines, "± is one standard error; the seconds are without the optimizer's"])
