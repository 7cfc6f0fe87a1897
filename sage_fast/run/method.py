"""The method of a run in words."""

from __future__ import annotations

from sage_fast.algorithm.kl_weight import FEEDBACKS
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.transitions import SAMPLERS
from sage_fast.config.schema import ODE_SAMPLERS, SamplingConfig


def method_of(objective: Objective, sampling: SamplingConfig) -> str:
    """Return the method in words, such as `SAGE-GRPO: sage SDE, eta 0.5, equalizer, dual KL, lambda 0.05`.

    It is SAGE-GRPO if a log-corrected SDE is scored with the equalizer.
    """
    sampler, equalized, row = sampling.sampler, objective.equalizes, objective.surrogate
    own = row.scores_rollout and SAMPLERS[sampler].log_corrected and equalized
    noisy = sampler not in ODE_SAMPLERS
    words = [f"{sampler} SDE, eta {sampling.eta:g}" if noisy else f"{sampler.upper()} rollouts"]
    if noisy and sampling.sde_window:
        words.append(f"noise in {sampling.sde_window} of {sampling.steps} steps")
    if equalized or row.scores_rollout:
        words.append("equalizer" if equalized else "no equalizer")
    if row.has_beta:
        words.append(f"beta {objective.settings.nft_beta:g}")
    return f"{'SAGE-' * own}{row.title}: {', '.join(words)}, {_kl_in_words(objective)}"


def _kl_in_words(objective: Objective) -> str:
    if not objective.kl_acts:
        return "no KL"
    kl = objective.kl
    row = FEEDBACKS[kl.feedback]
    if row.holds_share:
        return f"{kl.strategy} KL, {100 * kl.target_share:g} % of the gradient"
    most = kl.lambda_max if row.capped or row.too_large is None else kl.lambda_limit
    span = f"{kl.lambda_min:g} to {most:g}" if kl.lambda_min < most else f"{most:g}"
    return f"{kl.strategy} KL, lambda {span}"
