"""The engine of a single process, and of plain data parallel: every rank holds weights and optimizer whole."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sage_fast.config.schema import TrainConfig
from sage_fast.console import Say, say_nothing, say_wrapped
from sage_fast.distributed import all_reduce, barrier, data_size, rank, world_size
from sage_fast.environment import free_bytes
from sage_fast.errors import NonFiniteError, UserError
from sage_fast.files import saving
from sage_fast.models.policy import Policy, State
from sage_fast.optimizers import OPTIMIZERS, learning_rate
from sage_fast.updates import BFLOAT16_RESOLUTION, UpdateSize, watch_updates

WATCHED_ITERATIONS = 3
"""Iterations after the learning rate's warm-up in which updates too small for bfloat16 are warned of."""


class Engine:
    """The optimizer side of training: backward, reduction, step, averaged weights, and their part of a checkpoint.

    Every method is collective: all ranks call it. The trainer asks for nothing else.

    Args:
        policy: its trainable parameters are optimised.
        config: optimizer, learning rate, clipping, EMA.
        tell: told of updates that bfloat16 would swallow.

    Attributes:
        steps: optimizer steps so far.
        ema: averaged weights, as `policy.snapshot` gives them; None if `train.ema_decay` is 0.
    """

    def __init__(self, policy: Policy, config: TrainConfig, tell: Say = say_nothing) -> None:
        self.policy = policy
        self.config = config
        self.tell = tell
        self.parameters = list(policy.parameters().values())
        self.steps = 0
        self._updates = watch_updates(nn.ModuleDict(policy.networks), policy.whole)
        self._warned = False
        self._prepare()
        self.ema: State | None = policy.snapshot() if config.ema_decay > 0 else None
        self._remembered: dict[str, Any] | None = None
        self._remembered_bytes = 0

    def _prepare(self) -> None:
        make, policy = OPTIMIZERS[self.config.optimizer].make, self.policy
        self.optimizers = make(policy.parameters(), self.config, policy.is_muon)

    @property
    def learning_rate(self) -> float:
        """That of the last update; before the first, that of the first."""
        return learning_rate(self.config, max(self.steps - 1, 0))

    def backward(self, loss: Tensor, total: int) -> None:
        """Add the gradients of `loss / total`: the sum over a micro-batch, as its share of the mean over an update.

        `total` counts the transitions of all ranks, each once. Gradients are averaged over the ranks later, and those
        of the ranks that share a sample add up, so that the number of data-parallel ranks is the factor.
        """
        (data_size() / total * loss).backward()

    def step(self) -> tuple[float, UpdateSize]:
        """Reduce, clip and apply the accumulated gradients; returns their norm before clipping, and the update's size.

        Raises:
            NonFiniteError: the norm is not finite; the weights are left as they were.
        """
        self._updates.remember()
        norm = self._update(learning_rate(self.config, self.steps))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm} at optimizer step {self.steps}; the weights were not updated"
            )
        torch.autograd.graph.increment_version(self.parameters)  # some write where autograd does not look
        size = self._updates.size()
        self.steps += 1
        self._warn_of_small_updates(size)
        self._update_ema()
        return norm, size

    def _update(self, rate: float) -> float:
        """Change the weights if the gradient's norm, which is returned, is finite."""
        self._reduce_gradients()
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return norm

    def _warn_of_small_updates(self, size: UpdateSize) -> None:
        """Once, in the first iterations: what is stored in float32 is used rounded to bfloat16."""
        since = self.steps - self.config.warmup_steps
        early = 0 < since <= WATCHED_ITERATIONS * self.config.optimizer_steps
        if self._warned or not early or self.policy.dtype != torch.bfloat16:
            return
        change = float(size.of_rounded)
        if change < BFLOAT16_RESOLUTION:
            self._warned = True
            what = "adapter" if self.policy.has_adapter else "weights"
            say_wrapped(
                f"note: the relative change of the {what} in an update is {change:.1e}, and bfloat16 resolves "
                f"{BFLOAT16_RESOLUTION:.1e}: the forward sees it only once several updates have added up. Raise "
                f"train.learning_rate = {self.config.learning_rate:g}, or set model.dtype = float32",
                self.tell,
            )

    def _reduce_gradients(self) -> None:
        """Mean over the ranks; a weight without a gradient on every rank keeps none (and is not decayed)."""
        if world_size() == 1:
            return
        present = torch.tensor([p.grad is not None for p in self.parameters], device=self.policy.device).int()
        all_reduce(present, "max")
        for p, used in zip(self.parameters, present.tolist()):
            if used:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                all_reduce(p.grad).div_(world_size())

    @torch.no_grad()
    def _update_ema(self) -> None:
        if self.ema is not None:
            for name, part in self.policy.parts().items():
                self.ema[name].lerp_(part, 1 - self.config.ema_decay)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the policy its averaged weights for a block; without an average, leave it as it is."""
        with contextlib.nullcontext() if self.ema is None else self.policy.using(self.ema):
            yield

    def remember(self) -> bool:
        """Hold the present state in host memory, for `rewind`; False if it takes more than half of what is free."""
        state = {
            "steps": self.steps,
            "parameters": dict(self.policy.parameters()),
            "ema": self.ema,
            "optimizers": [optimizer.state_dict()["state"] for optimizer in self.optimizers],
        }
        sizes: list[int] = []
        recursively_apply(lambda tensor: sizes.append(tensor.nbytes), state)
        if sum(sizes) > self._remembered_bytes:  # at first, and once the optimizer has its state
            self._remembered = None
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            fits = 2 * ranks * sum(sizes) < free_bytes(torch.device("cpu"))
            if not int(all_reduce(torch.tensor(int(fits), device=self.policy.device), "min")):
                return False
            self._remembered_bytes = sum(sizes)
        self._remembered = recursively_apply(lambda tensor: tensor.detach().to("cpu", copy=True), state)
        return True

    def rewind(self) -> None:
        """Go back to the state that `remember` held."""
        state = self._remembered
        assert state is not None
        self.policy.load(state["parameters"])
        if self.ema is not None:
            self.ema = {name: tensor.to(self.policy.device) for name, tensor in state["ema"].items()}
        self._load_optimizer_states(state["optimizers"])
        self.steps = state["steps"]

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write weights, averaged weights and optimizer state into `folder`, which exists; the first rank writes.

        Every engine writes the same files, by the names of whole weights, so that any other can go on.
        """
        self.save_state(self.policy.parts(), folder / "trainable.safetensors")  # no copy on the device
        if self.ema is not None:
            self.save_state(self.ema, folder / "ema.safetensors")
        states = self._optimizer_states()
        if rank() == 0:
            with saving(folder):
                torch.save({"optimizer": self.config.optimizer, "states": states}, folder / "optimizer.pt")
        del states
        with self.averaged_weights():  # those that are evaluated and sampled
            self.save_weights(folder)

    def load(self, folder: Path, steps: int) -> None:
        """Restore what `save` wrote at optimizer step `steps`.

        Raises:
            UserError: `train.ema_decay` has been switched on since, or `train.optimizer` is another one.
        """
        ema = folder / "ema.safetensors"
        if self.ema is not None and not ema.is_file():
            raise UserError(
                f"train.ema_decay = {self.config.ema_decay}: the checkpoint holds no average to continue; resume "
                "with 0, or start another run with --model.weights"
            )
        # Mapped, ranks of a machine share the pages of what each keeps a part of.
        mapped, device = self._state_device.type == "cpu", self._state_device
        saved = torch.load(folder / "optimizer.pt", map_location=device, mmap=mapped, weights_only=True)
        if saved["optimizer"] != self.config.optimizer:
            raise UserError(
                f"train.optimizer = {self.config.optimizer!r}: the checkpoint is of {saved['optimizer']!r}; resume "
                "with that, or start another run with --model.weights"
            )
        self.policy.load(self.load_state(folder / "trainable.safetensors"))
        if self.ema is not None:
            self.ema = self.load_state(ema)
        self._load_optimizer_states(saved["states"])
        self.steps = steps

    @property
    def _state_device(self) -> torch.device:
        return self.policy.device

    def _optimizer_states(self) -> list[Mapping[int, Any]]:
        """Of each optimizer, by the number of the weight: what the first rank writes."""
        return [optimizer.state_dict()["state"] for optimizer in self.optimizers]

    def _load_optimizer_states(self, states: list[Mapping[int, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states):  # the settings are those of today
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    def save_state(self, state: State, file: Path) -> None:
        """Write a snapshot of the policy, as whole weights, from whatever layout its tensors have in memory."""
        whole = self.policy.states.gather(state, self.policy.parameters())
        if rank() == 0:
            with saving(file):
                save_file({name: tensor.contiguous() for name, tensor in whole.items()}, file)

    def load_state(self, file: Path) -> State:
        """What `save_state` wrote, as a snapshot of this policy.

        Raises:
            UserError: names or shapes are those of another model.
        """
        return self.policy.states.split(load_file(file, device=str(self._state_device)), self.policy.parameters())

    def save_weights(self, folder: Path) -> None:
        """Write the policy's present weights into `folder` in diffusers format; the first rank writes."""
        if rank() == 0:
            with saving(folder):
                self.policy.save_weights(folder)
        barrier()
