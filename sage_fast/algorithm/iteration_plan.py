"""The plan of an iteration: its samples and the ranks that make them, its transitions, and the
order of its updates.

Everything follows from the settings, the iteration and the number of ranks, so every rank knows
what the others do.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.config.schema import Config
from sage_fast.util.captions import PromptKey
from sage_fast.util.seeding import derive_seed, permutation, sample_seeds

Transition = tuple[int, int]
"""(sample, step)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout of an iteration.

    Attributes:
        group: index of the group, one for each prompt of the iteration.
        index: index within the group.
        prompt: key of the group's prompt, and of its condition.
        seed: key of the noise.
        latent_seed: key of the initial latents; the same for the whole group with shared initial
            noise.
    """

    group: int
    index: int
    prompt: PromptKey
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
    first = -(-rank * count // ranks)
    end = -(-(rank + 1) * count // ranks)
    return range(first, end)


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
        if self.shared:
            return self.windows
        return [0 for _ in self.windows]

    def count(self, share: Sequence[int], tokens: Sequence[int] | None = None) -> int:
        """Return the denoising steps of one rank's samples, each weighted by the `tokens` of its
        sample if given."""
        steps = 0
        # group -> weight of the steps that its samples share
        shared: dict[int, int] = {}
        for sample in share:
            weight = 1 if tokens is None else tokens[sample]
            group = sample // self.group_size
            shared[group] = weight
            steps += weight * (self.steps - self.prefixes[group])

        for group, weight in shared.items():
            steps += weight * self.prefixes[group]
        return steps


def assign_to_ranks(
    tokens: Sequence[int], ranks: int, batch_size: int, rollouts: Rollouts
) -> list[list[int]]:
    """Assign the iteration's samples to ranks.

    Return each rank's sample indices, equal lengths next to each other, and of these equal windows.

    The counts differ by at most one, since all samples take the same memory and nearly the same
    work. Greedy: the longest samples first, in batches of one length, each to the rank with the
    least work so far. A batch of samples that share steps is of one group. Of several batch
    lengths, the one with the smallest maximum load is kept: whole groups share most, parts of
    groups balance windows of unequal starts.

    Args:
        tokens: token count of each sample's forwards, N.
        ranks: number of ranks, at most N.
        batch_size: samples that are denoised together.
        rollouts: denoising steps of the samples.
    """
    share_steps = any(rollouts.prefixes)
    lengths = range(rollouts.group_size, 0, -1) if share_steps else [batch_size]
    order = _longest_first(tokens, rollouts)
    found = [_assign_batches(order, tokens, ranks, length, rollouts) for length in lengths]
    best = min(found, key=lambda assigned: (max(assigned.loads), sum(assigned.loads)))

    shares: list[list[int]] = [[] for _ in range(ranks)]
    for first, end, rank in best.batches:
        shares[rank] += order.samples[first:end]

    def sort_key(sample: int) -> tuple[int, int, int]:
        return tokens[sample], rollouts.windows[sample // rollouts.group_size], sample

    return [sorted(share, key=sort_key) for share in shares]


class _Order(NamedTuple):
    """The samples of an iteration, longest first, in blocks that can be denoised together.

    Attributes:
        samples: numbers of the samples.
        block_ends: position of a sample in this order -> position after the last sample of its
            block. A block has samples of one length and, if they share steps, of one group.
    """

    samples: list[int]
    block_ends: list[int]


class _Assignment(NamedTuple):
    """An assignment of samples to ranks.

    Attributes:
        batches: first position in `_Order.samples`, position after the last, rank.
        loads: denoising steps of each rank, weighted as by `Rollouts.count`.
    """

    batches: list[tuple[int, int, int]]
    loads: list[int]


def _longest_first(tokens: Sequence[int], rollouts: Rollouts) -> _Order:
    size = rollouts.group_size
    prefixes = rollouts.prefixes
    work = [
        rollouts.count(range(group * size, group * size + size), tokens)
        for group in range(len(prefixes))
    ]
    samples = sorted(range(len(tokens)), key=lambda sample: (-work[sample // size], sample))

    # What the samples of a block have in common.
    batch_keys = []
    for sample in samples:
        group = sample // size
        batch_keys.append((tokens[sample], group if prefixes[group] else None))

    # From the last sample back: each has the end of the next one's block, or ends its own.
    ends = [len(samples) for _ in samples]
    for position in reversed(range(len(samples) - 1)):
        if batch_keys[position] == batch_keys[position + 1]:
            ends[position] = ends[position + 1]
        else:
            ends[position] = position + 1
    return _Order(samples, ends)


def _assign_batches(
    order: _Order, tokens: Sequence[int], ranks: int, length: int, rollouts: Rollouts
) -> _Assignment:
    """Assign the samples in batches of up to `length`, as `assign_to_ranks` says.

    A batch takes the same time whatever its length, so that all lengths together take n log n.
    """
    count = len(order.samples)
    batches: list[tuple[int, int, int]] = []
    loads = [0 for _ in range(ranks)]
    # whose shared steps the rank has counted
    groups: list[set[int]] = [set() for _ in range(ranks)]
    # work, samples that the rank still takes, rank
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

        batches.append((first, end, rank))
        if free > end - first:
            heapq.heappush(queue, (loads[rank], free - (end - first), rank))
        first = end
    return _Assignment(batches, loads)


def assign_groups(holders: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank on which the videos of each group are compared.

    It is the rank that holds most of them: a group that lies whole on a rank stays there. Of
    several, the one with the fewest groups so far; groups with a single candidate are assigned
    first.

    Args:
        holders: for each group, the rank that holds each of its videos.
    """
    candidates = []
    for ranks in holders:
        most = max(map(ranks.count, ranks))
        candidates.append(sorted(rank for rank in {*ranks} if ranks.count(rank) == most))

    assigned = [0 for _ in holders]
    load: dict[int, int] = {}
    for group in sorted(range(len(holders)), key=lambda group: len(candidates[group])):
        rank = min(candidates[group], key=lambda rank: (load.get(rank, 0), rank))
        load[rank] = load.get(rank, 0) + 1
        assigned[group] = rank
    return assigned


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """What an iteration does, on all ranks: numbers alone; `plan_iteration` derives them from the
    settings. Samples are numbered group by group.

    Attributes:
        samples: all samples.
        tables: transitions of each group; with `sampling.sde_window`, ODE outside a random
            contiguous window.
        trained: the steps that each group trains.
        rollouts: the denoising steps of the samples.
        shares: the samples of each rank, balanced by token count.
        orders: the trained steps of each sample, in the order of its updates.
        anchor_steps: the trained steps of each sample at which the KL to the anchor is computed.
        anchor_weight: weight of that KL: 1 / `kl.anchor_fraction`, or 1 if it is computed at all
            trained steps.
        optimizer_steps: updates of the iteration.
        passes: forwards of a step: 2 with guidance.
        runs_anchor: whether the anchor has a forward at each trained transition. It has none if
            there is no anchor, or if the rollout's velocities stand in for its own.
        scores_noised: whether each trained transition of the rollout policy is scored by a forward
            of its own.
    """

    samples: Sequence[Sample]
    tables: Sequence[TransitionTable]
    trained: Sequence[Sequence[int]]
    rollouts: Rollouts
    shares: Sequence[Sequence[int]]
    orders: Sequence[Sequence[int]]
    anchor_steps: Sequence[Collection[int]]
    anchor_weight: float
    optimizer_steps: int
    passes: int
    runs_anchor: bool
    scores_noised: bool

    def transitions(self, numbers: Sequence[int]) -> list[Transition]:
        """Return the trained transitions of the samples `numbers`, which are renumbered from 0;
        ordered by step."""
        found = []
        for i, number in enumerate(numbers):
            group = self.samples[number].group
            found += [(i, t) for t in self.trained[group]]
        return sorted(found, key=lambda transition: transition[::-1])

    def anchored(self, kept: Sequence[bool]) -> list[Transition]:
        """Return the transitions at which the anchor runs, ordered by step; `kept` is as for
        `updates`."""
        if not self.runs_anchor:
            return []
        transitions = self.transitions(range(len(self.samples)))
        return [(i, t) for i, t in transitions if kept[i] and t in self.anchor_steps[i]]

    def updates(self, kept: Sequence[bool]) -> list[list[Transition]]:
        """Return the transitions of each optimizer step. Each step has every kept sample, at
        timesteps of its own.

        Args:
            kept: whether each sample is trained.
        """
        count = self.optimizer_steps
        orders = {number: order for number, order in enumerate(self.orders) if kept[number]}
        update_of = {length: _cut(length, count) for length in set(map(len, orders.values()))}

        updates: list[list[Transition]] = [[] for _ in range(count)]
        for position in range(max(map(len, orders.values()), default=0)):
            for number, order in orders.items():
                if position < len(order):
                    update = update_of[len(order)][position]
                    updates[update].append((number, order[position]))
        return updates

    def forwards(self, kept: Sequence[bool] | None = None) -> dict[str, int]:
        """Return part -> forwards of one sample, all ranks together; a step with guidance has two.

        Denoising steps that a rank runs once for several samples count once.

        Args:
            kept: as for `updates`; by default every sample.
        """
        if kept is None:
            kept = [True for _ in self.samples]
        steps = [len(self.trained[sample.group]) for sample in self.samples]
        anchor = len(self.anchored(kept))
        if self.scores_noised:
            anchor += sum(steps)
        counts = {
            "rollout": sum(self.rollouts.count(share) for share in self.shares),
            "training": sum(count for count, trains in zip(steps, kept) if trains),
            "anchor": anchor,
        }
        return {part: self.passes * count for part, count in counts.items()}


def _cut(length: int, count: int) -> list[int]:
    """Return position in an order of `length` steps -> the update that trains it; the order is cut
    into `count` nearly equal parts."""
    found: list[int] = []
    for update in range(count):
        part = range(update * length // count, (update + 1) * length // count)
        found += [update for _ in part]
    return found


def plan_iteration(
    resolved: ResolvedConfig,
    prompts: Sequence[PromptKey],
    tokens: Callable[[PromptKey], int],
    index: int,
    *,
    ranks: int = 1,
    anchor_is_free: bool = False,
    prompt_offset: int = 0,
) -> IterationPlan:
    """Plan an iteration. Its samples do not depend on the number of ranks.

    Args:
        resolved: settings of the run.
        prompts: keys of the training prompts.
        tokens: returns the token count of a forward with a prompt (both CFG passes).
        index: number of the iteration.
        ranks: data-parallel ranks, which share the samples.
        anchor_is_free: the anchor needs no forward.
        prompt_offset: as for `prompts_of_iteration`.
    """
    config = resolved.config
    objective = resolved.objective
    chosen = prompts_of_iteration(
        len(prompts), config.train.prompts_per_iteration, index, config.seed, prompt_offset
    )
    samples = _samples(config, [prompts[number] for number in chosen], index)
    tables = _tables(resolved, index)
    trained = [resolved.trained_steps(table, index) for table in tables]
    rollouts = Rollouts(
        steps=len(tables[0]),
        group_size=config.train.group_size,
        windows=[table.first_stochastic for table in tables],
        shared=config.sampling.shared_initial_noise,
    )
    orders = [_order(trained[sample.group], config.seed, index, sample) for sample in samples]
    # Without a forward the KL to the anchor costs nothing, so it is computed everywhere.
    anchor_fraction = 1.0 if anchor_is_free else config.kl.anchor_fraction
    lengths = [tokens(sample.prompt) for sample in samples]
    return IterationPlan(
        samples=samples,
        tables=tables,
        trained=trained,
        rollouts=rollouts,
        shares=assign_to_ranks(lengths, ranks, config.sampling.batch_size, rollouts),
        orders=orders,
        anchor_steps=_anchor_steps(orders, samples, anchor_fraction, config.seed, index),
        anchor_weight=1 / anchor_fraction,
        optimizer_steps=config.train.optimizer_steps,
        passes=config.sampling.passes,
        runs_anchor=objective.strategy.anchor is not None and not anchor_is_free,
        scores_noised=objective.scores_noised,
    )


def _samples(config: Config, prompts: Sequence[PromptKey], index: int) -> list[Sample]:
    """Return the samples of iteration `index`, one group for each prompt."""
    samples = []
    for group, prompt in enumerate(prompts):
        seeds = sample_seeds(config.seed, index, group, range(config.train.group_size)).tolist()
        for number, seed in enumerate(seeds):
            latent_seed = seeds[0] if config.sampling.shared_initial_noise else seed
            sample = Sample(
                group=group, index=number, prompt=prompt, seed=seed, latent_seed=latent_seed
            )
            samples.append(sample)
    return samples


def _tables(resolved: ResolvedConfig, index: int) -> list[TransitionTable]:
    """Draw the window of each group of iteration `index`, or one for all groups."""
    config = resolved.config
    tables = []
    for group in range(config.train.prompts_per_iteration):
        key = (index, group) if config.sampling.window_per_prompt else (index,)
        drawn = derive_seed(config.seed, "window", *key) % len(resolved.windows)
        tables.append(resolved.windows[drawn])
    return tables


def _order(steps: Sequence[int], seed: int, index: int, sample: Sample) -> list[int]:
    """Shuffle the trained steps of a sample."""
    key = (index, sample.group, sample.index)
    return [steps[i] for i in permutation(len(steps), seed, "timesteps", *key)]


def _anchor_steps(
    orders: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    fraction: float,
    seed: int,
    index: int,
) -> list[Collection[int]]:
    """Draw the trained steps of each sample at which the KL to the anchor is computed.

    Each step is drawn with the probability `fraction`, so that the weight 1 / `fraction` leaves the
    mean as it is. It is systematic sampling: the steps of all samples stand in a row, and with a
    random offset every 1 / `fraction`-th is counted for its sample. So the numbers of two samples
    with equally many steps differ by at most one. The samples stand in a random order: in their
    own, each rank that has every n-th of them might have the same ones drawn.
    """
    if fraction == 1:
        return list(orders)
    drawn: list[Collection[int]] = [() for _ in samples]
    before = derive_seed(seed, "anchor-offset", index) / 2**63
    for number in permutation(len(samples), seed, "anchor-samples", index):
        order, sample = orders[number], samples[number]
        after = before + fraction * len(order)
        count = math.floor(after) - math.floor(before)
        key = (index, sample.group, sample.index)
        shuffled = permutation(len(order), seed, "anchor-steps", *key)
        drawn[number] = frozenset(order[i] for i in shuffled[:count])
        before = after
    return drawn
