"""The samples of an iteration: their prompts and seeds, and the ranks that make them.

Everything follows from the settings, the iteration and the number of ranks, so every rank knows what the others do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.config.schema import TrainConfig
from sage_fast.util.seeding import permutation, sample_seeds


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


def prompts_of_iteration(prompts: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """Return the indices of one iteration's prompts: a new shuffle every epoch, a pure function of the arguments."""
    chosen = []
    for position in range(iteration * per_iteration, (iteration + 1) * per_iteration):
        epoch, offset = divmod(position, prompts)
        chosen.append(permutation(prompts, seed, "prompts", epoch)[offset])
    return chosen


def draw_samples(
    train: TrainConfig, prompts: Sequence[str], *, shared: bool, seed: int, iteration: int
) -> list[Sample]:
    """Draw all samples of an iteration, group by group. The draw does not depend on the number of ranks.

    Args:
        train: section `train`.
        prompts: training prompts.
        shared: whether the samples of a group start from the same noise.
        seed, iteration: seed the draw.
    """
    chosen = prompts_of_iteration(len(prompts), train.prompts_per_iteration, iteration, seed)
    samples = []
    for group, text in enumerate(prompts[place] for place in chosen):
        seeds = sample_seeds(seed, iteration, group, range(train.group_size)).tolist()
        for index, own in enumerate(seeds):
            latent_seed = seeds[0] if shared else own
            samples.append(Sample(group=group, index=index, prompt=text, seed=own, latent_seed=latent_seed))
    return samples


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

    @classmethod
    def of(cls, tables: Sequence[TransitionTable], group_size: int, shared: bool) -> Rollouts:
        """Return the rollouts of groups with these transitions."""
        windows = [table.first_stochastic for table in tables]
        return cls(steps=len(tables[0]), group_size=group_size, windows=windows, shared=shared)

    @property
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
    free = [len(share_of(len(tokens), ranks, rank)) for rank in range(ranks)]
    load = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    remaining = sorted(range(len(tokens)), key=lambda sample: (-work[groups[sample]], sample))
    while remaining:
        rank = min((r for r in range(ranks) if free[r]), key=lambda r: (load[r], free[r], r))
        run = [s for s in remaining[: min(length, free[rank])] if alike[s] == alike[remaining[0]]]
        shares[rank] += run
        load[rank] = rollouts.count(shares[rank], tokens)
        free[rank] -= len(run)
        del remaining[: len(run)]
    return shares
