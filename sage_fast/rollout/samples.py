"""Rollouts of one rank's samples, batch after batch; the steps that a group shares run once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_samples import Sample
from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.models.policy import Policy
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.util.console import Progress
from sage_fast.util.metrics import Stopwatch


class GroupSteps(NamedTuple):
    """Denoising steps of a group's samples.

    Attributes:
        table: the transitions, on the host.
        coefs: `table.coefficients(...)` on the policy's device.
    """

    table: TransitionTable
    coefs: Tensor


class SampleRollouts:
    """Denoises the samples of a `Batch` and stores there what training needs.

    Args:
        policy: predicts the velocity.
        batch: this rank's samples.
        groups: steps of each group of the iteration.
        graphs: CUDA graphs to replay steps from.
        watch: receives the time of `rollout`.
    """

    def __init__(
        self, policy: Policy, batch: Batch, groups: Sequence[GroupSteps], graphs: StepGraphs | None, watch: Stopwatch
    ) -> None:
        self.policy, self.batch, self.groups, self.graphs, self.watch = policy, batch, groups, graphs, watch
        self.seeds = torch.tensor([sample.seed for sample in batch.samples])
        self.latent_seeds = torch.tensor([sample.latent_seed for sample in batch.samples])
        self._starts: dict[int, Tensor] = {}  # group -> latents after the steps that its samples share

    def finished(
        self, runs: Sequence[tuple[list[int], range]], bar: Progress
    ) -> Iterator[tuple[Iterable[Sample], Tensor]]:
        """Denoise `runs`, as `rollout_runs` returns them; yield samples and final latents of each that ends at sigma 0.

        Then run dummy steps until every rank has made the same number of forwards.
        """
        missing = self.policy.states.padding(bar.total)
        for places, steps in runs:
            latents = self._denoise(places, steps, bar)
            if steps.stop == len(self.groups[0].table):
                yield [self.batch.samples[place] for place in places], latents
        for _ in range(missing):
            self._denoise(runs[-1][0], range(1), bar)

    def _denoise(self, places: list[int], steps: range, bar: Progress) -> Tensor:
        """Run `steps` of the neighbouring samples `places`, which train the same steps; return their latents."""
        batch, rows = self.batch, slice(places[0], places[-1] + 1)
        groups = [batch.samples[place].group for place in places]
        table, coefs = self.groups[groups[0]]
        ends = steps.stop == len(table)
        with self.watch("rollout"):
            if steps.start:
                x = torch.stack([self._starts[group] for group in groups])
            else:
                x = initial_latents(self.latent_seeds[places], batch.trajectories.shape, self.policy.device)
            keys = [batch.samples[place].prompt for place in places]
            x = rollout(
                self.policy,
                table,
                coefs,
                batch.conditioning,
                keys,
                self.seeds[places],
                x,
                steps=steps,
                record=functools.partial(batch.trajectories.record, rows) if ends else None,
                on_step=bar.update,
                graphs=self.graphs,
            )
            if ends:
                batch.trajectories.finish(rows, x, self.seeds[rows].to(self.policy.device), table.sigmas)
            else:
                self._starts.update(zip(groups, x))
        return x
