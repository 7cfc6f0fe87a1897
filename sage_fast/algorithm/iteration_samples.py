"""The samples of an iteration: their prompts and seeds, and the ranks that make them.

Everything follows from the settings, the iteration and the number of ranks, so every rank knows what the others do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sage_fast.config.schema import TrainConfig
from sage_fast.models.protocol import Key
from sage_fast.util.seeding import permutation, sample_seeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout of an iteration.

    Attributes:
        group: index of the group, one for each prompt of the iteration.
        index: index within the group.
        prompt: prompt of the group.
        key: key of the condition; a prompt is its own key.
        seed: key of the noise.
        latent_seed: key of the initial latents; the same for the whole group with shared initial noise.
    """

    group: int
    index: int
    prompt: str
    key: Key
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
            samples.append(Sample(group=group, index=index, prompt=text, key=text, seed=own, latent_seed=latent_seed))
    return samples


def share_of(count: int, ranks: int, rank: int) -> range:
    """Return the numbers below `count` that belong to `rank`; the first ranks have one more if the split is uneven."""
    first, last = (-(-number * count // ranks) for number in (rank, rank + 1))
    return range(first, last)


def assign_to_ranks(tokens: Sequence[int], ranks: int, batch_size: int, windows: Sequence[int] = ()) -> list[list[int]]:
    """Assign the iteration's samples to ranks.

    Return each rank's sample indices, equal lengths next to each other, and of these equal windows.

    The counts differ by at most one, since all samples take the same memory and nearly the same work. The longest
    samples go first, each to the rank with the fewest tokens so far. They go in runs of up to a batch, because a batch
    holds samples of one length.

    Args:
        tokens: token count of each sample's forwards, N.
        ranks: number of ranks, at most N.
        batch_size: samples that are denoised together.
        windows: first SDE step of each sample; by default the same for all.
    """
    windows = windows or [0] * len(tokens)
    free = [len(share_of(len(tokens), ranks, rank)) for rank in range(ranks)]
    load = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    remaining = sorted(range(len(tokens)), key=lambda sample: (-tokens[sample], sample))
    while remaining:
        rank = min((r for r in range(ranks) if free[r]), key=lambda r: (load[r], free[r], r))
        length = tokens[remaining[0]]
        run = [sample for sample in remaining[: min(batch_size, free[rank])] if tokens[sample] == length]
        shares[rank] += run
        load[rank] += len(run) * length
        free[rank] -= len(run)
        del remaining[: len(run)]
    return [sorted(share, key=lambda sample: (tokens[sample], windows[sample], sample)) for share in shares]
