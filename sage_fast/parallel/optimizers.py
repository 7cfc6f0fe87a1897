"""Optimizers for `train.optimizer`, and the learning-rate schedules."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from sage_fast.config.schema import Optimizer, Schedule, TrainConfig
from sage_fast.util.errors import UserError

Parameters = Mapping[str, Tensor]
"""Trained weights by name."""
IsMuon = Callable[[str, Tensor], bool]
"""Whether `muon` updates a weight by Muon; the model says so."""

BETAS = (0.9, 0.999)
SMALLEST_8BIT = 4096
"""Elements of a weight below which bitsandbytes keeps its state in float32."""


def _shared(config: TrainConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "weight_decay": config.weight_decay, "eps": config.eps}


def _adamw(parameters: Parameters, config: TrainConfig, is_muon: IsMuon) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters.values(), betas=BETAS, **_shared(config))]


def _muon(parameters: Parameters, config: TrainConfig, is_muon: IsMuon) -> list[torch.optim.Optimizer]:
    """Build Muon for the matrices of the blocks, and AdamW for the embedders, biases, norms and the last layer.

    A Muon update is an orthogonal matrix, scaled to AdamW's usual rms of 0.2 x learning rate (Moonlight,
    arXiv 2502.16982).
    """
    matrices = {name: p for name, p in parameters.items() if is_muon(name, p)}
    muon = torch.optim.Muon(
        matrices.values(),
        adjust_lr_fn="match_rms_adamw",
        **_shared(config),  # eps is added to the gradient's norm: torch's 1e-7 would shrink updates of small gradients
    )
    return [muon, *_adamw({name: p for name, p in parameters.items() if name not in matrices}, config, is_muon)]


def _adamw8bit(parameters: Parameters, config: TrainConfig, is_muon: IsMuon) -> list[torch.optim.Optimizer]:
    """Build AdamW8bit of bitsandbytes, as `--use_8bit_adam` of diffusers' training scripts does. Runs on a CPU too."""
    make = _bitsandbytes().optim.AdamW8bit
    return [make(parameters.values(), betas=BETAS, min_8bit_size=SMALLEST_8BIT, **_shared(config))]


def _bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "train.optimizer = 'adamw8bit' needs bitsandbytes, which is not installed: pip install "
            "'sage-fast[bitsandbytes]'; the nearest choice without it is adamw"
        )
    return importlib.import_module("bitsandbytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """An optimizer of `train.optimizer`.

    Attributes:
        make: returns torch optimizers that cover all weights, each weight once.
        state_bytes: (weight, whether Muon updates it) -> bytes of optimizer state per element.
    """

    make: Callable[[Parameters, TrainConfig, IsMuon], list[torch.optim.Optimizer]]
    state_bytes: Callable[[Tensor, bool], float]


OPTIMIZERS = {
    "adamw": Choice(make=_adamw, state_bytes=lambda p, is_muon: 8.0),
    "muon": Choice(make=_muon, state_bytes=lambda p, is_muon: 4.0 if is_muon else 8.0),
    # Two 8-bit moments, each with a float32 scale for every 256 elements.
    "adamw8bit": Choice(
        make=_adamw8bit, state_bytes=lambda p, is_muon: 2 + 8 / 256 if p.numel() >= SMALLEST_8BIT else 8.0
    ),
}
assert tuple(OPTIMIZERS) == get_args(Optimizer), (
    "an optimizer is named in config.Optimizer and has its row in OPTIMIZERS"
)


def check_optimizer(name: str) -> None:
    """Check that an optimizer's library is installed.

    Raises:
        UserError: it is not installed.
    """
    if name == "adamw8bit":
        _bitsandbytes()


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
}
"""Progress in [0, 1], from the end of the warm-up to the end of the run -> factor on the learning rate."""
assert tuple(SCHEDULES) == get_args(Schedule), (
    "a schedule is named in config.Schedule and has its function in SCHEDULES"
)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of update number `step`, counted from 0. A resume has no state to restore.

    The first update of a warm-up moves the weights; diffusers' schedules start at 0.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    total = config.iterations * config.optimizer_steps
    progress = min((step - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    return config.learning_rate * SCHEDULES[config.schedule](progress)
