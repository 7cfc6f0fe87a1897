"""Memory of the rollouts that an iteration stores for training."""

from __future__ import annotations

import math

import torch

from sage_fast.algorithm.iteration_plan import share_of
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.models.model import Model
from sage_fast.models.spec import Spec
from sage_fast.util.environment import format_bytes, free_bytes
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import data_size


def stored_rollouts(
    resolved: ResolvedConfig, spec: Spec, groups: int
) -> tuple[int, dict[str, float]]:
    """Return the samples of an iteration on a rank of the first of `groups`, which has most; and
    part -> bytes."""
    samples = len(share_of(resolved.config.train.samples, groups, 0))
    return samples, trajectory_bytes(
        resolved, math.prod(spec.latent_shape(resolved.config.sampling)), samples
    )


def trajectory_bytes(resolved: ResolvedConfig, numel: int, samples: int) -> dict[str, float]:
    """Return part -> bytes of what `samples` rollouts store for training, with `numel` elements per
    latent."""
    config, objective, trained = resolved.config, resolved.objective, len(resolved.longest_window)
    # With untrained steps in between, a trained transition stores up to two states of its own.
    shared = config.train.timestep_fraction == 1 or not objective.surrogate.scores_rollout
    states = trained + 1 if shared else min(2 * trained, config.sampling.steps + 1)
    velocities = int(objective.strategy.anchor is not None) + int(objective.stores_velocities)
    width = config.model.element_bytes if config.sampling.guidance_scale == 1 else 4
    return {
        "trajectories (fp32 latents)": 4.0 * numel * samples * states,
        "stored velocities": float(width * numel * samples * trained * velocities),
    }


def check_trajectories(resolved: ResolvedConfig, model: Model) -> str:
    """Describe the size of an iteration's stored rollouts on this rank.

    Raises:
        UserError: they exceed the free memory.
    """
    samples, parts = stored_rollouts(resolved, model.spec, data_size())
    size = sum(parts.values())
    device = model.policy.device
    on_gpu = device.type == "cuda" and not resolved.config.sampling.offload_trajectories
    free, where = (
        (free_bytes(device), "GPU memory")
        if on_gpu
        else (free_bytes(torch.device("cpu")), "host memory")
    )
    if size > free:
        way = "set sampling.offload_trajectories = true, or " if on_gpu else ""
        raise UserError(
            f"the rollouts of an iteration take {format_bytes(size)} of {where}; "
            f"{format_bytes(free)} are free; {way}lower train.group_size, "
            "train.prompts_per_iteration or train.timestep_fraction"
        )
    return (
        f"stored rollouts: {samples} of {format_bytes(size / samples)}, {format_bytes(size)} of "
        f"{where}"
    )
