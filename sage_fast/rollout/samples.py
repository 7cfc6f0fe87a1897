"""Rollouts of one rank's samples, batch after batch; the steps that a group shares run once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import IterationPlan, Sample
from sage_fast.models.policy import Policy
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout, rollout_batches
from sage_fast.util.console import Progress
from sage_fast.util.meters import Stopwatch


class SampleRollouts:
    """Denoises this rank's samples of an iteration and stores in their `Batch` what training needs.

    Args:
        policy: predicts the velocity.
        plan: plan of the iteration.
        batch: this rank's samples.
        lengths: prompt -> condition length in each pass of a forward.
        graphs: CUDA graphs to replay steps from.
        watch: receives the time of `rollout`.
        batch_size: samples that are denoised together.
        log_prob: as `objective.log_prob`.

    Attributes:
        steps: number of denoising steps of batches.
    """

    def __init__(
        self,
        policy: Policy,
        plan: IterationPlan,
        batch: Batch,
        lengths: Mapping[Any, object],
        graphs: StepGraphs | None,
        watch: Stopwatch,
        *,
        batch_size: int,
        log_prob: str,
    ) -> None:
        self.policy = policy
        self.tables = plan.tables
        self.batch = batch
        self.graphs = graphs
        self.watch = watch

        self.coefs = {
            table: table.coefficients(log_prob).to(policy.device) for table in set(plan.tables)
        }
        self.seeds = torch.tensor([sample.seed for sample in batch.samples])
        self.latent_seeds = torch.tensor([sample.latent_seed for sample in batch.samples])
        batch_keys = [
            (lengths[sample.prompt], self.tables[sample.group]) for sample in batch.samples
        ]
        groups = [sample.group for sample in batch.samples]
        self.batches = rollout_batches(batch_keys, groups, plan.rollouts, batch_size)
        self.steps = sum(len(steps) for _, steps in self.batches)
        # group -> latents after the steps that its samples share
        self._starts: dict[int, Tensor] = {}

    def finished(self, bar: Progress) -> Iterator[tuple[Iterable[Sample], Tensor]]:
        """Denoise all batches; yield samples and final latents of each that ends at sigma 0.

        Then run dummy steps until every rank has made the same number of forwards.
        """

        def idle() -> None:
            with self.watch("rollout"):
                self.batch.idle.denoise()

        padded = self.policy.states.pad_to_largest(self.batches, idle, forwards=self.steps)
        for rows, steps in padded:
            latents = self._denoise(rows, steps, bar)
            if steps.stop == len(self.tables[0]):
                yield [self.batch.samples[row] for row in rows], latents

    def _denoise(self, rows: list[int], steps: range, bar: Progress) -> Tensor:
        """Run `steps` of the neighbouring samples `rows`, which train the same steps; return
        their latents."""
        batch = self.batch
        stored_rows = slice(rows[0], rows[-1] + 1)
        groups = [batch.samples[row].group for row in rows]
        table = self.tables[groups[0]]
        ends = steps.stop == len(table)
        with self.watch("rollout"):
            if steps.start:
                x = torch.stack([self._starts[group] for group in groups])
            else:
                x = initial_latents(
                    self.latent_seeds[rows], batch.trajectories.shape, self.policy.device
                )
            keys = [batch.samples[row].prompt for row in rows]
            record = functools.partial(batch.trajectories.record, stored_rows) if ends else None
            x = rollout(
                self.policy,
                table,
                self.coefs[table],
                batch.conditioning,
                keys,
                self.seeds[rows],
                x,
                steps=steps,
                record=record,
                on_step=bar.update,
                graphs=self.graphs,
            )
            if ends:
                seeds = self.seeds[stored_rows].to(self.policy.device)
                batch.trajectories.finish(stored_rows, x, seeds, table.sigmas)
            else:
                self._starts.update(zip(groups, x))
        return x
