"""What an iteration draws and trains: its transitions, its groups of samples, and the order of its updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import Tensor

from sage_fast.config import Config
from sage_fast.data.prompts import prompts_of_iteration
from sage_fast.distributed import data_rank, data_size, world_size
from sage_fast.errors import UserError
from sage_fast.policy.sequence import check_sequence_parallel
from sage_fast.section import require
from sage_fast.seeding import derive_seed, permutation, sample_seeds
from sage_fast.transitions import TransitionTable, sigma_schedule, transition_table

Transition = tuple[int, int]
"""(sample, step)."""


def configured_table(config: Config) -> TransitionTable:
    """All transitions of the configured sampler."""
    s = config.sampling
    return transition_table(sigma_schedule(s.steps, s.shift), s.sampler, s.eta)


def iteration_table(table: TransitionTable, config: Config, iteration: int) -> TransitionTable:
    """The iteration's transitions: all of them, or ODE outside a random contiguous window."""
    window, steps = config.sampling.sde_window, config.sampling.steps
    if window == 0:
        return table
    start = derive_seed(config.seed, "window", iteration) % (steps - window + 1)
    return table.window(start, start + window)


def trained_steps(table: TransitionTable, config: Config, iteration: int) -> list[int]:
    """The stochastic steps that an iteration trains; a random subset if the fraction is below 1."""
    steps = table.stochastic_steps
    count = math.ceil(config.train.timestep_fraction * len(steps))
    if config.train.timestep_permutation and count < len(steps):
        order = permutation(len(steps), config.seed, "trained-steps", iteration)
        steps = sorted(steps[i] for i in order[:count])
    return steps[:count]


def check_trainable(config: Config, ranks: int | None = None) -> None:
    """What settings and ranks (None: those of this run) make impossible, before a model is loaded.

    Raises:
        UserError: no stochastic step, more optimizer steps than trained transitions, or groups that do not divide
            among the ranks.
    """
    s, train = config.sampling, config.train
    table = configured_table(config)
    starts = range(s.steps - s.sde_window + 1) if s.sde_window else [0]
    windows = [table.window(start, start + s.sde_window) if s.sde_window else table for start in starts]
    trainable = min(len(trained_steps(window, config, 0)) for window in windows)
    rows = f"sampler {s.sampler!r} with eta {s.eta:g} and {s.steps} steps"
    if trainable == 0:
        raise UserError(
            f"{rows} has no stochastic step to train, so there is no policy gradient; expected any sampler but "
            "ode, with eta above 0"
        )
    if trainable < train.optimizer_steps:
        raise UserError(
            f"train.optimizer_steps = {train.optimizer_steps}: {rows} gives {trainable} trained transition(s) a "
            f"sample; the nearest valid value is {trainable}"
        )
    ranks = check_sequence_parallel(config.model.sequence_parallel, ranks or world_size())
    if train.prompts_per_iteration % ranks:
        raise UserError(
            f"train.prompts_per_iteration = {train.prompts_per_iteration}: expected a multiple of the {ranks} ranks; "
            f"the nearest is {max(train.prompts_per_iteration // ranks, 1) * ranks}"
        )


def check_log_prob(config: Config, numel: int) -> None:
    """What the precision of a log-prob over `numel` elements, float32, makes impossible.

    Raises:
        UserError: neighbouring sums are further apart than a tenth of the clip range.
    """
    objective, c = config.objective, configured_table(config).c
    if objective.log_prob != "sum" or objective.surrogate != "clip":
        return
    size = numel * float((c[c > 0].log() + 0.5 * math.log(2 * math.pi) + 0.5).abs().max())
    spacing = 2.0 ** (math.floor(math.log2(size)) - 23)
    require(
        spacing <= objective.clip_range / 10,
        "objective.log_prob",
        objective.log_prob,
        f"the sum over {numel:,} elements is about {size:.1e}, where float32 has steps of {spacing:.1e}, above a tenth "
        f"of objective.clip_range ({objective.clip_range:.1e}); the nearest choice is 'mean'",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """One prompt and the samples drawn for it; `slot` counts the groups of an iteration over all ranks."""

    slot: int
    prompt: str
    seeds: Tensor
    """int64 `[G]`, noise keys."""
    latent_seeds: Tensor
    """int64 `[G]`, keys of the initial latents; all equal with shared initial noise."""


def draw_groups(config: Config, prompts: Sequence[str], iteration: int) -> list[Group]:
    """This rank's groups of an iteration; the draw does not depend on the number of ranks."""
    chosen = prompts_of_iteration(len(prompts), config.train.prompts_per_iteration, iteration, config.seed)
    groups = []
    for slot in range(data_rank() * len(chosen) // data_size(), (data_rank() + 1) * len(chosen) // data_size()):
        seeds = sample_seeds(config.seed, iteration, slot, range(config.train.group_size))
        latent_seeds = seeds[:1].expand(len(seeds)) if config.sampling.shared_initial_noise else seeds
        groups.append(Group(slot=slot, prompt=prompts[chosen[slot]], seeds=seeds, latent_seeds=latent_seeds))
    return groups


def position_steps(config: Config, steps: Sequence[int], iteration: int) -> list[int]:
    """Those of the trained steps on which the KL to the anchor is taken (`kl.position_fraction`), at least one."""
    count = max(round(config.kl.position_fraction * len(steps)), 1)
    return sorted(steps[i] for i in permutation(len(steps), config.seed, "position", iteration)[:count])


def update_schedule(
    config: Config, iteration: int, groups: Sequence[Group], steps: Sequence[int], kept: Sequence[bool]
) -> list[list[Transition]]:
    """The transitions of each optimizer step: every kept sample is in each, at other timesteps each time.

    Args:
        config: validated settings.
        iteration: seeds the order of the timesteps.
        groups: this rank's.
        steps: the trained steps.
        kept: of each sample, in the order of the groups, whether it is trained.
    """
    orders = []
    for group in groups:
        for sample in range(len(group.seeds)):
            index = (iteration, group.slot, sample)
            permuted = config.train.timestep_permutation
            orders.append(permutation(len(steps), config.seed, "timesteps", *index) if permuted else range(len(steps)))
    updates = config.train.optimizer_steps
    return [
        [
            (sample, steps[orders[sample][position]])
            for position in range(u * len(steps) // updates, (u + 1) * len(steps) // updates)
            for sample in range(len(orders))
            if kept[sample]
        ]
        for u in range(updates)
    ]
