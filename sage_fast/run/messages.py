"""What a run prints at its start: its method in words, and warnings about its settings."""

from __future__ import annotations

from sage_fast.algorithm.distilled import distillation_warnings
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.transitions import sampler_row
from sage_fast.config.schema import ODE_SAMPLERS, SamplingConfig
from sage_fast.models.spec import Distillation
from sage_fast.run.pace import pace_warning

INERT_LAMBDA = 1e-5
"""Largest lambda_KL of the paper, at which the KL's share of the gradient is below 1e-4: it holds
nothing."""


def method_of(objective: Objective, sampling: SamplingConfig) -> str:
    """Return the method in words, such as `SAGE-GRPO: sage SDE, eta 0.5, equalizer, dual KL, lambda
    0.05`.

    It is SAGE-GRPO if a log-corrected SDE is scored with the equalizer.
    """
    sampler = sampling.sampler
    equalized = objective.equalizes
    surrogate = objective.surrogate

    if sampler in ODE_SAMPLERS:
        words = [f"{sampler.upper()} rollouts"]
    else:
        words = [f"{sampler} SDE, eta {sampling.eta:g}"]
        if sampling.sde_window:
            words.append(f"noise in {sampling.sde_window} of {sampling.steps} steps")
    if equalized or surrogate.scores_rollout:
        words.append("equalizer" if equalized else "no equalizer")
    if surrogate.uses_errors:
        words.append(f"beta {objective.settings.nft_beta:g}")
    words.append(_kl_in_words(objective))

    title = surrogate.title
    if surrogate.scores_rollout and equalized and sampler_row(sampler).log_corrected:
        title = f"SAGE-{title}"
    return f"{title}: {', '.join(words)}"


def _kl_in_words(objective: Objective) -> str:
    if not objective.kl_acts:
        return "no KL"
    kl = objective.kl
    rises = f"{kl.lambda_min:g} to " if kl.lambda_min < kl.lambda_max else ""
    return f"{kl.strategy} KL, lambda {rises}{kl.lambda_max:g}"


def kl_holds(objective: Objective) -> bool:
    """Whether a KL holds the policy: one at a lambda that can do something."""
    return objective.kl_acts and objective.kl.lambda_max > INERT_LAMBDA


def guidance_warning(objective: Objective, trained: float, evaluated: float) -> str | None:
    """Return why evaluations at another guidance scale than training's will mislead; None if they
    will not."""
    if trained == evaluated or kl_holds(objective):
        return None
    return (
        f"sampling.guidance_scale = {trained:g} in training and eval.guidance_scale = "
        f"{evaluated:g} in evaluations, and no KL holds the policy ({_kl_in_words(objective)}): it "
        "learns what guidance does, and guidance on top of it over-sharpens "
        "(docs/how-to/choose-settings.md)"
    )


def off_policy_warning(objective: Objective) -> str | None:
    """Return what is missing where the later updates of an iteration may go any distance; None if
    nothing is."""
    row = objective.surrogate
    bounded = row.uses_ratio or row.uses_kl or row.uses_errors or kl_holds(objective)
    if bounded or not objective.off_policy:
        return None
    return (
        f"objective.surrogate = {objective.settings.surrogate} has no ratio to clip, and no KL "
        f"holds the policy ({_kl_in_words(objective)}): nothing holds the later updates of an "
        "iteration near the policy that rolled out; expected train.optimizer_steps = 1 without "
        "averaged weights, or a KL"
    )


def config_warnings(
    resolved: ResolvedConfig, distillation: Distillation | None = None
) -> list[str]:
    """Return what in the settings is likely to mislead or to train little; with it, to spoil a
    distilled checkpoint."""
    config, sampling = resolved.config, resolved.config.sampling
    found = [
        guidance_warning(resolved.objective, sampling.guidance_scale, config.eval_guidance_scale),
        off_policy_warning(resolved.objective),
        pace_warning(resolved),
    ]
    if distillation is not None:
        found += distillation_warnings(distillation, resolved)
    return [warning for warning in found if warning is not None]
