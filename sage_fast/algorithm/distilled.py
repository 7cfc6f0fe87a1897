"""What suits a distilled checkpoint. docs/explanation/samplers.md says why."""

from __future__ import annotations

from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.models.spec import Distillation

LARGEST_ETA = 0.2
"""Largest eta that rollouts of a distilled checkpoint are known to bear."""
LARGEST_NOISE_LEFT = 0.1
"""Standard deviation of the noise on a final latent above which a distilled checkpoint gets a
warning."""


def check_distilled(distillation: Distillation | None, objective: Objective) -> None:
    """Check that the settings suit a model that may predict the mean velocity of a step, before it
    is loaded.

    Raises:
        UserError: it does, with a surrogate for the velocity at one noise level.
    """
    predicts_mean = distillation is not None and distillation.mean_velocity
    objective.settings.require(
        objective.surrogate.scores_rollout or not predicts_mean,
        "surrogate",
        "fits the velocity at one noise level, and model.path is a step-distilled model, whose "
        "velocity is the mean over a step: its videos would blur; the nearest choice is 'clip'",
    )


def distillation_warnings(distillation: Distillation, resolved: ResolvedConfig) -> list[str]:
    """Return what in the settings is likely to spoil the videos of a distilled checkpoint."""
    warnings = []
    sampling = resolved.config.sampling
    eval_steps = resolved.config.eval.steps
    made = " or ".join(map(str, distillation.steps))
    for key, steps in (("sampling.steps", sampling.steps), ("eval.steps", eval_steps)):
        if steps not in distillation.steps:
            warnings.append(f"{key} = {steps}: the checkpoint is distilled for {made} steps")
    if distillation.mean_velocity and sampling.steps != eval_steps:
        warnings.append(
            f"sampling.steps = {sampling.steps} and eval.steps = {eval_steps}: a step-distilled "
            "model learns the steps that it is trained on, from one noise level to another; "
            "expected the same number"
        )
    if sampling.eta > LARGEST_ETA and resolved.table.stochastic_steps:
        warnings.append(
            f"sampling.eta = {sampling.eta:g}: the checkpoint is distilled, and in another trainer "
            "such a one broke at 0.7 and held at 0.2 (UniRL, pull request 347); expected at most "
            f"{LARGEST_ETA:g}"
        )
    left = max(float(each.excess_noise()[-1]) for each in resolved.windows)
    if left > LARGEST_NOISE_LEFT:
        warnings.append(
            f"sampling.sampler = {sampling.sampler}: with eta {sampling.eta:g} and "
            f"{sampling.steps} steps it leaves noise of std {left:.2g} on the scored latent; "
            "precise leaves none"
        )
    return warnings
