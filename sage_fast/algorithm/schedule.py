"""Schedule of an iteration: its transitions, and the order of its updates.

Everything follows from the settings, the iteration and the number of ranks, so every rank knows what the others do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sage_fast.algorithm.iteration_samples import Sample
from sage_fast.algorithm.kl_weight import FEEDBACKS
from sage_fast.algorithm.objective import SURROGATES, Objective, SurrogateRow
from sage_fast.algorithm.transitions import (
    SAMPLERS,
    TransitionTable,
    forward_table,
    sigma_schedule,
    transition_table,
)
from sage_fast.config.fields import require
from sage_fast.config.rank_checks import check_ranks
from sage_fast.config.schema import Config, SamplingConfig, TrainConfig
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import world_size
from sage_fast.util.seeding import derive_seed, permutation

Transition = tuple[int, int]
"""(sample, step)."""


def configured_table(sampling: SamplingConfig) -> TransitionTable:
    """Return all transitions of the configured sampler."""
    sigmas = sigma_schedule(sampling.steps, sampling.shift)
    return transition_table(sigmas, sampling.sampler, sampling.eta)


def iteration_tables(
    table: TransitionTable, sampling: SamplingConfig, groups: int, *, seed: int, iteration: int
) -> list[TransitionTable]:
    """Return each group's transitions; with `sampling.sde_window`, ODE outside a random contiguous window."""
    tables, alone = windows(table, sampling.sde_window), sampling.window_per_prompt
    keys = [(iteration, group) if alone else (iteration,) for group in range(groups)]
    return [tables[derive_seed(seed, "window", *key) % len(tables)] for key in keys]


def windows(table: TransitionTable, length: int) -> list[TransitionTable]:
    """Return the table of every window of `length` steps, `sampling.sde_window`; with 0 there is one, of all steps.

    If the length divides the number of steps, windows do not overlap: an end step is in as many as any other. If not,
    no choice of windows of one length does that, and they start at every step.
    """
    length = length or len(table)
    stride = 1 if len(table) % length else length
    return [table.window(start, start + length) for start in range(0, len(table) - length + 1, stride)]


def scored_table(table: TransitionTable, surrogate: SurrogateRow) -> TransitionTable:
    """Return the transitions that training scores, one for each step of a rollout by `table`."""
    return table if surrogate.scores_rollout else forward_table(table.sigmas)


def trained_steps(
    table: TransitionTable, surrogate: SurrogateRow, train: TrainConfig, *, seed: int, iteration: int
) -> list[int]:
    """Return the stochastic steps an iteration trains.

    With `train.timestep_fraction` below 1 they are a subset: random with `train.timestep_permutation`, else the first.
    """
    steps = scored_table(table, surrogate).stochastic_steps
    count = math.ceil(train.timestep_fraction * len(steps))
    if train.timestep_permutation and count < len(steps):
        order = permutation(len(steps), seed, "trained-steps", iteration)
        steps = sorted(steps[i] for i in order[:count])
    return steps[:count]


def longest_window(config: Config) -> list[int]:
    """Return the trained steps of the window that has most of them."""
    surrogate, train, seed = SURROGATES[config.objective.surrogate], config.train, config.seed
    tables = windows(configured_table(config.sampling), config.sampling.sde_window)
    return max((trained_steps(table, surrogate, train, seed=seed, iteration=0) for table in tables), key=len)


def check_trainable(config: Config, ranks: int | None = None) -> None:
    """Check that the settings can train, before a model is loaded.

    Args:
        config: settings of the run.
        ranks: world size; None takes that of this process.

    Raises:
        UserError: a sampler outside its range, no stochastic step, equal samples, more optimizer steps than trained
            transitions, a KL that is always 0 or that needs rollout log-probs where there are none, averaged weights
            without an average, one part to balance, a lambda that cannot move, or more ranks than samples.
    """
    s, train, surrogate = config.sampling, config.train, SURROGATES[config.objective.surrogate]
    largest = SAMPLERS[s.sampler].largest_eta
    require(
        s.eta <= largest, "sampling.eta", s.eta, f"{s.sampler} is defined up to {largest:g}; the nearest is {largest:g}"
    )
    table = configured_table(s)
    tables = windows(table, s.sde_window)
    trainable = min(len(trained_steps(each, surrogate, train, seed=config.seed, iteration=0)) for each in tables)
    rows = f"sampler {s.sampler!r} with eta {s.eta:g} and {s.steps} steps"
    if trainable == 0:
        forward = " or ".join(name for name, row in SURROGATES.items() if not row.scores_rollout)
        raise UserError(
            f"{rows} has no stochastic step to train, so there is no policy gradient; expected one that adds "
            f"noise, with eta above 0, or objective.surrogate = {forward}"
        )
    require(
        bool(table.stochastic_steps) or not s.shared_initial_noise,
        "sampling.shared_initial_noise",
        s.shared_initial_noise,
        f"{rows} adds no noise, and all samples of a group would be equal; the nearest choice is false",
    )
    share = f" and train.timestep_fraction = {train.timestep_fraction:g}" * (train.timestep_fraction < 1)
    if trainable < train.optimizer_steps:
        raise UserError(
            f"train.optimizer_steps = {train.optimizer_steps}: {rows}{share} gives {trainable} trained transition(s) a "
            f"sample; the nearest valid value is {trainable}"
        )
    _check_kl(Objective.of(config))
    require(
        train.ema_decay > 0 or not s.averaged_weights,
        "sampling.averaged_weights",
        s.averaged_weights,
        f"there is no average with train.ema_decay = {train.ema_decay:g}; expected a decay above 0, such as 0.9; the "
        "nearest choice is false",
    )
    weighted = [part for part, weight in config.reward.part_weights.items() if weight]
    require(
        len(weighted) > 1 or not config.objective.balanced_rewards,
        "objective.balanced_rewards",
        config.objective.balanced_rewards,
        f"the reward has one part with a weight, {weighted[0]}, and there is nothing to balance; the nearest choice is "
        "false",
    )
    check_ranks(train, config.model.sequence_parallel, ranks or world_size())


def _check_kl(objective: Objective) -> None:
    """Check that the KL can act and that lambda can move.

    Raises:
        UserError: the KL is always 0 or needs log-probs of the rollout where there are none, or lambda cannot move.
    """
    kl, strategy, feedback = objective.kl, objective.strategy, FEEDBACKS[objective.kl.feedback]
    require(
        objective.surrogate.scores_rollout or not strategy.velocity or objective.closed_form,
        "kl.velocity_term",
        kl.velocity_term,
        f"objective.surrogate = {objective.settings.surrogate} scores no step of the rollout; the nearest choice is "
        "closed_form, or kl.strategy = moving",
    )
    velocity_alone = strategy.anchor is None or kl.beta_pos == 0 < kl.beta_vel
    if velocity_alone and strategy.velocity and objective.closed_form and not objective.off_policy:
        raise UserError(
            f"train.optimizer_steps = 1: the KL of kl.strategy = {kl.strategy!r} in closed form is 0 in the first "
            "update of an iteration; expected at least 2, or kl.strategy = 'none'"
        )
    require(
        kl.lambda_min > 0 or not feedback.starts_positive or not objective.kl_acts,
        "kl.lambda_min",
        kl.lambda_min,
        f"feedback {kl.feedback!r} multiplies lambda; expected above 0, such as 1e-07",
    )
    require(
        not feedback.holds_share or not strategy.velocity or strategy.anchor is not None or objective.closed_form,
        "kl.feedback",
        kl.feedback,
        f"strategy {kl.strategy!r} has a gradient to hold only with kl.velocity_term = closed_form",
    )


def transitions_of(samples: Sequence[Sample], steps: Sequence[Sequence[int]]) -> list[Transition]:
    """Return the transitions of `samples`, numbered from 0, at the `steps` of their groups; ordered by step."""
    found = [(number, t) for number, sample in enumerate(samples) for t in steps[sample.group]]
    return sorted(found, key=lambda transition: transition[::-1])


def update_schedule(
    train: TrainConfig,
    samples: Sequence[Sample],
    steps: Sequence[Sequence[int]],
    kept: Sequence[bool],
    *,
    seed: int,
    iteration: int,
) -> list[list[Transition]]:
    """Return the transitions of each optimizer step. Each step has every kept sample, at timesteps of its own.

    Args:
        train: section `train`.
        samples: all samples of the iteration; a transition refers to a sample by its index here.
        steps: trained steps of each group.
        kept: whether each sample is trained.
        seed, iteration: seed the order of the timesteps.
    """
    orders = []
    for sample in samples:
        own, index = steps[sample.group], (iteration, sample.group, sample.index)
        permuted = train.timestep_permutation
        order = permutation(len(own), seed, "timesteps", *index) if permuted else range(len(own))
        orders.append([own[i] for i in order])
    updates = train.optimizer_steps
    return [
        [
            (sample, order[position])
            for position in range(max(map(len, orders)))
            for sample, order in enumerate(orders)
            if kept[sample] and u * len(order) // updates <= position < (u + 1) * len(order) // updates
        ]
        for u in range(updates)
    ]
