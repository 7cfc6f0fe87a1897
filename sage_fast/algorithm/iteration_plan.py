"""The plan of an iteration: its samples and the ranks that make them, its transitions, and the
order of its updates.

Everything follows from the settings, the iteration and the number of ranks, so every rank knows
what the others do.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.util.seeding import derive_seed, permutation, sample_seeds

Transition = tuple[int, int]
"""(sample, step)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout of an iteration.

    Attributes:
        group: index of the group, one for each prompt of the iteration.
        index: index within the group.
        prompt: prompt of the group, and key of its condition.
        seed: key of the noise.
        latent_seed: key of the initial latents; the same for the whole group with shared initial
            noise.
    """

    group: int
    index: int
    prompt: str
    seed: int
    latent_seed: int


def prompts_of_iteration(
    prompts: int, per_iteration: int, iteration: int, seed: int, offset: int = 0
) -> list[int]:
    """Return the indices of one iteration's prompts: a new shuffle every epoch, a pure function of
    the arguments.

    Args:
        prompts: number of training prompts, the length of an epoch.
        offset: prompts that the iterations before have taken, beyond `per_iteration` each; not 0
            after a resume with another number of prompts an iteration.
    """
    first = iteration * per_iteration + offset
    end = first + per_iteration
    epochs = range(first // prompts, (end - 1) // prompts + 1)
    shuffled = {epoch: permutation(prompts, seed, "prompts", epoch) for epoch in epochs}
    return [shuffled[position // prompts][position % prompts] for position in range(first, end)]


def share_of(count: int, ranks: int, rank: int) -> range:
    """Return the numbers below `count` that belong to `rank`; the first ranks have one more if the
    split is uneven."""
    first, last = (-(-number * count // ranks) for number in (rank, rank + 1))
    return range(first, last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The denoising steps of an iteration's samples, numbered group by group.

    Attributes:
        steps: denoising steps of a sample.
        group_size: samples of a group.
        windows: first stochastic step of each group.
        shared: whether a group has the same initial latents. All steps before its window are then
            deterministic and equal for its samples, so each rank runs them once per group.
    """

    steps: int
    group_size: int
    windows: Sequence[int]
    shared: bool

    @functools.cached_property
    def prefixes(self) -> Sequence[int]:
        """Number of steps that the samples of each group share."""
        return self.windows if self.shared else [0] * len(self.windows)

    def count(self, share: Sequence[int], tokens: Sequence[int] | None = None) -> int:
        """Return the denoising steps of one rank's samples, each weighted by the `tokens` of its
        sample if given."""
        weights = (
            dict.fromkeys(share, 1)
            if tokens is None
            else {sample: tokens[sample] for sample in share}
        )
        of_groups = {sample // self.group_size: weight for sample, weight in weights.items()}
        together = sum(weight * self.prefixes[group] for group, weight in of_groups.items())
        alone = (
            weight * (self.steps - self.prefixes[sample // self.group_size])
            for sample, weight in weights.items()
        )
        return together + sum(alone)


def assign_to_ranks(
    tokens: Sequence[int], ranks: int, batch_size: int, rollouts: Rollouts
) -> list[list[int]]:
    """Assign the iteration's samples to ranks.

    Return each rank's sample indices, equal lengths next to each other, and of these equal windows.

    The counts differ by at most one, since all samples take the same memory and nearly the same
    work. The longest samples go first, each to the rank with the least work so far. They go in runs
    of up to a batch, because a batch holds samples of one length. A run of samples that share steps
    is of one group. Its length is chosen so that the rank with the most work has the least: whole
    groups share most, parts of groups balance windows of unequal starts.

    Args:
        tokens: token count of each sample's forwards, N.
        ranks: number of ranks, at most N.
        batch_size: samples that are denoised together.
        rollouts: denoising steps of the samples.
    """
    lengths = range(rollouts.group_size, 0, -1) if any(rollouts.prefixes) else [batch_size]
    order = _longest_first(tokens, rollouts)
    runs = [_assign_runs(order, tokens, ranks, length, rollouts) for length in lengths]
    best = min(runs, key=lambda assigned: (max(assigned.loads), sum(assigned.loads)))
    size, windows = rollouts.group_size, rollouts.windows
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for first, end, rank in best.runs:
        shares[rank] += order.samples[first:end]
    return [
        sorted(share, key=lambda sample: (tokens[sample], windows[sample // size], sample))
        for share in shares
    ]


class _Order(NamedTuple):
    """The samples of an iteration, longest first, in blocks that can be denoised together.

    Attributes:
        samples: numbers of the samples.
        block_ends: place of a sample in this order -> place after the last sample of its block. A
            block has samples of one length and, if they share steps, of one group.
    """

    samples: list[int]
    block_ends: list[int]


class _Runs(NamedTuple):
    """An assignment of samples to ranks.

    Attributes:
        runs: first place in `_Order.samples`, place after the last, rank.
        loads: denoising steps of each rank, weighted as by `Rollouts.count`.
    """

    runs: list[tuple[int, int, int]]
    loads: list[int]


def _longest_first(tokens: Sequence[int], rollouts: Rollouts) -> _Order:
    size, prefixes = rollouts.group_size, rollouts.prefixes
    work = [
        rollouts.count(range(group * size, group * size + size), tokens)
        for group in range(len(prefixes))
    ]
    samples = sorted(range(len(tokens)), key=lambda sample: (-work[sample // size], sample))
    keys = [
        (tokens[sample], sample // size if prefixes[sample // size] else None) for sample in samples
    ]
    ends = [len(samples)] * len(samples)
    for place in reversed(range(len(samples) - 1)):
        ends[place] = ends[place + 1] if keys[place] == keys[place + 1] else place + 1
    return _Order(samples, ends)


def _assign_runs(
    order: _Order, tokens: Sequence[int], ranks: int, length: int, rollouts: Rollouts
) -> _Runs:
    """Assign the samples in runs of up to `length`, as `assign_to_ranks` says.

    A run takes the same time whatever its length, so that all lengths together take n log n.
    """
    count = len(order.samples)
    runs: list[tuple[int, int, int]] = []
    loads = [0] * ranks
    # whose shared steps the rank has counted
    groups: list[set[int]] = [set() for _ in range(ranks)]
    # work, free places, rank
    queue = [(0, len(share_of(count, ranks, rank)), rank) for rank in range(ranks)]
    heapq.heapify(queue)
    first = 0
    while first < count:
        _, free, rank = heapq.heappop(queue)
        end = min(first + min(length, free), order.block_ends[first])

        sample = order.samples[first]
        group = sample // rollouts.group_size
        shared = rollouts.prefixes[group]
        steps = (end - first) * (rollouts.steps - shared)
        if shared and group not in groups[rank]:
            groups[rank].add(group)
            steps += shared
        loads[rank] += steps * tokens[sample]

        runs.append((first, end, rank))
        if free > end - first:
            heapq.heappush(queue, (loads[rank], free - (end - first), rank))
        first = end
    return _Runs(runs, loads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """What an iteration does, on all ranks; samples are numbered group by group. `plan_iteration`
    makes it.

    Attributes:
        resolved: settings of the run.
        index: number of the iteration.
        ranks: data-parallel ranks, which share the samples.
        anchor_is_free: the anchor needs no forward, since the rollout's velocities stand in for its
            own.
        samples: all samples.
        tokens: token count of a forward of each sample (both CFG passes).
        tables: transitions of each group; with `sampling.sde_window`, ODE outside a random
            contiguous window.
    """

    resolved: ResolvedConfig
    index: int
    ranks: int
    anchor_is_free: bool
    samples: Sequence[Sample]
    tokens: Sequence[int]
    tables: Sequence[TransitionTable]

    @functools.cached_property
    def trained(self) -> list[list[int]]:
        """The steps that each group trains."""
        return [self.resolved.trained_steps(table, self.index) for table in self.tables]

    @functools.cached_property
    def rollouts(self) -> Rollouts:
        """The denoising steps of the samples."""
        return Rollouts(
            steps=len(self.tables[0]),
            group_size=self.resolved.config.train.group_size,
            windows=[table.first_stochastic for table in self.tables],
            shared=self.resolved.config.sampling.shared_initial_noise,
        )

    @functools.cached_property
    def shares(self) -> list[list[int]]:
        """The samples of each rank, balanced by token count."""
        return assign_to_ranks(
            self.tokens, self.ranks, self.resolved.config.sampling.batch_size, self.rollouts
        )

    def transitions(self, numbers: Sequence[int]) -> list[Transition]:
        """Return the trained transitions of the samples `numbers`, which are renumbered from 0;
        ordered by step."""
        groups = [self.samples[number].group for number in numbers]
        found = [(place, t) for place, group in enumerate(groups) for t in self.trained[group]]
        return sorted(found, key=lambda transition: transition[::-1])

    def endpoint_transitions(self, numbers: Sequence[int]) -> list[Transition]:
        """Return those of `transitions` that all samples of a group enter from the same latents."""
        first = [self.rollouts.windows[self.samples[number].group] for number in numbers]
        return [(i, t) for i, t in self.transitions(numbers) if t == first[i]]

    def anchored(self, kept: Sequence[bool]) -> list[Transition]:
        """Return the transitions at which the anchor runs, ordered by step; `kept` is as for
        `updates`."""
        free = self.anchor_is_free or self.resolved.objective.strategy.anchor is None
        return (
            []
            if free
            else [(i, t) for i, t in self.transitions(range(len(self.samples))) if kept[i]]
        )

    def updates(self, kept: Sequence[bool]) -> list[list[Transition]]:
        """Return the transitions of each optimizer step. Each step has every kept sample, at
        timesteps of its own.

        Args:
            kept: whether each sample is trained.
        """
        seed, count = self.resolved.config.seed, self.resolved.config.train.optimizer_steps
        orders: dict[int, list[int]] = {}
        for number, sample in enumerate(self.samples):
            if kept[number]:
                steps = self.trained[sample.group]
                place = (self.index, sample.group, sample.index)
                orders[number] = [
                    steps[i] for i in permutation(len(steps), seed, "timesteps", *place)
                ]

        # Position in an order -> the update that trains it. An order of n steps is cut into `count`
        # nearly equal parts.
        parts = {
            length: [
                u
                for u in range(count)
                for _ in range(u * length // count, (u + 1) * length // count)
            ]
            for length in {len(order) for order in orders.values()}
        }
        updates: list[list[Transition]] = [[] for _ in range(count)]
        for position in range(max(map(len, orders.values()), default=0)):
            for number, order in orders.items():
                if position < len(order):
                    update = parts[len(order)][position]
                    updates[update].append((number, order[position]))
        return updates

    def forwards(self, kept: Sequence[bool] | None = None) -> dict[str, int]:
        """Return part -> forwards of one sample, all ranks together; a step with guidance has two.

        Denoising steps that a rank runs once for several samples count once.

        Args:
            kept: as for `updates`; by default every sample.
        """
        stored = [len(self.trained[sample.group]) for sample in self.samples]
        kept = [True] * len(self.samples) if kept is None else kept
        counts = {
            "rollout": sum(map(self.rollouts.count, self.shares)),
            "training": sum(steps for steps, trains in zip(stored, kept) if trains),
            "anchor": len(self.anchored(kept))
            + sum(stored) * self.resolved.objective.scores_noised,
        }
        return {
            part: count * self.resolved.config.sampling.passes for part, count in counts.items()
        }


def plan_iteration(
    resolved: ResolvedConfig,
    prompts: Sequence[str],
    tokens: Callable[[str], int],
    index: int,
    *,
    ranks: int = 1,
    anchor_is_free: bool = False,
    prompt_offset: int = 0,
) -> IterationPlan:
    """Plan an iteration. Its samples do not depend on the number of ranks.

    Args:
        resolved: settings of the run.
        prompts: training prompts.
        tokens: returns the token count of a forward with a prompt (both CFG passes).
        index: number of the iteration.
        ranks: data-parallel ranks.
        anchor_is_free: the anchor needs no forward.
        prompt_offset: as for `prompts_of_iteration`.
    """
    train, sampling, seed = resolved.config.train, resolved.config.sampling, resolved.config.seed
    samples, tables = [], []
    chosen = prompts_of_iteration(
        len(prompts), train.prompts_per_iteration, index, seed, prompt_offset
    )
    for group, place in enumerate(chosen):
        seeds = sample_seeds(seed, index, group, range(train.group_size)).tolist()
        for number, own in enumerate(seeds):
            latent_seed = seeds[0] if sampling.shared_initial_noise else own
            samples.append(
                Sample(
                    group=group,
                    index=number,
                    prompt=prompts[place],
                    seed=own,
                    latent_seed=latent_seed,
                )
            )
        key = (index, group) if sampling.window_per_prompt else (index,)
        tables.append(resolved.windows[derive_seed(seed, "window", *key) % len(resolved.windows)])
    return IterationPlan(
        resolved=resolved,
        index=index,
        ranks=ranks,
        anchor_is_free=anchor_is_free,
        samples=samples,
        tokens=[tokens(sample.prompt) for sample in samples],
        tables=tables,
    )
