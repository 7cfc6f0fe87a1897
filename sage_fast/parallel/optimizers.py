"""Optimizers for `train.optimizer`, and the learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.engines import OPTIMIZERS
from sage_fast.config.schema import TrainConfig
from sage_fast.parallel.muon import Muon, Partition, PartitionedMuon

BETAS = (0.9, 0.999)
EPS_OF_ADAPTER = 1e-15
EPS_OF_NETWORK = 1e-10
"""`train.eps` where it is not set."""


def epsilon(config: TrainConfig, trains_adapter: bool) -> float:
    """Return `train.eps`, or its default for what is trained."""
    # For Muon, eps bounds the gradient's norm: torch's 1e-7 would shrink updates of small ones.
    usual = EPS_OF_ADAPTER if trains_adapter else EPS_OF_NETWORK
    return config.eps or usual


def make_optimizers(
    parameters: Mapping[str, Tensor],
    config: TrainConfig,
    matrices: Collection[str],
    partitions: Mapping[str, Partition],
    trains_adapter: bool,
) -> list[torch.optim.Optimizer]:
    """Build the torch optimizers that `train.optimizer` names; together they cover all weights,
    each weight once.

    They are AdamW or, for `muon`, Muon for the matrices of the blocks, and AdamW for the embedders,
    biases, norms and the last layer. The factors of an adapter are matrices of the blocks too. A
    Muon update is an orthogonal matrix, scaled to AdamW's usual rms of 0.2 x learning rate
    (Moonlight, arXiv 2502.16982).

    Args:
        parameters: trained weights by name, or this rank's parts of them.
        matrices: names of the weights that Muon may update; the model says which.
        partitions: how the weights lie over the ranks, if `parameters` are this rank's parts of
            them; else empty.
        trains_adapter: whether the weights are those of an adapter.
    """
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "eps": epsilon(config, trains_adapter),
    }
    by_muon: dict[str, Tensor] = {}
    if OPTIMIZERS[config.optimizer]:
        by_muon = {name: p for name, p in parameters.items() if name in matrices}
    rest = [p for name, p in parameters.items() if name not in by_muon]

    made: list[torch.optim.Optimizer] = []
    if by_muon and partitions:
        of_parts = [partitions[name] for name in by_muon]
        made.append(PartitionedMuon(list(by_muon.values()), of_parts, **settings))
    elif by_muon:
        made.append(Muon(list(by_muon.values()), **settings))
    if rest:
        made.append(torch.optim.AdamW(rest, betas=BETAS, **settings))
    return made


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
}
"""Progress in [0, 1], from the end of the warm-up to the end of the run -> factor on the learning
rate."""


def learning_rate(config: TrainConfig, steps: int, planned: int | None = None) -> float:
    """Return the learning rate of the next update. A resume has no state to restore.

    The warm-up counts optimizer steps, so an update that was skipped does not shorten it. The decay
    after it counts iterations: whatever was skipped, and whatever `train.optimizer_steps` was
    before a resume, it ends with the run.

    The first update of a warm-up moves the weights; diffusers' schedules start at 0.

    Args:
        steps: optimizer steps made so far.
        planned: place of the update in the run, as iteration x `train.optimizer_steps` + its number
            in the iteration; by default `steps`, as in a run that has skipped none.
    """
    warmup = config.warmup_steps
    if steps < warmup:
        return config.learning_rate * (steps + 1) / warmup

    # In whole updates, so that the quotient is rounded once: this is (i + u / n) / iterations
    # without a warm-up.
    place = steps if planned is None else planned
    total = config.iterations * config.optimizer_steps
    progress = (place - warmup) / max(total - warmup, 1)
    return config.learning_rate * SCHEDULES[config.schedule](min(max(progress, 0.0), 1.0))
