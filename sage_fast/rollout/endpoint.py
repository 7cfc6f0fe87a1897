"""The endpoint direction: the noise of a step that a group enters from one latent, turned towards
its final sample.

Most of the noise n that leads from a shared latent to the samples of a group does not show in their
final samples x0. The endpoint direction leaves it out (docs/explanation/objective.md):

    e = |n| (x0 - mean of x0) / |x0 - mean of x0|
    x_next = mean + c n    becomes    mean + c |n| d / |d|,    d = (1 - w) n + w e

with the endpoint's share w (`IterationPlan.endpoint_share`). The log-prob under the rollout policy
stays what it was, since the length does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import IterationPlan
from sage_fast.ops.philox import philox_normal
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.trajectories import on_device
from sage_fast.util.ranks import data_sum


def turn_to_endpoints(batch: Batch, plan: IterationPlan) -> None:
    """Turn the stored transitions of `IterationPlan.endpoint_transitions` to the endpoints, which
    `Trajectories.finish` has stored.

    The means are over the group's samples on all ranks, which call this together.
    """
    stored = batch.trajectories
    sums = torch.zeros(len(plan.tables), *stored.shape, device=stored.device)
    for (i, _), endpoint in stored.endpoints.items():
        sums[batch.samples[i].group] += endpoint.to(stored.device)
    means = data_sum(sums) / plan.rollouts.group_size
    for (i, t), endpoint in stored.endpoints.items():
        sample = batch.samples[i]
        seed, step = on_device(torch.tensor([[sample.seed], [t]]), stored.device)
        std = float(plan.tables[sample.group].c[t])
        noise = std * philox_normal(seed, step, stored.shape)[0]
        next_latents = stored.states[i, t + 1].to(stored.device)
        direction = endpoint.to(stored.device) - means[sample.group]

        turned = _as_long_as(noise, direction)
        if plan.endpoint_share < 1:
            turned = _as_long_as(noise, noise.lerp(turned, plan.endpoint_share))
        endpoint.copy_(next_latents - noise + turned)


def _as_long_as(noise: Tensor, direction: Tensor) -> Tensor:
    """Return the direction with the length of the noise, so that the log-prob stays."""
    stretch = noise.norm() / direction.norm().clamp(min=1e-30)
    return direction * stretch
