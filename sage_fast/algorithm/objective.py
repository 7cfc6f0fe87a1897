"""The SAGE-GRPO objective as small pure functions on `[B]` tensors; docs/math.md has the equations.

loss_i,t = -S_t surrogate(ratio or log-prob, A_i) + lambda_KL (beta_pos KL(theta || anchor) + beta_vel KL_vel)
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from sage_fast.config.schema import (
    AdvantageStd,
    Config,
    Feedback,
    KLConfig,
    KLStrategyName,
    ObjectiveConfig,
    Ratio,
    Surrogate,
)
from sage_fast.ops import Row

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Rewards of a group that differ by less than this share of their size are equal."""


def group_advantages(
    rewards: Tensor, valid: Tensor, *, std: AdvantageStd = "group", clamp: float = 5.0, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return A_i = (R_i - group mean) / (std + eps), clamped (Eq. 10).

    Args:
        rewards: float `[P, G]`, one row per group.
        valid: bool `[P, G]`; False excludes a sample from all statistics and gives it advantage 0.
        std: population std of each `group`, or over the `batch` of all unequal groups about their means.
        clamp: bound on |A|.
        eps: epsilon of Eq. 10.

    Returns:
        Advantages `[P, G]`, and bool `[P]`, True for groups whose valid rewards are equal up to rounding (or fewer than
        two).
    """
    count = valid.sum(1, keepdim=True)
    filled = torch.where(valid, rewards, 0.0)
    equal = (count[:, 0] < 2) | (_spread(rewards, valid) <= ROUNDING * filled.abs().amax(1))
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(valid & ~equal[:, None], rewards - mean, 0.0)
    squares, size = centred.square().sum(1, keepdim=True), count
    if std == "batch":
        squares, size = squares.sum(), count[~equal].sum()
    advantages = torch.where(equal[:, None], 0.0, centred / ((squares / size.clamp(min=1)).sqrt() + eps))
    return advantages.clamp(-clamp, clamp), equal


def _spread(values: Tensor, valid: Tensor) -> Tensor:
    """Return largest - smallest valid value of each group, `[P]`; -inf without one."""
    return torch.where(valid, values, -torch.inf).amax(1) - torch.where(valid, values, torch.inf).amin(1)


def balanced_rewards(parts: Mapping[str, Tensor], weights: Mapping[str, float], valid: Tensor) -> Tensor:
    """Return sum of weight x part normalised by its group, float64 `[P, G]`; 0 for a failed sample.

    It is 0 for a whole group where the parts cancel up to rounding. GDPO (arXiv 2601.05242) divides the sum by its
    deviation over the batch: `group_advantages` with `std="batch"`.

    Args:
        parts: part -> float32 `[P G]`; a part without a weight is left out.
        weights: weight of each part.
        valid: bool `[P, G]`, as for `group_advantages`.
    """
    total = torch.zeros(valid.shape, dtype=torch.float64)
    rounding = total[:, 0]
    for name, flat in parts.items():
        if weight := weights.get(name, 0.0):
            values = flat.view_as(valid).double()  # without an eps, which would keep parts from cancelling
            normalised, equal = group_advantages(values, valid, clamp=math.inf, eps=0.0)
            total = total + weight * normalised
            scale = _spread(normalised, valid) / _spread(values, valid)
            largest = torch.where(valid, values, 0.0).abs().amax(1)
            rounding = rounding + torch.where(equal, 0.0, ROUNDING * abs(weight) * scale * largest)
    return torch.where((_spread(total, valid) <= rounding)[:, None], 0.0, total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of x0_hat = x_s - s v, each `[B]` and a mean over the elements; `plus` and `minus` have no gradient.

    Attributes:
        present: mean((x0_hat - x0)^2) of v.
        rollout: the same of v_old.
        moved: mean((s (v - v_old))^2).
        plus: mean |x0_hat - x0| of v+.
        minus: the same of v-.
    """

    present: Tensor
    rollout: Tensor
    moved: Tensor
    plus: Tensor
    minus: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """What a surrogate sees of a micro-batch, each `[B]`.

    Attributes:
        log_ratio: log-ratio to the rollout policy, centred and normalised where the settings say so.
        kl_old: KL to the rollout policy, in closed form.
        drift: bias x KL, which is minus the expected plain log-ratio under the rollout policy.
        advantage: A_i.
        errors: errors of the predicted final sample, for a row that uses them.
    """

    log_ratio: Tensor
    kl_old: Tensor
    drift: Tensor
    advantage: Tensor
    errors: Errors | None = None


def _clipped_ratio(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Clipped surrogate: min(ratio A, clip(ratio) A)."""
    ratio, clip_range = torch.exp(scored.log_ratio), objective.clip_range
    return torch.minimum(ratio * scored.advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * scored.advantage)


def outside_clip_range(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    return (torch.exp(scored.log_ratio) - 1).abs() > objective.clip_range


def _masked_ratio(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Ratio x A without a gradient where the KL masks it (Flow-DPPO, arXiv 2606.11025)."""
    ratio = torch.exp(scored.log_ratio)
    return torch.where(_beyond_kl_limit(scored, objective), ratio.detach(), ratio) * scored.advantage


def _beyond_kl_limit(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Return where the KL is above its limit and the update would raise it: A and the log-ratio have one sign."""
    return (scored.kl_old > objective.kl_limit) & (scored.advantage * scored.log_ratio > 0)


def _plain_log_prob(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Log-prob x A (Eq. 43), up to the rollout's log-prob, which is constant.

    On noised samples this is advantage-weighted matching (arXiv 2509.25050): -A times the flow-matching loss.
    """
    return scored.log_ratio * scored.advantage


def _nft(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Negative DiffusionNFT loss (arXiv 2509.16117) times advantage_clamp / beta, up to a constant.

    The log-ratio is the centred one of the noised sample (docs/math.md).
    """
    return scored.advantage * scored.log_ratio - objective.nft_beta * objective.advantage_clamp * scored.drift


def _nft_adaptive(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Negative DiffusionNFT loss on x0, each branch divided by its mean error, times advantage_clamp / beta."""
    errors, beta, clamp = scored.errors, objective.nft_beta, objective.advantage_clamp
    assert errors is not None
    even = errors.rollout + beta**2 * errors.moved
    odd = beta * (errors.present - errors.rollout - errors.moved)
    share = 0.5 + 0.5 * scored.advantage / clamp
    plus, minus = (even + odd) / errors.plus.clamp(min=1e-5), (even - odd) / errors.minus.clamp(min=1e-5)
    return -clamp / beta * (share * plus + (1 - share) * minus)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurrogateRow:
    """A surrogate and what it needs.

    Attributes:
        title: name of the method that it makes.
        value: (what is scored, settings) -> `[B]`, maximised.
        held: (what is scored, settings) -> bool `[B]`, True where a limit takes effect; its share is
            `ratio/clip_fraction`.
        uses_ratio: clips the ratio, so that `objective.ratio` applies and rounding in the log-ratio does harm.
        uses_kl: needs the KL to the rollout policy in closed form.
        uses_errors: needs the errors of the predicted final sample, and weighs the noise levels itself; only on
            noised samples.
        centred: adds the KL to the rollout policy to the log-ratio, whatever `objective.ratio` says.
        scores_rollout: scores the steps of the rollout (reverse process), which itself yields their log-probs and
            velocities; otherwise the final samples with new noise (forward process, docs/math.md).
        has_beta: uses `objective.nft_beta`.
    """

    title: str
    value: Callable[[Scored, ObjectiveConfig], Tensor]
    held: Callable[[Scored, ObjectiveConfig], Tensor] = lambda scored, _: torch.zeros_like(scored.log_ratio)
    uses_ratio: bool = False
    uses_kl: bool = False
    uses_errors: bool = False
    centred: bool = False
    scores_rollout: bool = True
    has_beta: bool = False


SURROGATES = {
    "clip": SurrogateRow(title="GRPO", value=_clipped_ratio, held=outside_clip_range, uses_ratio=True),
    "kl_mask": SurrogateRow(title="GRPO with a KL mask", value=_masked_ratio, held=_beyond_kl_limit, uses_kl=True),
    "log_prob": SurrogateRow(title="GRPO without a ratio", value=_plain_log_prob),
    "nft": SurrogateRow(title="DiffusionNFT variant", value=_nft, centred=True, scores_rollout=False, has_beta=True),
    "nft_adaptive": SurrogateRow(
        title="DiffusionNFT variant (adaptive weights)", value=_nft_adaptive, centred=True, uses_errors=True,
        scores_rollout=False, has_beta=True,
    ),
    "awm": SurrogateRow(title="Advantage-weighted matching", value=_plain_log_prob, scores_rollout=False),
}  # fmt: skip
assert tuple(SURROGATES) == get_args(Surrogate), (
    "a surrogate is named in config.Surrogate and has its row in SURROGATES"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioRow:
    """Preparation of the log-ratio for a surrogate that clips the ratio.

    Attributes:
        centred: add the KL to the rollout policy, so that the mean log-ratio is zero.
        normalised: multiply by S_t, so that the clip acts alike at every step.
    """

    centred: bool
    normalised: bool


RATIOS = {
    "plain": RatioRow(centred=False, normalised=False),
    "centred": RatioRow(centred=True, normalised=False),
    "normalised": RatioRow(centred=True, normalised=True),
}
assert tuple(RATIOS) == get_args(Ratio), "a ratio is named in config.Ratio and has its row in RATIOS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Per-sample terms `[B]` of a micro-batch; `total` and `policy` carry gradients, `ratio` is the prepared one."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    kl_anchor: Tensor
    kl_velocity: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLStrategy:
    """The KL terms of a strategy.

    Attributes:
        anchor: anchor of the position term: `start`, the weights at the start of the run; `moving`, refreshed every
            `kl.anchor_interval` optimizer steps; None for no position term.
        velocity: whether the KL to the rollout policy is penalised.
    """

    anchor: Literal["start", "moving"] | None
    velocity: bool

    @property
    def moves(self) -> bool:
        """Whether the anchor is refreshed during the run."""
        return self.anchor == "moving"


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


def surrogate_of(objective: ObjectiveConfig) -> SurrogateRow:
    return SURROGATES[objective.surrogate]


def strategy_of(kl: KLConfig) -> KLStrategy:
    return KL_STRATEGIES[kl.strategy]


def kl_acts(kl: KLConfig) -> bool:
    """Return whether the loss has a KL term of a weight above 0."""
    row = strategy_of(kl)
    return kl.lambda_max > 0 and (row.anchor is not None) * kl.beta_pos + row.velocity * kl.beta_vel > 0


def has_closed_form(kl: KLConfig) -> bool:
    """Return whether the velocity term is the KL itself, not its estimate from the rollout's noise."""
    return kl.velocity_term == "closed_form"


def uses_closed_form(kl: KLConfig) -> bool:
    """Return whether the loss has a velocity term in closed form."""
    return strategy_of(kl).velocity and has_closed_form(kl)


def equalizes(objective: ObjectiveConfig) -> bool:
    """Return whether the policy term is weighted by S_t."""
    return objective.equalizer and not surrogate_of(objective).uses_errors


def centres_ratio(objective: ObjectiveConfig) -> bool:
    """Return whether the KL to the rollout policy is added to the log-ratio."""
    row = surrogate_of(objective)
    return row.centred or (row.uses_ratio and RATIOS[objective.ratio].centred)


def normalises_ratio(objective: ObjectiveConfig) -> bool:
    """Return whether the log-ratio is multiplied by S_t."""
    return surrogate_of(objective).uses_ratio and RATIOS[objective.ratio].normalised


def is_off_policy(config: Config) -> bool:
    """Return whether an update may start from other weights than the rollout's."""
    return config.train.optimizer_steps > 1 or config.sampling.averaged_weights


def stores_rollout_velocities(config: Config) -> bool:
    """Return whether the loss needs the rollout's velocities, for the KL to the rollout policy in closed form.

    At the weights of the rollout it does not: that KL and its gradient are 0 there.
    """
    needed = centres_ratio(config.objective) or uses_closed_form(config.kl) or surrogate_of(config.objective).uses_kl
    return needed and is_off_policy(config)


def spares_anchor(config: Config) -> bool:
    """Return whether an anchor equal to the present weights needs no forward.

    The rollout stored its velocities, or the policy stays at the anchor within an iteration.
    """
    stored = surrogate_of(config.objective).scores_rollout or stores_rollout_velocities(config)
    return not config.sampling.averaged_weights and (stored or not is_off_policy(config))


def scores_noised_samples(config: Config) -> bool:
    """Return whether the loss needs a forward of the rollout policy at each noised sample."""
    return stores_rollout_velocities(config) and not surrogate_of(config.objective).scores_rollout


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
    bias: Tensor | float = 1.0,
    row: Row | None = None,
    mean_errors: Sequence[Tensor] = (),
) -> Loss:
    """Compute the whole loss from the outputs of `transition_score`; all tensors are `[B]`.

    Args:
        log_prob: log-prob under the current policy.
        kl_anchor: KL of the current policy to the anchor.
        kl_old: KL of the current policy to the rollout policy.
        log_prob_old: log-prob under the rollout policy.
        advantage: A_i.
        equalizer: S_t of each transition; a normalised ratio uses it even if `objective.equalizer` is off.
        kl_weight: lambda_KL.
        bias: `TransitionTable.log_ratio_bias` of each transition.
        row: coefficients of each transition, for a surrogate that uses errors.
        mean_errors: error_plus and error_minus, for the same.
    """
    surrogate, strategy = surrogate_of(objective), strategy_of(kl)
    log_ratio, errors = log_prob - log_prob_old, None
    if surrogate.uses_errors:
        assert row is not None
        errors = errors_on_x0(log_prob, log_prob_old, kl_old, row, mean_errors)
    weight = equalizer if equalizes(objective) else torch.ones_like(equalizer)
    if centres_ratio(objective):
        # kl_old keeps its gradient: it cancels the part of the log-ratio's gradient that is quadratic in v - v_old.
        log_ratio = log_ratio + bias * kl_old
        if normalises_ratio(objective):
            log_ratio, weight = equalizer * log_ratio, weight / equalizer
    scored = Scored(log_ratio=log_ratio, kl_old=kl_old, drift=bias * kl_old, advantage=advantage, errors=errors)
    policy = -weight * surrogate.value(scored, objective)
    velocity = kl_old if has_closed_form(kl) else log_prob_old - log_prob
    regularizer = torch.zeros_like(policy)
    if strategy.anchor is not None:
        regularizer = regularizer + kl.beta_pos * kl_anchor
    if strategy.velocity:
        regularizer = regularizer + kl.beta_vel * velocity
    return Loss(
        total=policy + kl_weight * regularizer,
        policy=policy,
        kl=regularizer.detach(),
        kl_anchor=kl_anchor.detach(),
        kl_velocity=velocity.detach(),
        ratio=torch.exp(log_ratio.detach()),
        clipped=surrogate.held(scored, objective).float(),
    )


def errors_on_x0(log_prob: Tensor, log_prob_old: Tensor, kl_old: Tensor, row: Row, means: Sequence[Tensor]) -> Errors:
    """Return the errors behind the scores of noised samples, where the residual is x0 - x0_hat and b is -s."""
    present, rollout = ((value - row.k) / row.w for value in (log_prob, log_prob_old))
    moved, (plus, minus) = row.b.square() * kl_old / row.m, means
    return Errors(present=present, rollout=rollout, moved=moved, plus=plus, minus=minus)


def gradient_norms(
    loss: Loss, log_prob: Tensor, log_prob_old: Tensor, kl_old: Tensor, row: Row, numel: int, *, kl: KLConfig
) -> tuple[Tensor, Tensor]:
    """Return the gradient norms in the velocity of the policy term and of the KL term (without lambda), each `[B]`.

    They follow from numbers of shape `[B]`, without a pass over the latents. With the residual
    r = x_next - a x - b v = r_old - b d and d = v - v_old,

        d logp / dv = -2 w b r / D,   mean(r^2) = (logp - k) / w
        d KL_old / dv = 2 m d / D,    mean(d^2) = KL_old / m
        mean(r d) = (mean(r_old^2) - mean(r^2) - b^2 mean(d^2)) / (2 b)

    The policy term depends on v through logp and, where centred or as in DiffusionNFT, through KL_old: its norm is
    exact. The KL terms are added in quadrature. `kl.velocity_term = rollout` is left out, because its gradient is
    sampling noise many times larger than its pull.

    Args:
        loss: result of `sage_loss`, before its backward.
        log_prob: `[B]`, as given to `sage_loss`.
        log_prob_old: `[B]`, as given to `sage_loss`.
        kl_old: `[B]`, as given to `sage_loss`.
        row: coefficients of the transitions.
        numel: D, elements of a sample.
        kl: as given to `sage_loss`.
    """
    slopes = torch.autograd.grad(loss.policy.sum(), (log_prob, kl_old), retain_graph=True, allow_unused=True)
    of_log_prob, of_kl = (torch.zeros_like(log_prob) if slope is None else slope for slope in slopes)
    residual, before = ((value.detach() - row.k) / row.w for value in (log_prob, log_prob_old))
    moved = kl_old.detach() / row.m
    crossed = (before - residual - row.b.square() * moved) / (2 * row.b)
    away, back = of_log_prob * row.w * row.b, of_kl * row.m
    square = away.square() * residual - 2 * away * back * crossed + back.square() * moved
    policy = 2 * (square.clamp(min=0) / numel).sqrt()

    def kl_norm(value: Tensor) -> Tensor:
        return 2 * (row.m * value / numel).sqrt()

    squares = torch.zeros_like(policy)
    if strategy_of(kl).anchor is not None:
        squares = squares + (kl.beta_pos * kl_norm(loss.kl_anchor)).square()
    if uses_closed_form(kl):
        squares = squares + (kl.beta_vel * kl_norm(loss.kl_velocity)).square()
    return policy, squares.sqrt()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedbackRow:
    """Response of lambda to what an optimizer step observes.

    Attributes:
        too_large: factor on lambda when the KL is too large; None if lambda does not follow the KL.
        too_small: factor on lambda when the KL is too small; None if lambda does not follow the KL.
        holds_share: lambda follows the KL's share of the gradient and has no warm-up.
        capped: the bound of lambda is `kl.lambda_max`, not `kl.lambda_limit`.
        starts_positive: lambda is multiplied from the start, so `kl.lambda_min` must be above 0.
    """

    too_large: float | None = None
    too_small: float | None = None
    holds_share: bool = False
    capped: bool = False
    starts_positive: bool = False


FEEDBACKS = {
    "paper": FeedbackRow(too_large=0.9, too_small=1.1, capped=True),
    "ppo": FeedbackRow(too_large=1.1, too_small=0.9, starts_positive=True),
    "share": FeedbackRow(holds_share=True, starts_positive=True),
    "none": FeedbackRow(),
}
assert tuple(FEEDBACKS) == get_args(Feedback), "a feedback is named in config.Feedback and has its row in FEEDBACKS"
LARGEST_FACTOR, FIRST_FACTOR = 1.5, 10.0
"""Bounds on the factor by which `share` moves lambda in one update: with a full history, and before it is full."""


class KLController:
    """lambda_KL: linear warm-up (Eq. 41), then feedback on the mean of the last H observations (Eq. 42).

    Eq. 42 lowers lambda when the KL is too large ("relax"); `ppo` is the usual, opposite direction. `share` has no
    warm-up. It averages the ratio of the KL's gradient to the policy's at lambda = 1, which does not depend on lambda.
    The average gives the lambda for `kl.target_share`, so lambda reaches it without overshooting.
    """

    def __init__(self, config: KLConfig) -> None:
        self.config = config
        self.row = FEEDBACKS[config.feedback]
        self.step = 0
        self.value = config.lambda_min
        self.history: deque[float] = deque(maxlen=config.history)

    def update(self, observed: float) -> None:
        """Record an optimizer step and move lambda.

        Args:
            observed: the step's KL, or the KL's share of the gradient if `row.holds_share`. It must be the same on
                every rank, so that lambda is.
        """
        config, row = self.config, self.row
        self.step += 1
        if row.holds_share:
            self._hold_share(observed)
            return
        self.history.append(observed)
        span = config.lambda_max - config.lambda_min
        if self.step <= config.warmup_steps:
            self.value = config.lambda_min + span * self.step / config.warmup_steps
        elif row.too_large is None or row.too_small is None:
            self.value = config.lambda_max
        else:
            mean = sum(self.history) / len(self.history)
            if mean > 1.5 * config.target:
                self.value *= row.too_large
            elif mean < 0.5 * config.target:
                self.value *= row.too_small
            most = config.lambda_max if row.capped else config.lambda_limit
            self.value = min(max(self.value, config.lambda_min), most)

    def _hold_share(self, share: float) -> None:
        config = self.config
        if share < 1:  # at 1 the whole policy term was clipped, so there is no ratio
            self.history.append(share / (1 - share) / self.value)
        # Squares are unbiased when the term is taken on a share of the steps.
        size = (sum(ratio**2 for ratio in self.history) / max(len(self.history), 1)) ** 0.5
        if size > 0:
            wanted = config.target_share / (1 - config.target_share) / size
            factor = LARGEST_FACTOR if len(self.history) == config.history else FIRST_FACTOR
            wanted = min(max(wanted, self.value / factor), self.value * factor)
            self.value = min(max(wanted, config.lambda_min), config.lambda_limit)

    def state_dict(self) -> dict[str, object]:
        return {
            "step": self.step,
            "value": self.value,
            "history": list(self.history),
            "holds_share": self.row.holds_share,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict`. The history starts empty if the feedback observes something else now."""
        self.step, self.value = state["step"], state["value"]
        same = state["holds_share"] == self.row.holds_share
        self.history = deque(state["history"] if same else [], maxlen=self.config.history)
