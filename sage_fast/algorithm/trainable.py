"""What settings need so that a run of them can learn."""

from __future__ import annotations

import dataclasses

from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.deepspeed import deepspeed_overrides
from sage_fast.config.loader import leaves
from sage_fast.config.rank_checks import (
    check_choices,
    check_ranks,
    check_streaming,
    no_gradient,
    sampler_in_words,
)
from sage_fast.config.schema import Config
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import check_agreement, world_size

NODE_PATHS = {
    "data.prompts",
    "data.eval_prompts",
    "data.embedding_cache",
    "model.path",
    "model.weights",
}
"""Settings that may name another path on each node, for copies of the same files."""


def check_same_settings(config: Config, **states: object) -> None:
    """Check that all ranks run the same settings: a node may read an older copy of a file.
    Collective.

    Ranks with other settings would make other collectives, and wait for each other.

    Args:
        states: further values that each rank has found for itself.

    Raises:
        UserError: on all ranks, if one differs.
    """
    settings = leaves(dataclasses.asdict(config)) | states
    # a node may name another file with the same content
    settings["train.deepspeed_config"] = deepspeed_overrides(config.train)
    shared = {name: value for name, value in settings.items() if name not in NODE_PATHS}
    check_agreement(shared, ": do all nodes read the same files and variables?")


def check_trainable(config: Config, ranks: int | None = None) -> ResolvedConfig:
    """Resolve the settings of a run and check that they can train, before a model is loaded.

    Args:
        config: settings of the run.
        ranks: world size; None takes that of this process.

    Raises:
        UserError: a sampler outside its range, no stochastic step, equal samples, more optimizer
            steps than trained transitions, a KL that is always 0 or that needs rollout log-probs
            where there are none, averaged weights without an average, one part to balance,
            streamed blocks whose weights are trained or gathered, or more ranks than samples.
    """
    check_choices(config.sampling, config.objective, config.train, config.reward.part_weights)
    check_streaming(config.model, config.train)
    resolved = ResolvedConfig(config)
    sampling = config.sampling
    train = config.train
    trainable = min(len(resolved.trained_steps(table)) for table in resolved.windows)
    if trainable == 0:
        raise no_gradient(sampling)

    sampler = sampler_in_words(sampling)
    is_stochastic = bool(resolved.table.stochastic_steps)
    sampling.require(
        is_stochastic or not sampling.shared_initial_noise,
        "shared_initial_noise",
        f"{sampler} adds no noise, and all samples of a group would be equal; the nearest choice "
        "is false",
    )

    if trainable < train.optimizer_steps:
        share = ""
        if train.timestep_fraction < 1:
            share = f" and train.timestep_fraction = {train.timestep_fraction:g}"
        raise UserError(
            f"train.optimizer_steps = {train.optimizer_steps}: {sampler}{share} gives {trainable} "
            f"trained transition(s) a sample; the nearest valid value is {trainable}"
        )
    _check_kl(resolved.objective)
    check_ranks(train, config.model.sequence_parallel, ranks or world_size())
    return resolved


def _check_kl(objective: Objective) -> None:
    """Check that the KL can act.

    Raises:
        UserError: the KL is always 0 or needs log-probs of the rollout where there are none.
    """
    kl = objective.kl
    strategy = objective.strategy
    needs_log_probs = strategy.velocity and not objective.closed_form
    kl.require(
        objective.surrogate.scores_rollout or not needs_log_probs,
        "velocity_term",
        f"objective.surrogate = {objective.settings.surrogate} scores no step of the rollout; the "
        "nearest choice is closed_form, or kl.strategy = moving",
    )
    # In the first update the policy is the rollout's: a KL to it is 0, and so is one to an anchor
    # that was just refreshed.
    refreshed = strategy.moves and kl.anchor_interval == 1
    no_position = strategy.anchor is None or kl.beta_pos == 0 or refreshed
    no_velocity = not strategy.velocity or kl.beta_vel == 0 or objective.closed_form
    if objective.kl_acts and no_position and no_velocity and not objective.off_policy:
        where = f"kl.strategy = {kl.strategy!r}"
        if refreshed:
            where += " at kl.anchor_interval = 1"
        raise UserError(
            f"train.optimizer_steps = 1: the KL of {where} is 0 in the first update of an "
            "iteration; expected at least 2, or kl.strategy = 'none'"
        )
