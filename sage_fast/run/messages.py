"""What a run prints: its method in words, the lines of an iteration, and warnings about its
settings."""

from __future__ import annotations

import math
from typing import Any

from tqdm import tqdm

from sage_fast.algorithm.distilled import distillation_warnings
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.transitions import SAMPLERS
from sage_fast.config.schema import ODE_SAMPLERS, SamplingConfig, TrainConfig
from sage_fast.eval.scores import format_number
from sage_fast.models.spec import Distillation
from sage_fast.run.pace import pace_warning
from sage_fast.util.meters import REWARD_PART

INERT_LAMBDA = 1e-5
"""Largest lambda_KL of the paper, at which the KL's share of the gradient is below 1e-4: it holds
nothing."""


def method_of(objective: Objective, sampling: SamplingConfig) -> str:
    """Return the method in words, such as `SAGE-GRPO: sage SDE, eta 0.5, equalizer, dual KL, lambda
    0.05`.

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
    if row.uses_errors:
        words.append(f"beta {objective.settings.nft_beta:g}")
    return f"{'SAGE-' * own}{row.title}: {', '.join(words)}, {_kl_in_words(objective)}"


def _kl_in_words(objective: Objective) -> str:
    if not objective.kl_acts:
        return "no KL"
    kl = objective.kl
    rises = f"{kl.lambda_min:g} to " if kl.lambda_min < kl.lambda_max else ""
    return f"{kl.strategy} KL, lambda {rises}{kl.lambda_max:g}"


def format_row(row: dict[str, Any], iterations: int, seconds_left: float) -> str:
    """Format an iteration's metrics and the time left as three lines of 80 columns, for up to four
    reward parts."""
    parts = {
        key.removeprefix(REWARD_PART): value
        for key, value in row.items()
        if key.startswith(REWARD_PART)
    }
    label = f"{row['iteration'] + 1:>5}/{iterations}"
    first = f"{label}  reward {row['reward/mean']:.4f}  std {format_number(row['reward/std'], 3)}  "
    first += " ".join(f"{part} {value:.3f}" for part, value in parts.items())
    if "ratio/mean" in row:
        off = max(1 - row["ratio/min"], row["ratio/max"] - 1)
        second = f"loss {row['loss']:.1e}  kl {row['kl/anchor']:.1e}  ratio within {off:.1e} of 1, "
        second += f"{100 * row['ratio/clip_fraction']:.0f} % clipped"
        third = f"gradient norm {row['grad_norm']:.1e}  learning rate {row['learning_rate']:.1e}  "
    else:
        second, third = "no update: the rewards of every group are equal", ""
    third += f"{row['time/total']:.1f} s, {tqdm.format_interval(seconds_left)} left"
    return f"\n{'':>{len(label)}}  ".join((first, second, third))


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


def grace_warning(row: dict[str, Any], train: TrainConfig, *, collective: bool) -> str | None:
    """Return what a signal loses, and the settings that save it; None if `train.grace_seconds`
    saves every iteration.

    Args:
        row: metrics of an iteration, with its times.
        collective: forwards are collective, so that a rollout cannot pause; an update never can.
    """
    update, before = (
        row["time/train"] / train.optimizer_steps,
        row["time/total"] - row["time/train"],
    )
    seconds = max(update, before) if collective else update
    if seconds <= train.grace_seconds / 2:
        return None
    enough = 10 * math.ceil(seconds / 4)  # a quarter more than twice as long
    return (
        f"a signal can lose up to {train.checkpoint_interval} iterations: {seconds:.0f} s of one "
        f"cannot be interrupted and half of train.grace_seconds = {train.grace_seconds:g} is for "
        f"that. {enough} is enough, if the scheduler waits longer: Slurm's "
        f"--signal=B:USR1@{enough + 100} (slurm.sbatch, which `init` writes), or torchrun's "
        "--shutdown-timeout"
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
    guided = guidance_warning(
        resolved.objective, sampling.guidance_scale, config.eval_guidance_scale
    )
    distilled = [] if distillation is None else distillation_warnings(distillation, resolved)
    return [
        *filter(None, [guided, off_policy_warning(resolved.objective), pace_warning(resolved)]),
        *distilled,
    ]
