"""The interface of an engine, as the trainer and a run use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from sage_fast.config.schema import TrainConfig
from sage_fast.models.policy import Policy, State

OptimizerState = Mapping[str, Mapping[str, Any]]
"""Weight -> name of a moment -> tensor."""


class Engine(Protocol):
    """The optimizer side of training: backward, reduction, step, averaged weights.
    run/checkpoint.py saves it.

    Every method is collective. An engine is built with (policy, settings of training,
    ema_warms_up).

    Attributes:
        config: settings of training.
        policy: its trainable parameters are optimised.
        parameters: the trainable parameters.
        optimized: weight -> what the optimizer updates: the weight, or this rank's part of it.
        steps: optimizer steps so far.
        learning_rate: of the next update, and after it of the latest one; the trainer sets it
            before each update.
        ema: averaged weights, in the form of `policy.snapshot`; None if `train.ema_decay` is 0.
    """

    config: TrainConfig
    policy: Policy
    parameters: Sequence[Tensor]
    optimized: Mapping[str, Tensor]
    steps: int
    learning_rate: float
    ema: State | None

    def backward(self, loss: Tensor, total: int) -> None:
        """Accumulate the gradients of one micro-batch, as its share of the mean over an update.

        Args:
            loss: sum over the micro-batch.
            total: transitions of the update over all ranks, each counted once.
        """

    def step(self) -> float:
        """Reduce, clip and apply the accumulated gradients; return their norm before clipping.

        Raises:
            NonFiniteError: the norm is not finite; the weights are unchanged.
        """

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Use the averaged weights within the block; a no-op without an EMA."""

    def remember(self) -> bool:
        """Copy the state to host memory for `rewind`; return False if it needs more than half of
        the free memory."""

    def rewind(self) -> None:
        """Restore the state saved by `remember`."""

    @property
    def optimizer_state(self) -> OptimizerState:
        """The optimizer's state for what it updates on this rank; nothing for a weight that has had
        no gradient."""

    def restore(self, weights: State, optimizer_state: OptimizerState, steps: int) -> None:
        """Go on from optimizer step `steps`, with weights as of `policy.snapshot`."""
