"""The plan of an iteration: its samples and the ranks that make them, its transitions, and the order of its updates.

Everything follows from the settings, the iteration and the number of ranks, so every rank knows what the others do.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence

from sage_fast.algorithm.resolved import Resolved
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
        latent_seed: key of the initial latents; the same for the whole group with shared initial noise.
    """

    group: int
    index: int
    prompt: str
    seed: int
    latent_seed: int


def prompts_of_iteration(prompts: int, per_iteration: int, iteration: int, seed: int, offset: int = 0) -> list[int]:
    """Return the indices of one iteration's prompts: a new shuffle every epoch, a pure function of the arguments.

    Args:
        prompts: number of training prompts, the length of an epoch.
        offset: prompts that the iterations before have taken, beyond `per_iteration` each; not 0 after a resume with
            another number of prompts an iteration.
    """
    chosen = []
    first = iteration * per_iteration + offset
    for position in range(first, first + per_iteration):
        epoch, offset = divmod(position, prompts)
        chosen.append(permutation(prompts, seed, "prompts", epoch)[offset])
    return chosen


def share_of(count: int, ranks: int, rank: int) -> range:
    """Return the numbers below `count` that belong to `rank`; the first ranks have one more if the split is uneven."""
    first, last = (-(-number * count // ranks) for number in (rank, rank + 1))
    return range(first, last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The denoising steps of an iteration's samples, numbered group by group.

    Attributes:
        steps: denoising steps of a sample.
        group_size: samples of a group.
        windows: first stochastic step of each group.
        shared: whether a group has the same initial latents. All steps before its window are then deterministic and
            equal for its samples, so each rank runs them once per group.
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
        """Return the denoising steps of one rank's samples, each weighted by the `tokens` of its sample if given."""
        weights = dict.fromkeys(share, 1) if tokens is None else {sample: tokens[sample] for sample in share}
        of_groups = {sample // self.group_size: weight for sample, weight in weights.items()}
        together = sum(weight * self.prefixes[group] for group, weight in of_groups.items())
        alone = (weight * (self.steps - self.prefixes[sample // self.group_size]) for sample, weight in weights.items())
        return together + sum(alone)


def assign_to_ranks(tokens: Sequence[int], ranks: int, batch_size: int, rollouts: Rollouts) -> list[list[int]]:
    """Assign the iteration's samples to ranks.

    Return each rank's sample indices, equal lengths next to each other, and of these equal windows.

    The counts differ by at most one, since all samples take the same memory and nearly the same work. The longest
    samples go first, each to the rank with the least work so far. They go in runs of up to a batch, because a batch
    holds samples of one length. A run of samples that share steps is of one group. Its length is chosen so that the
    rank with the most work has the least: whole groups share most, parts of groups balance windows of unequal starts.

    Args:
        tokens: token count of each sample's forwards, N.
        ranks: number of ranks, at most N.
        batch_size: samples that are denoised together.
        rollouts: denoising steps of the samples.
    """
    lengths = range(rollouts.group_size, 0, -1) if any(rollouts.prefixes) else [batch_size]

    def longest(shares: Sequence[Sequence[int]]) -> tuple[int, int]:
        counts = [rollouts.count(share, tokens) for share in shares]
        return max(counts), sum(counts)

    shares = min((_assign_runs(tokens, ranks, length, rollouts) for length in lengths), key=longest)
    size, windows = rollouts.group_size, rollouts.windows
    return [sorted(share, key=lambda sample: (tokens[sample], windows[sample // size], sample)) for share in shares]


def _assign_runs(tokens: Sequence[int], ranks: int, length: int, rollouts: Rollouts) -> list[list[int]]:
    """Assign the samples in runs of up to `length`, as `assign_to_ranks` says; return each rank's samples."""
    size, prefixes = rollouts.group_size, rollouts.prefixes
    groups = [sample // size for sample in range(len(tokens))]
    alike = [(tokens[sample], group if prefixes[group] else None) for sample, group in enumerate(groups)]
    work = [rollouts.count(range(group * size, group * size + size), tokens) for group in range(len(prefixes))]
    loads = [(0, len(share_of(len(tokens), ranks, rank)), rank) for rank in range(ranks)]  # work, free places, rank
    heapq.heapify(loads)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    remaining = sorted(range(len(tokens)), key=lambda sample: (-work[groups[sample]], sample))
    while remaining:
        _, free, rank = heapq.heappop(loads)
        run = [s for s in remaining[: min(length, free)] if alike[s] == alike[remaining[0]]]
        shares[rank] += run
        if free > len(run):
            heapq.heappush(loads, (rollouts.count(shares[rank], tokens), free - len(run), rank))
        del remaining[: len(run)]
    return shares


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """What an iteration does, on all ranks; samples are numbered group by group. `plan_iteration` makes it.

    Attributes:
        resolved: settings of the run.
        index: number of the iteration.
        ranks: data-parallel ranks, which share the samples.
        anchor_is_free: the anchor needs no forward, since the rollout's velocities stand in for its own.
        samples: all samples.
        tokens: token count of a forward of each sample (both CFG passes).
        tables: transitions of each group; with `sampling.sde_window`, ODE outside a random contiguous window.
    """

    resolved: Resolved
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
        return assign_to_ranks(self.tokens, self.ranks, self.resolved.config.sampling.batch_size, self.rollouts)

    def transitions(self, numbers: Sequence[int]) -> list[Transition]:
        """Return the trained transitions of the samples `numbers`, which are renumbered from 0; ordered by step."""
        groups = [self.samples[number].group for number in numbers]
        found = [(place, t) for place, group in enumerate(groups) for t in self.trained[group]]
        return sorted(found, key=lambda transition: transition[::-1])

    def entered(self, numbers: Sequence[int]) -> list[Transition]:
        """Return those of `transitions` that all samples of a group enter from the same latents."""
        first = [self.rollouts.windows[self.samples[number].group] for number in numbers]
        return [(i, t) for i, t in self.transitions(numbers) if t == first[i]]

    def anchored(self, kept: Sequence[bool]) -> list[Transition]:
        """Return the transitions at which the anchor runs, ordered by step; `kept` is as for `updates`."""
        free = self.anchor_is_free or self.resolved.objective.strategy.anchor is None
        return [] if free else [(i, t) for i, t in self.transitions(range(len(self.samples))) if kept[i]]

    def updates(self, kept: Sequence[bool]) -> list[list[Transition]]:
        """Return the transitions of each optimizer step. Each step has every kept sample, at timesteps of its own.

        Args:
            kept: whether each sample is trained.
        """
        train, orders = self.resolved.config.train, []
        for sample in self.samples:
            own, place = self.trained[sample.group], (self.index, sample.group, sample.index)
            orders.append([own[i] for i in permutation(len(own), self.resolved.config.seed, "timesteps", *place)])
        count = train.optimizer_steps
        return [
            [
                (sample, order[position])
                for position in range(max(map(len, orders)))
                for sample, order in enumerate(orders)
                if kept[sample] and u * len(order) // count <= position < (u + 1) * len(order) // count
            ]
            for u in range(count)
        ]

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
            "anchor": len(self.anchored(kept)) + sum(stored) * self.resolved.objective.scores_noised,
        }
        return {part: count * self.resolved.config.sampling.passes for part, count in counts.items()}


def plan_iteration(
    resolved: Resolved,
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
    chosen = prompts_of_iteration(len(prompts), train.prompts_per_iteration, index, seed, prompt_offset)
    for group, place in enumerate(chosen):
        seeds = sample_seeds(seed, index, group, range(train.group_size)).tolist()
        for number, own in enumerate(seeds):
            latent_seed = seeds[0] if sampling.shared_initial_noise else own
            samples.append(Sample(group=group, index=number, prompt=prompts[place], seed=own, latent_seed=latent_seed))
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
