"""The settings of a run, resolved once: its loss, its transitions, and the steps that it trains."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.transitions import (
    TransitionTable,
    forward_table,
    sigma_schedule,
    transition_table,
)
from sage_fast.config.schema import Config
from sage_fast.util.seeding import permutation


class ResolvedConfig:
    """Settings, and what follows from several of their sections. A run makes it once.

    `check_trainable` also checks that the settings can train.

    Attributes:
        config: the settings.
        objective: the loss.
        table: all T transitions of the configured sampler.

    Raises:
        UserError: eta is outside the sampler's range.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.objective = Objective(config)
        sigmas = sigma_schedule(config.sampling.steps, config.sampling.shift)
        self.table = transition_table(sigmas, config.sampling.sampler, config.sampling.eta)

    @functools.cached_property
    def windows(self) -> list[TransitionTable]:
        """The table of every window of `sampling.sde_window` steps, ODE outside it; with 0 there is
        one, of all steps.

        If the length divides the number of steps, windows do not overlap: an end step is in as many
        as any other. If not, no choice of windows of one length does that, and they start at every
        step.
        """
        table = self.table
        length = self.config.sampling.sde_window or len(table)
        stride = 1 if len(table) % length else length
        return [
            table.window(start, start + length)
            for start in range(0, len(table) - length + 1, stride)
        ]

    def scored(self, table: TransitionTable) -> TransitionTable:
        """Return the transitions that training scores, one for each step of a rollout by
        `table`."""
        return table if self.objective.surrogate.scores_rollout else forward_table(table.sigmas)

    def trained_steps(self, table: TransitionTable, iteration: int = 0) -> list[int]:
        """Return the stochastic steps that an iteration trains of a rollout by `table`.

        With `train.timestep_fraction` below 1 they are a random subset. Their number is the same in
        every iteration.
        """
        train, steps = self.config.train, self.scored(table).stochastic_steps
        # the product of floats may be above it
        count = math.ceil(Fraction(str(train.timestep_fraction)) * len(steps))
        return sorted(
            steps[i]
            for i in permutation(len(steps), self.config.seed, "trained-steps", iteration)[:count]
        )

    @property
    def longest_window(self) -> list[int]:
        """The trained steps of the window that has most of them."""
        return max(map(self.trained_steps, self.windows), key=len)
