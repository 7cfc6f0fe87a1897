"""The objective of SAGE-GRPO as small pure functions on `[B]` tensors; docs/math.md gives the equations.

loss_i,t = -S_t surrogate(ratio or log-prob, A_i) + lambda_KL (beta_pos KL(theta || anchor) + beta_vel KL_vel)
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Literal, get_args

import torch
from torch import Tensor

from sage_fast.config import Feedback, KLConfig, KLStrategyName, ObjectiveConfig, Surrogate


def group_advantages(rewards: Tensor, valid: Tensor, *, clamp: float = 5.0, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """A_i = (R_i - mean) / (std + eps) within each group, population std (Eq. 10), clamped.

    Args:
        rewards: float `[P, G]`, one row per group.
        valid: bool `[P, G]`; False excludes a sample from its group's statistics and gives it advantage 0.
        clamp: bound on |A|.
        eps: constant of Eq. 10.

    Returns:
        Advantages `[P, G]`, and bool `[P]`: groups whose valid rewards are all equal (or fewer than two).
    """
    count = valid.sum(1, keepdim=True)
    filled = torch.where(valid, rewards, 0.0)
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(valid, rewards - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / count.clamp(min=1)).sqrt()
    high = torch.where(valid, rewards, -torch.inf).amax(1)
    low = torch.where(valid, rewards, torch.inf).amin(1)
    equal = (count[:, 0] < 2) | (high == low)
    advantages = torch.where(equal[:, None], 0.0, centred / (std + eps))
    return advantages.clamp(-clamp, clamp), equal


def _clipped_ratio(log_prob: Tensor, log_prob_old: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """min(ratio A, clip(ratio) A)."""
    ratio = torch.exp(log_prob - log_prob_old)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)


def _plain_log_prob(log_prob: Tensor, log_prob_old: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """log-prob x A (Eq. 43)."""
    return log_prob * advantage


SURROGATES = {"clip": _clipped_ratio, "log_prob": _plain_log_prob}
"""What is maximised, `[B]`, of (log-prob, log-prob of the rollout, advantage), each `[B]`, and the clip range."""
assert tuple(SURROGATES) == get_args(Surrogate), (
    "a surrogate is named in config.Surrogate and has its function in SURROGATES"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Per-sample terms `[B]` of one micro-batch; `total` carries the gradient."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    kl_anchor: Tensor
    kl_velocity: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLStrategy:
    """What a strategy penalises.

    Attributes:
        anchor: of the position term: `start`, the weights at the start of the run; `moving`, refreshed every
            `kl.anchor_interval` optimizer steps; None without the term.
        velocity: whether the KL to the rollout policy is penalised.
    """

    anchor: Literal["start", "moving"] | None
    velocity: bool


KL_STRATEGIES = {
    "none": KLStrategy(anchor=None, velocity=False),
    "fixed": KLStrategy(anchor="start", velocity=False),  # Eq. 11
    "stepwise": KLStrategy(anchor=None, velocity=True),  # Eq. 12
    "moving": KLStrategy(anchor="moving", velocity=False),  # Eq. 13
    "dual": KLStrategy(anchor="moving", velocity=True),  # Eq. 14
}
assert tuple(KL_STRATEGIES) == get_args(KLStrategyName), (
    "a KL strategy is named in config.KLStrategyName and has its row in KL_STRATEGIES"
)


def uses_anchor(kl: KLConfig) -> bool:
    """Whether there is a position term, and so an anchor."""
    return KL_STRATEGIES[kl.strategy].anchor is not None


def moves_anchor(kl: KLConfig) -> bool:
    """Whether the anchor is refreshed during the run."""
    return KL_STRATEGIES[kl.strategy].anchor == "moving"


def uses_velocity(kl: KLConfig) -> bool:
    """Whether there is a velocity term."""
    return KL_STRATEGIES[kl.strategy].velocity


def stores_rollout_velocities(kl: KLConfig) -> bool:
    """Whether the velocity term needs the rollout's velocities, which it does in closed form."""
    return uses_velocity(kl) and kl.velocity_term == "closed_form"


def sage_loss(
    log_prob: Tensor,
    kl_anchor: Tensor,
    kl_old: Tensor,
    *,
    log_prob_old: Tensor,
    advantage: Tensor,
    equalizer: Tensor,
    kl_weight: float,
    objective: ObjectiveConfig,
    kl: KLConfig,
) -> Loss:
    """The whole loss from the outputs of `transition_score`, all `[B]`.

    Args:
        log_prob, kl_anchor, kl_old: of the policy in training.
        log_prob_old: of the rollout.
        advantage: A_i.
        equalizer: S_t of each transition (ones if it is switched off).
        kl_weight: lambda_KL.
    """
    surrogate = SURROGATES[objective.surrogate]
    policy = -equalizer * surrogate(log_prob, log_prob_old, advantage, objective.clip_range)
    velocity = kl_old if kl.velocity_term == "closed_form" else log_prob_old - log_prob
    regularizer = torch.zeros_like(policy)
    if uses_anchor(kl):
        regularizer = regularizer + kl.beta_pos * kl_anchor
    if uses_velocity(kl):
        regularizer = regularizer + kl.beta_vel * velocity
    ratio = torch.exp(log_prob - log_prob_old).detach()
    return Loss(
        total=policy + kl_weight * regularizer,
        policy=policy.detach(),
        kl=regularizer.detach(),
        kl_anchor=kl_anchor.detach(),
        kl_velocity=velocity.detach(),
        ratio=ratio,
        clipped=((ratio - 1).abs() > objective.clip_range).float(),
    )


FEEDBACKS = {"paper": (0.9, 1.1), "ppo": (1.1, 0.9)}
"""Factors of lambda when the KL is too large, and when it is too small; `off` has none."""
assert (*FEEDBACKS, "off") == get_args(Feedback), "a feedback is named in config.Feedback and has its row in FEEDBACKS"


class KLController:
    """lambda_KL: linear warm-up (Eq. 41), then feedback on the mean of the last H observed KLs (Eq. 42).

    Eq. 42 lowers lambda when the KL is too large ("relax"); `ppo` is the usual, opposite direction. The KL given to
    `update` must be the same on every rank, so that lambda is.
    """

    def __init__(self, config: KLConfig) -> None:
        self.config = config
        self.step = 0
        self.value = config.lambda_min
        self.history: deque[float] = deque(maxlen=config.history)

    def update(self, kl: float) -> None:
        """Record the KL of one optimizer step and move lambda."""
        config = self.config
        self.step += 1
        self.history.append(kl)
        span = config.lambda_max - config.lambda_min
        if self.step <= config.warmup_steps:
            self.value = config.lambda_min + span * self.step / config.warmup_steps
        elif config.feedback == "off":
            self.value = config.lambda_max
        else:
            mean = sum(self.history) / len(self.history)
            too_large, too_small = FEEDBACKS[config.feedback]
            if mean > 1.5 * config.target:
                self.value *= too_large
            elif mean < 0.5 * config.target:
                self.value *= too_small
            self.value = min(max(self.value, config.lambda_min), config.lambda_max)

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "value": self.value, "history": list(self.history)}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.value = state["step"], state["value"]
        self.history = deque(state["history"], maxlen=self.config.history)
