"""Storage of rollouts for training: latents around each scored transition, log-probs, and
velocities for the KL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import Transition
from sage_fast.ops.philox import STREAM_FORWARD, philox_normal


class Trajectories:
    """Trained transitions of rollouts, allocated once. Reverse process: x_t -> x_{t+1}, scored by
    the rollout.

    Args:
        shape: (C, T, H, W) of a sample's latents.
        trained: the transitions, ordered by step.
        length: steps of a rollout.
        device: device of the policy.
        velocities: dtype in which to keep the rollout policy's velocities; None keeps none.
        offload: keep states and velocities in pinned host memory.

    Attributes:
        trained: the transitions, as given.
        states: (sample, step) -> float32 `[C, T, H, W]`, latents before that step: of the trained
            transitions and of those that follow them.
        log_probs: transition -> float32 scalar on the device, under the rollout policy.
        scored: whether they are known.
        velocities: transition -> `[C, T, H, W]` under the rollout policy, guidance included; empty
            if none are kept.
    """

    scored = True

    def __init__(
        self,
        shape: Sequence[int],
        trained: Sequence[Transition],
        length: int,
        device: torch.device,
        *,
        velocities: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        self.device = device
        self.shape = tuple(shape)
        self.offload = offload
        self.trained = list(trained)
        self._after = self._successors(length)
        self.states = self.empty({*trained, *self._after.values()}, torch.float32)
        self.log_probs: dict[Transition, Tensor] = {}
        self.velocities = {} if velocities is None else self.empty(trained, velocities)

    def _successors(self, length: int) -> dict[Transition, Transition]:
        """Return transition -> (sample, step) of the latents that it leads to."""
        return {(i, t): (i, t + 1) for i, t in self.trained}

    def empty(
        self, transitions: Collection[Transition], dtype: torch.dtype
    ) -> dict[Transition, Tensor]:
        """Allocate transition -> `[C, T, H, W]` on the device, or in pinned host memory if
        offloaded."""
        device = torch.device("cpu") if self.offload else self.device
        pinned = self.offload and self.device.type == "cuda"
        return {
            key: torch.empty(self.shape, dtype=dtype, device=device, pin_memory=pinned)
            for key in transitions
        }

    @staticmethod
    def put(
        stored: dict[Transition, Tensor], transitions: Iterable[Transition], values: Tensor
    ) -> None:
        """Copy `values [M, C, T, H, W]` to the entries of `stored` for M (sample, step)."""
        for transition, value in zip(transitions, values, strict=True):
            stored[transition].copy_(value, non_blocking=True)

    def record(
        self,
        rows: slice,
        step: int,
        x: Tensor,
        x_next: Tensor,
        log_prob: Tensor,
        velocity: Callable[[], Tensor],
    ) -> None:
        """Store a step of samples `rows`, which train the same steps; no-op for a step that is not
        trained.

        `velocity` is called only if velocities are kept.
        """
        samples = range(rows.start, rows.stop)
        before = [(i, step - 1) for i in samples]
        now = [(i, step) for i in samples]
        after = [(i, step + 1) for i in samples]
        if now[0] not in self._after:
            return
        if before[0] not in self._after:
            self.put(self.states, now, x)
        self.put(self.states, after, x_next)
        self.log_probs |= zip(now, log_prob.clone())  # the next step may overwrite it
        if self.velocities:
            self.put(self.velocities, now, velocity())

    def finish(self, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        """No-op: training needs no final latents."""

    def log_prob_old(self, micro: Sequence[Transition], log_prob: Tensor) -> Tensor:
        """Return the log-probs `[B]` under the rollout policy; `log_prob` is under the policy in
        training."""
        # both policies are equal, or the loss needs the old one's log-prob up to a constant only
        if not self.scored:
            return log_prob.detach()
        return torch.stack([self.log_probs[transition] for transition in micro])

    def next_states(self, transitions: Sequence[Transition]) -> Tensor:
        """Return the latents that M (sample, step) are scored against, `[M, C, T, H, W]` on the
        device."""
        return self.gather(self.states, [self._after[key] for key in transitions])

    def gather(self, stored: dict[Transition, Tensor], transitions: Sequence[Transition]) -> Tensor:
        """Return the entries of `stored`, such as `states`, for M (sample, step), `[M, C, T, H, W]`
        on the device.

        Offloaded entries are copied one by one in stream order, so the host never reads what the
        device still writes.
        """
        return torch.stack(
            [stored[transition].to(self.device, non_blocking=True) for transition in transitions]
        )


class NoisedSamples(Trajectories):
    """Final samples with new noise of each trained step's level. Forward process: x_s -> x_0
    (forward-process.md).

    `Replay.score_noised` sets `log_probs`, `scored` and `velocities` where the loss needs them.
    """

    scored = False

    def _successors(self, length: int) -> dict[Transition, Transition]:
        return {(i, t): (i, length) for i, t in self.trained}

    def record(
        self,
        rows: slice,
        step: int,
        x: Tensor,
        x_next: Tensor,
        log_prob: Tensor,
        velocity: Callable[[], Tensor],
    ) -> None:
        """No-op: no step of the rollout is trained."""

    def finish(self, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        """Store the final latents of samples `rows` and, for each trained step, (1-s) latents + s
        new noise."""
        samples = range(rows.start, rows.stop)
        steps = [t for i, t in self.trained if i == rows.start]  # the same for all of `rows`
        for t in steps:
            noise = philox_normal(seeds, on_device(t, self.device), self.shape, STREAM_FORWARD)
            self.put(self.states, [(i, t) for i in samples], latents.lerp(noise, float(sigmas[t])))
        if steps:  # all lead to the same latents
            self.put(self.states, [self._after[i, steps[0]] for i in samples], latents)


def on_device(values: float | Sequence[float] | Tensor, device: torch.device) -> Tensor:
    """Copy numbers or a host tensor to the device through pinned memory, without synchronising the
    host."""
    host = torch.as_tensor(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
