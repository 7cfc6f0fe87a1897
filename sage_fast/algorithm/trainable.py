"""What settings need so that a run of them can learn."""

from __future__ import annotations

from sage_fast.algorithm.kl_weight import FEEDBACKS
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import Resolved
from sage_fast.config.rank_checks import check_choices, check_ranks, no_gradient, sampler_in_words
from sage_fast.config.schema import Config
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import world_size


def check_trainable(config: Config, ranks: int | None = None) -> Resolved:
    """Resolve the settings of a run and check that they can train, before a model is loaded.

    Args:
        config: settings of the run.
        ranks: world size; None takes that of this process.

    Raises:
        UserError: a sampler outside its range, no stochastic step, equal samples, more optimizer steps than trained
            transitions, a KL that is always 0 or that needs rollout log-probs where there are none, averaged weights
            without an average, one part to balance, a lambda that cannot move, or more ranks than samples.
    """
    check_choices(config.sampling, config.objective, config.train, config.reward.part_weights)
    resolved, s, train = Resolved(config), config.sampling, config.train
    trainable = min(len(resolved.trained_steps(table)) for table in resolved.windows)
    rows = sampler_in_words(s)
    if trainable == 0:
        raise no_gradient(s)
    noiseless = f"{rows} adds no noise, and all samples of a group would be equal; the nearest choice is false"
    s.require(bool(resolved.table.stochastic_steps) or not s.shared_initial_noise, "shared_initial_noise", noiseless)
    together = s.shared_initial_noise and resolved.objective.surrogate.scores_rollout
    needs = "expected sampling.shared_initial_noise and a surrogate that scores rollouts; the nearest choice is noise"
    config.objective.require(together or config.objective.direction == "noise", "direction", needs)
    share = f" and train.timestep_fraction = {train.timestep_fraction:g}" * (train.timestep_fraction < 1)
    if trainable < train.optimizer_steps:
        raise UserError(
            f"train.optimizer_steps = {train.optimizer_steps}: {rows}{share} gives {trainable} trained transition(s) a "
            f"sample; the nearest valid value is {trainable}"
        )
    _check_kl(resolved.objective)
    check_ranks(train, config.model.sequence_parallel, ranks or world_size())
    return resolved


def _check_kl(objective: Objective) -> None:
    """Check that the KL can act and that lambda can move.

    Raises:
        UserError: the KL is always 0 or needs log-probs of the rollout where there are none, or lambda cannot move.
    """
    kl, strategy, feedback = objective.kl, objective.strategy, FEEDBACKS[objective.kl.feedback]
    kl.require(
        objective.surrogate.scores_rollout or not strategy.velocity or objective.closed_form,
        "velocity_term",
        f"objective.surrogate = {objective.settings.surrogate} scores no step of the rollout; the nearest choice is "
        "closed_form, or kl.strategy = moving",
    )
    refreshed = strategy.moves and kl.anchor_interval == 1
    at_anchor = strategy.anchor is None or kl.beta_pos == 0 or refreshed
    at_rollout = not strategy.velocity or kl.beta_vel == 0 or objective.closed_form
    if objective.kl_acts and at_anchor and at_rollout and not objective.off_policy:
        where = f"kl.strategy = {kl.strategy!r}" + " at kl.anchor_interval = 1" * refreshed
        raise UserError(
            f"train.optimizer_steps = 1: the KL of {where} is 0 in the first update of an iteration; expected at least "
            "2, or kl.strategy = 'none'"
        )
    positive = f"feedback {kl.feedback!r} multiplies lambda; expected above 0, such as 1e-07"
    kl.require(kl.lambda_min > 0 or not feedback.holds_share or not objective.kl_acts, "lambda_min", positive)
    kl.require(
        not feedback.holds_share or not strategy.velocity or strategy.anchor is not None or objective.closed_form,
        "feedback",
        f"strategy {kl.strategy!r} has a gradient to hold only with kl.velocity_term = closed_form",
    )
