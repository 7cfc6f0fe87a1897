"""The interface of an engine, as the trainer and a run use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sage_fast.models.policy import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSize:
    """Relative sizes of an update, scalars on the device.

    Attributes:
        relative: |dW| / |W| over the sample; with an adapter W is the base weight and dW the change of s B A.
        of_rounded: relative change of the values that bfloat16 rounds: the weights themselves, or the adapter factor
            that contributes most of dW.
    """

    relative: Tensor
    of_rounded: Tensor


class Engine(Protocol):
    """The optimizer side of training: backward, reduction, step, averaged weights and checkpoints of all these.

    Every method is collective. An engine is built with (policy, settings of training, ema_warms_up).

    Attributes:
        parameters: the trainable parameters.
        steps: optimizer steps so far.
        ema: averaged weights, in the form of `policy.snapshot`; None if `train.ema_decay` is 0.
    """

    parameters: Sequence[Tensor]
    steps: int
    ema: State | None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the latest update; before the first update, that of the first."""

    def backward(self, loss: Tensor, total: int) -> None:
        """Accumulate the gradients of one micro-batch, as its share of the mean over an update.

        Args:
            loss: sum over the micro-batch.
            total: transitions of the update over all ranks, each counted once.
        """

    def step(self) -> tuple[float, UpdateSize]:
        """Reduce, clip and apply the accumulated gradients; return their norm before clipping and the update's size.

        Raises:
            NonFiniteError: the norm is not finite; the weights are unchanged.
        """

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Use the averaged weights within the block; a no-op without an EMA."""

    def remember(self) -> bool:
        """Copy the state to host memory for `rewind`; return False if it needs more than half of the free memory."""

    def rewind(self) -> None:
        """Restore the state saved by `remember`."""

    def save(self, folder: Path, anchor: State | None = None) -> list[Path]:
        """Write this rank's part of weights, averages, optimizer state and `anchor` into the existing `folder`.

        All engines write the same files (models/parts.py), and any number of ranks reads them: a run can resume with
        another engine.

        Returns:
            This rank's files.
        """

    def load(self, folder: Path, steps: int) -> State | None:
        """Restore what `save` wrote at optimizer step `steps`; return the anchor, if there is one.

        Raises:
            UserError: `train.ema_decay` has been switched on since, `train.optimizer` is another one, or the files do
                not hold these weights.
        """

    def save_weights(self, folder: Path) -> list[Path]:
        """Write the averaged or, without an EMA, the trained weights in diffusers format; return this rank's files."""
