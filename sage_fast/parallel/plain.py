"""The plain engine, for one process or data parallelism: every rank holds all weights and optimizer
state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.nn.utils import get_total_norm

from sage_fast.config.schema import TrainConfig
from sage_fast.models.policy import Policy, State
from sage_fast.parallel.ema import ema_decay, update_ema
from sage_fast.parallel.engine import Engine, OptimizerState
from sage_fast.parallel.gradients import average_gradients, clip_gradients, forget_zero_gradients
from sage_fast.parallel.optimizers import learning_rate, make_optimizers
from sage_fast.util.environment import free_bytes
from sage_fast.util.errors import NonFiniteError
from sage_fast.util.launchers import launched
from sage_fast.util.ranks import any_rank, data_size


class PlainEngine(Engine):
    """An engine without shards. The others override how updates are made and where the state is
    kept.

    Args:
        policy: its trainable parameters are optimised.
        config: optimizer, learning rate, clipping, EMA.
        ema_warms_up: whether the decay of the averaged weights rises with the updates
            (`ema_decay`).

    Attributes:
        optimized: weight -> what the optimizers update: the weight, or this rank's part of it.
    """

    def __init__(self, policy: Policy, config: TrainConfig, *, ema_warms_up: bool = True) -> None:
        self.policy = policy
        self.config = config
        self.ema_warms_up = ema_warms_up
        self.parameters = list(policy.parameters().values())
        self.steps = 0
        self.learning_rate = learning_rate(config, 0)
        self._prepare()
        self.ema: State | None = policy.snapshot() if config.ema_decay > 0 else None
        self._remembered: tuple[Any, ...] | None = None
        self._remembered_bytes = 0

    def _prepare(self) -> None:
        self.optimized: dict[str, Tensor] = {**self.policy.parameters()}
        matrices = {name for name, p in self.optimized.items() if self.policy.is_muon(name, p)}
        self.optimizers = make_optimizers(
            self.optimized, self.config, matrices, {}, self.policy.trains_adapter
        )

    def backward(self, loss: Tensor, total: int) -> None:
        """Accumulate the gradients of one micro-batch, as its share of the mean over an update.

        The loss is scaled by data-parallel ranks / total. Gradients are averaged over all ranks
        later, and the ranks of a sequence group each hold a part of their sample's gradient, so
        these parts add up.

        Args:
            loss: sum over the micro-batch.
            total: transitions of the update over all ranks, each counted once.
        """
        (data_size() / total * loss).backward()

    def step(self) -> float:
        norm = self._update(self.learning_rate)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm {norm} at optimizer step {self.steps}; the weights were not updated"
            )
        # some optimizers write unseen by autograd
        torch.autograd.graph.increment_version(self.parameters)
        self.steps += 1
        if self.ema is not None:
            decay = ema_decay(self.config, self.steps, warms_up=self.ema_warms_up)
            update_ema(self.ema, self.policy.parts(), decay)
        return norm

    def _update(self, rate: float) -> float:
        """Update the weights if the gradient norm is finite; return the norm."""
        self._reduce_gradients()
        parts = self.optimized.values()
        forget_zero_gradients(parts, self.policy.device)
        norm = clip_gradients(parts, self._gradient_norm(), self.config.max_grad_norm)
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return norm

    def _reduce_gradients(self) -> None:
        average_gradients(self.parameters, self.policy.device)

    def _gradient_norm(self) -> Tensor:
        return get_total_norm(
            [part.grad for part in self.optimized.values() if part.grad is not None]
        )

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.ema is None else self.policy.using(self.ema):
            yield

    @property
    def optimizer_state(self) -> OptimizerState:
        states = [optimizer.state for optimizer in self.optimizers]
        return {
            name: state[part]
            for state in states
            for name, part in self.optimized.items()
            if part in state
        }

    def restore(self, weights: State, optimizer_state: OptimizerState, steps: int) -> None:
        self.policy.load(weights)
        names = {part: name for name, part in self.optimized.items()}
        for optimizer in self.optimizers:  # param groups keep the current settings
            optimizer.state.clear()
            for part in (part for group in optimizer.param_groups for part in group["params"]):
                for key, value in optimizer_state.get(names[part], {}).items():
                    optimizer.state[part][key] = value if key == "step" else value.to(part.device)
        self.steps = steps

    def remember(self) -> bool:
        state = self.policy.parts(), self.optimizer_state, self.steps, self.ema
        sizes: list[int] = []  # bytes of each tensor
        recursively_apply(lambda tensor: sizes.append(tensor.nbytes), state)
        # At the first call, and once the optimizer has allocated its state: on any rank, since a
        # rank whose part of a weight is empty allocates nothing for it.
        if any_rank(sum(sizes) > self._remembered_bytes, self.policy.device):
            self._remembered = None
            ranks = launched("LOCAL_WORLD_SIZE", 1)
            fits = 2 * ranks * sum(sizes) < free_bytes(torch.device("cpu"))
            if any_rank(not fits, self.policy.device):
                return False
            self._remembered_bytes = sum(sizes)
        self._remembered = recursively_apply(
            lambda tensor: tensor.detach().to("cpu", copy=True), state
        )
        return True

    def rewind(self) -> None:
        assert self._remembered is not None
        *state, ema = self._remembered
        for name, tensor in (ema or {}).items():
            assert self.ema is not None
            self.ema[name].copy_(tensor)
        self.restore(*state)
