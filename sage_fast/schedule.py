"""Which transitions an iteration has and which of them it trains, from the settings alone."""

from __future__ import annotations

import math

from sage_fast.config import Config
from sage_fast.engine.distributed import world_size
from sage_fast.seeding import derive_seed, permutation
from sage_fast.transitions import TransitionTable, sigma_schedule, transition_table


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
    """The stochastic steps that an iteration trains; a random subset where the fraction is below 1."""
    steps = table.stochastic_steps
    count = math.ceil(config.train.timestep_fraction * len(steps))
    if config.train.timestep_permutation and count < len(steps):
        order = permutation(len(steps), config.seed, "trained-steps", iteration)
        steps = sorted(steps[i] for i in order[:count])
    return steps[:count]


def check_trainable(config: Config) -> None:
    """What settings and ranks make impossible, before a model is loaded.

    Raises:
        ValueError: no stochastic step, more optimizer steps than trained transitions, or groups that do not divide
            among the ranks.
    """
    s, train = config.sampling, config.train
    table = configured_table(config)
    starts = range(s.steps - s.sde_window + 1) if s.sde_window else [0]
    windows = [table.window(start, start + s.sde_window) if s.sde_window else table for start in starts]
    trainable = min(len(trained_steps(window, config, 0)) for window in windows)
    rows = f"sampler {s.sampler!r} with eta {s.eta:g} and {s.steps} steps"
    if trainable == 0:
        raise ValueError(
            f"{rows} has no stochastic step to train, so there is no policy gradient; expected sage, flow, dance, cps "
            "or exact with eta above 0"
        )
    if trainable < train.optimizer_steps:
        raise ValueError(
            f"train.optimizer_steps = {train.optimizer_steps}: {rows} gives {trainable} trained transition(s) a "
            f"sample; the nearest valid value is {trainable}"
        )
    if train.prompts_per_iteration % world_size():
        raise ValueError(
            f"train.prompts_per_iteration = {train.prompts_per_iteration}: expected a multiple of the {world_size()} "
            f"ranks; the nearest is {max(train.prompts_per_iteration // world_size(), 1) * world_size()}"
        )
