"""Storage of rollouts for training: latents around each scored transition, log-probs, and velocities for the KL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sage_fast.algorithm.objective import stores_rollout_velocities, strategy_of, surrogate_of
from sage_fast.algorithm.schedule import Transition, configured_table, iteration_table, trained_steps
from sage_fast.config.schema import Config
from sage_fast.ops.philox import STREAM_FORWARD, philox_normal


class Trajectories:
    """The trained transitions of N rollouts, allocated once. Reverse process: x_t -> x_{t+1}, scored by the rollout.

    Args:
        count: N.
        shape: (C, T, H, W) of a sample's latents.
        steps: trained steps.
        length: steps of a rollout.
        device: device of the policy.
        velocities: dtype in which to keep the rollout policy's velocities; None keeps none.
        offload: keep states and velocities in pinned host memory.

    Attributes:
        states: step -> float32 `[N, C, T, H, W]` latents before that step, for the trained steps and their successors.
        log_probs: step -> float32 `[N]` on the device, under the rollout policy.
        scored: whether they are known.
        velocities: step -> `[N, C, T, H, W]` under the rollout policy, guidance included; empty if none are kept.
    """

    scored = True

    def __init__(
        self,
        count: int,
        shape: Sequence[int],
        steps: Sequence[int],
        length: int,
        device: torch.device,
        *,
        velocities: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        self.device = device
        self.count, self.shape = count, tuple(shape)
        self.steps = frozenset(steps)
        self.offload = offload
        self._after = self._successors(steps, length)
        self.states = {t: self.empty(torch.float32) for t in sorted({*steps, *self._after.values()})}
        self.log_probs = {t: torch.empty(count, device=device) for t in steps}
        self.velocities = {} if velocities is None else {t: self.empty(velocities) for t in steps}

    def _successors(self, steps: Sequence[int], length: int) -> dict[int, int]:
        """Return step -> index of the latents that its transition leads to."""
        return {t: t + 1 for t in steps}

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Allocate `[N, C, T, H, W]` on the device, or in pinned host memory if offloaded."""
        if not self.offload:
            return torch.empty(self.count, *self.shape, dtype=dtype, device=self.device)
        return torch.empty(self.count, *self.shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def record(self, rows: slice, step: int, x: Tensor, x_next: Tensor, log_prob: Tensor, velocity: Tensor) -> None:
        """Store a step of samples `rows`; no-op for a step that is not trained."""
        if step not in self.steps:
            return
        if step - 1 not in self.steps:
            self.states[step][rows].copy_(x, non_blocking=True)
        self.states[step + 1][rows].copy_(x_next, non_blocking=True)
        self.log_probs[step][rows].copy_(log_prob)
        if self.velocities:
            self.velocities[step][rows].copy_(velocity, non_blocking=True)

    def finish(self, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        """Store what training needs of the final latents of samples `rows`."""

    def log_prob_old(self, micro: Sequence[Transition], log_prob: Tensor) -> Tensor:
        """Return the log-probs `[B]` under the rollout policy; `log_prob` is under the policy in training."""
        if not self.scored:  # both policies are equal, or the loss needs the old one's log-prob up to a constant only
            return log_prob.detach()
        return torch.stack([self.log_probs[t][i] for i, t in micro])

    def next_states(self, transitions: Sequence[Transition]) -> Tensor:
        """Return the latents that M (sample, step) lead to, `[M, C, T, H, W]` on the device."""
        return self.gather(self.states, [(i, self._after[t]) for i, t in transitions])

    def gather(self, stored: dict[int, Tensor], transitions: Sequence[Transition]) -> Tensor:
        """Return the entries of `stored`, such as `states`, for M (sample, step), `[M, C, T, H, W]` on the device.

        Offloaded entries are copied one by one in stream order, so the host never reads what the device still writes.
        """
        return torch.stack([stored[t][i].to(self.device, non_blocking=True) for i, t in transitions])


class NoisedSamples(Trajectories):
    """Final samples with new noise of each trained step's level. Forward process: x_s -> x_0 (docs/math.md).

    `Replay.score_noised` sets `log_probs`, `scored` and `velocities` where the loss needs them.
    """

    scored = False

    def _successors(self, steps: Sequence[int], length: int) -> dict[int, int]:
        return dict.fromkeys(steps, length)

    def record(self, rows: slice, step: int, x: Tensor, x_next: Tensor, log_prob: Tensor, velocity: Tensor) -> None:
        """No-op: no step of the rollout is trained."""

    def finish(self, rows: slice, latents: Tensor, seeds: Tensor, sigmas: Tensor) -> None:
        """Store the final latents of samples `rows` and, for each trained step, (1-s) latents + s new noise."""
        for t in set(self._after.values()):  # one for all steps, none if nothing is trained
            self.states[t][rows].copy_(latents, non_blocking=True)
        for t in self._after:
            noise = philox_normal(seeds, on_device(t, self.device), self.shape, STREAM_FORWARD)
            self.states[t][rows].copy_(latents.lerp(noise, float(sigmas[t])), non_blocking=True)


def on_device(values: float | Sequence[float] | Tensor, device: torch.device) -> Tensor:
    """Copy numbers or a host tensor to the device through pinned memory, without synchronising the host."""
    host = torch.as_tensor(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def trajectory_bytes(config: Config, numel: int, samples: int) -> tuple[int, int]:
    """Return the bytes of stored states and of stored velocities: `samples` rollouts, `numel` elements per latent."""
    trained = len(trained_steps(iteration_table(configured_table(config), config, 0), config, 0))
    # With untrained steps in between, a trained transition stores up to two states of its own.
    shared = trained == config.sampling.steps or not surrogate_of(config.objective).scores_rollout
    states = trained + 1 if shared else min(2 * trained, config.sampling.steps + 1)
    velocities = int(strategy_of(config.kl).anchor is not None) + int(stores_rollout_velocities(config))
    width = config.model.element_bytes if config.sampling.guidance_scale == 1 else 4
    return 4 * numel * samples * states, width * numel * samples * trained * velocities
