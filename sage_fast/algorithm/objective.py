"""The objective of a run: its surrogates and KL strategies, and the loss that they make of `[B]`
tensors.

loss_i,t = -S_t surrogate(ratio or log-prob, A_i) + lambda_KL (beta_pos KL(theta || anchor) +
beta_vel KL_vel)

docs/explanation/objective.md has the equations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sage_fast.algorithm.rows import called, find_row, of_table
from sage_fast.config.engines import RENOISES
from sage_fast.config.schema import Config, ObjectiveConfig
from sage_fast.ops import Coefficients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """What a surrogate sees of a micro-batch, each `[B]`.

    Attributes:
        log_ratio: log-ratio to the rollout policy, centred and normalised where the settings say
            so.
        kl_old: KL to the rollout policy, in closed form.
        advantage: A_i.
        noised: all scores of noised samples and their coefficients, for a row that uses the errors
            behind them.
    """

    log_ratio: Tensor
    kl_old: Tensor
    advantage: Tensor
    noised: tuple[TransitionScores, Coefficients] | None = None


def _clipped_ratio(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Clipped surrogate: min(ratio A, clip(ratio) A)."""
    ratio = torch.exp(scored.log_ratio)
    clipped = ratio.clamp(1 - objective.clip_range, 1 + objective.clip_range)
    return torch.minimum(ratio * scored.advantage, clipped * scored.advantage)


def clipped_by_range(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Return where the clip removes the gradient: above the range with A > 0, below it with A < 0.

    On the other side of the range the minimum takes the ratio itself, whose gradient leads back
    into the range.
    """
    ratio = torch.exp(scored.log_ratio)
    too_high = (ratio > 1 + objective.clip_range) & (scored.advantage > 0)
    too_low = (ratio < 1 - objective.clip_range) & (scored.advantage < 0)
    return too_high | too_low


def _masked_ratio(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Ratio x A without a gradient where the KL masks it (Flow-DPPO, arXiv 2606.11025)."""
    ratio = torch.exp(scored.log_ratio)
    masked = _beyond_kl_limit(scored, objective)
    return torch.where(masked, ratio.detach(), ratio) * scored.advantage


def _beyond_kl_limit(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Return where the KL is above its limit and the update would raise it: A and the log-ratio
    have one sign."""
    too_far = scored.kl_old > objective.kl_limit
    moves_away = scored.advantage * scored.log_ratio > 0
    return too_far & moves_away


def _plain_log_prob(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Log-prob x A (Eq. 43), up to the rollout's log-prob, which is constant.

    On noised samples this is advantage-weighted matching (arXiv 2509.25050): -A times the
    flow-matching loss.
    """
    return scored.log_ratio * scored.advantage


def _nft(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Negative DiffusionNFT loss (arXiv 2509.16117) on x0 times advantage_clamp / beta.

    Each branch is divided by its mean error. The residual of a noised sample is x0 - x0_hat with
    x0_hat = x_s - s v, and b is -s, so the errors, means over the elements, follow from the scores:
    `present` of v, `rollout` of v_old, `moved` between both, `plus` and `minus` of v+ and v-.
    """
    assert scored.noised is not None
    scores, row = scored.noised
    present = (scores.log_prob - row.k) / row.w
    rollout = (scores.log_prob_old - row.k) / row.w
    moved = row.b.square() * scores.kl_old / row.m

    # error of v+- = v_old +- beta (v - v_old): the part that both share, and the part that differs
    beta = objective.nft_beta
    even = rollout + beta**2 * moved
    odd = beta * (present - rollout - moved)
    error_plus, error_minus = scores.errors
    plus = (even + odd) / error_plus.clamp(min=1e-5)
    minus = (even - odd) / error_minus.clamp(min=1e-5)

    # an advantage within its clamp as the share of the positive branch, from 0 to 1
    clamp = objective.advantage_clamp
    share = 0.5 + 0.5 * scored.advantage / clamp
    return -clamp / beta * (share * plus + (1 - share) * minus)


def _never_clipped(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    return torch.zeros_like(scored.log_ratio)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurrogateRow:
    """A surrogate and what it needs.

    Attributes:
        title: name of the method that it makes.
        value: the term `[B]` that is maximised.
        clipped: mask `[B]`: where the clip or the KL mask removes the gradient; its mean is
            `ratio/clip_fraction`.
        uses_ratio: clips the ratio, so that `objective.ratio` applies and rounding in the log-ratio
            does harm.
        uses_kl: needs the KL to the rollout policy in closed form.
        uses_errors: needs the errors of the predicted final sample at `objective.nft_beta`, and
            weighs the noise levels itself; only on noised samples.
        centred: adds the KL to the rollout policy to the log-ratio, whatever `objective.ratio`
            says.
        scores_rollout: scores the steps of the rollout (reverse process), which itself yields their
            log-probs and velocities; otherwise the final samples with new noise
            (docs/explanation/forward-process.md).
    """

    title: str
    value: Callable[[Scored, ObjectiveConfig], Tensor]
    clipped: Callable[[Scored, ObjectiveConfig], Tensor] = _never_clipped
    uses_ratio: bool = False
    uses_kl: bool = False
    uses_errors: bool = False
    centred: bool = False
    scores_rollout: bool = True


SURROGATES = {
    "clip": SurrogateRow(
        title="GRPO", value=_clipped_ratio, clipped=clipped_by_range, uses_ratio=True
    ),
    "kl_mask": SurrogateRow(
        title="GRPO with a KL mask", value=_masked_ratio, clipped=_beyond_kl_limit, uses_kl=True
    ),
    "log_prob": SurrogateRow(title="GRPO without a ratio", value=_plain_log_prob),
    "nft": SurrogateRow(
        title="DiffusionNFT variant",
        value=_nft,
        centred=True,
        uses_errors=True,
        scores_rollout=not RENOISES["nft"],
    ),
    "awm": SurrogateRow(
        title="Advantage-weighted matching",
        value=_plain_log_prob,
        scores_rollout=not RENOISES["awm"],
    ),
}


def surrogate_row(settings: ObjectiveConfig) -> SurrogateRow:
    """Return the surrogate of `objective.surrogate`.

    Raises:
        UserError: there is no such surrogate, or the user's own is not one.
    """
    return find_row(
        settings.surrogate,
        "objective.surrogate",
        SURROGATES,
        functools.partial(_as_surrogate, settings),
    )


def _as_surrogate(settings: ObjectiveConfig, found: Any) -> SurrogateRow:
    """Return a user's surrogate, tried on a made-up micro-batch.

    Raises:
        ValueError: it is no `SurrogateRow`, or its functions fail or return something else than a
            value `[B]` with a gradient and a mask `[B]`.
    """
    if not isinstance(found, SurrogateRow):
        raise ValueError(
            f"expected a sage_fast.algorithm.objective.SurrogateRow; got {found!r:.80}"
        )
    if found.uses_errors and found.scores_rollout:
        raise ValueError("uses_errors is for noised samples only: expected scores_rollout=False")

    scored = _made_up_scored()
    shape = list(scored.advantage.shape)
    value = called(found.value, scored, settings, form="value(scored, objective) -> [B]")
    if not isinstance(value, Tensor) or list(value.shape) != shape:
        raise ValueError(f"value: expected a tensor {shape}; it returned {value!r:.80}")
    if not value.requires_grad:
        raise ValueError("value: has no gradient in log_ratio, so nothing would be trained")
    mask = called(found.clipped, scored, settings, form="clipped(scored, objective) -> [B]")
    if not isinstance(mask, Tensor) or list(mask.shape) != shape:
        raise ValueError(f"clipped: expected a mask {shape}; it returned {mask!r:.80}")
    return found


def _made_up_scored() -> Scored:
    """Return what a surrogate sees of three noised samples."""
    log_prob = torch.tensor([-1.0, -1.1, -0.9], requires_grad=True)
    log_prob_old = torch.tensor([-1.0, -1.0, -1.0])
    kl_old = torch.tensor([0.0, 0.01, 0.02])
    advantage = torch.tensor([1.0, -1.0, 0.5])
    ones = torch.ones(3)
    coefficients = Coefficients(
        a=ones, b=-0.5 * ones, c=0.5 * ones, w=-2.0 * ones, k=0.0 * ones, m=ones
    )
    scores = TransitionScores(
        log_prob=log_prob,
        log_prob_old=log_prob_old,
        kl_anchor=kl_old,
        kl_old=kl_old,
        advantage=advantage,
        errors=(ones, ones),
    )
    return Scored(
        log_ratio=log_prob - log_prob_old,
        kl_old=kl_old,
        advantage=advantage,
        noised=(scores, coefficients),
    )


RATIOS = {"plain": (False, False), "centred": (True, False), "normalised": (True, True)}
"""Choice of `objective.ratio` -> whether the log-ratio that is clipped is centred, by adding the KL
to the rollout policy, and whether it is multiplied by S_t."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Per-sample terms `[B]` of a micro-batch; `total` and `policy` carry gradients, `ratio` is the
    prepared one and `kl_anchor` is weighted."""

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
        anchor: anchor of the position term: `start`, the weights at the start of the run; `moving`,
            refreshed every `kl.anchor_interval` optimizer steps; None for no position term.
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


def kl_strategy(name: str) -> KLStrategy:
    """Return the strategy of `kl.strategy`.

    Raises:
        UserError: there is no such strategy, or the user's own is not one.
    """
    return find_row(name, "kl.strategy", KL_STRATEGIES, _as_strategy)


def _as_strategy(found: Any) -> KLStrategy:
    if not isinstance(found, KLStrategy):
        raise ValueError(f"expected a sage_fast.algorithm.objective.KLStrategy; got {found!r:.80}")
    if found.anchor not in (None, "start", "moving"):
        raise ValueError(f"anchor = {found.anchor!r}: expected None, 'start' or 'moving'")
    if not isinstance(found.velocity, bool):
        raise ValueError(f"velocity = {found.velocity!r}: expected True or False")
    return found


class Objective:
    """The loss of a run: its settings, their rows, and what follows from them.

    Attributes:
        settings: section `objective`.
        kl: section `kl`.
        surrogate: row of the surrogate.
        strategy: row of the KL strategy.
        kl_acts: the loss has a KL term of a weight above 0.
        kl_pulls: one of them has a gradient that `kl/gradient_share` counts, and may differ from 0.
        closed_form: the velocity term is the KL itself, not its estimate from the rollout's noise.
        equalizes: the policy term is weighted by S_t.
        centres_ratio: the KL to the rollout policy is added to the log-ratio.
        normalises_ratio: the log-ratio is multiplied by S_t.
        off_policy: an update may start from other weights than the rollout's.
        stores_velocities: the loss needs the rollout's velocities, for the KL to the rollout policy
            in closed form. At the weights of the rollout it does not: that KL and its gradient are
            0 there.
        reuses_velocities: an anchor equal to the present weights needs no forward: the rollout
            stored its velocities, or the policy stays at the anchor within an iteration.
        scores_noised: the loss needs a forward of the rollout policy at each noised sample.
    """

    def __init__(self, config: Config) -> None:
        settings = config.objective
        kl = config.kl
        surrogate = surrogate_row(settings)
        strategy = kl_strategy(kl.strategy)
        centred, normalised = of_table(RATIOS, settings.ratio, "objective.ratio")
        self.settings = settings
        self.kl = kl
        self.surrogate = surrogate
        self.strategy = strategy

        # -- the policy term
        self.equalizes = settings.equalizer and not surrogate.uses_errors
        self.centres_ratio = surrogate.centred or (surrogate.uses_ratio and centred)
        self.normalises_ratio = surrogate.uses_ratio and normalised

        # -- the KL terms
        penalises_position = strategy.anchor is not None and kl.beta_pos > 0
        penalises_velocity = strategy.velocity and kl.beta_vel > 0
        self.kl_acts = kl.lambda_max > 0 and (penalises_position or penalises_velocity)
        self.closed_form = kl.velocity_term == "closed_form"

        # -- what the rollout stores for them
        averaged = config.sampling.averaged_weights
        self.off_policy = config.train.optimizer_steps > 1 or averaged
        velocity_in_closed_form = strategy.velocity and self.closed_form
        needs_kl = self.centres_ratio or surrogate.uses_kl or velocity_in_closed_form
        self.stores_velocities = self.off_policy and needs_kl
        self.reuses_velocities = not averaged and (
            surrogate.scores_rollout or self.stores_velocities or not self.off_policy
        )
        self.scores_noised = self.stores_velocities and not surrogate.scores_rollout

        # At the weights of the rollout the KL to it is 0, and so is its gradient.
        follows_rollout = velocity_in_closed_form and self.stores_velocities
        self.kl_pulls = self.kl_acts and (strategy.anchor is not None or follows_rollout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionScores:
    """A micro-batch of transitions as training scores it, each `[B]`.

    Attributes:
        log_prob: log-prob under the current policy.
        log_prob_old: log-prob under the rollout policy.
        kl_anchor: KL of the current policy to the anchor.
        anchor_weight: its weight, `[B]` or one number: 1 unless it is computed at a fraction of the
            transitions.
        kl_old: KL of the current policy to the rollout policy.
        advantage: A_i.
        errors: error_plus and error_minus of `transition_score`, for a surrogate that uses them.
    """

    log_prob: Tensor
    log_prob_old: Tensor
    kl_anchor: Tensor
    kl_old: Tensor
    advantage: Tensor
    anchor_weight: Tensor | float = 1.0
    errors: Sequence[Tensor] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConstants:
    """Constants of the scored steps, each `[T]`, or `[B]` where a step is chosen for each sample.

    Attributes:
        equalizer: S_t.
        bias: `TransitionTable.log_ratio_bias`, minus the expected log-ratio in units of the KL.
        coefs: `TransitionTable.coefficients`, `[T, 6]` or `[B, 6]`.
    """

    equalizer: Tensor
    bias: Tensor
    coefs: Tensor

    @property
    def row(self) -> Coefficients:
        """The coefficients by name."""
        return Coefficients(*self.coefs.unbind(1))

    def at(self, steps: Tensor) -> StepConstants:
        """Return those of `steps`, int64 `[B]`."""
        return StepConstants(
            equalizer=self.equalizer[steps], bias=self.bias[steps], coefs=self.coefs[steps]
        )


def sage_loss(
    objective: Objective, scores: TransitionScores, steps: StepConstants, kl_weight: float
) -> Loss:
    """Compute the whole loss from the outputs of `transition_score`.

    Args:
        objective: the resolved settings.
        scores: the micro-batch.
        steps: constants of its steps; a normalised ratio uses S_t even if `objective.equalizer` is
            off.
        kl_weight: lambda_KL.
    """
    surrogate = objective.surrogate
    strategy = objective.strategy
    kl = objective.kl
    kl_old = scores.kl_old
    log_ratio = scores.log_prob - scores.log_prob_old
    weight = steps.equalizer if objective.equalizes else torch.ones_like(steps.equalizer)
    if objective.centres_ratio:
        # kl_old keeps its gradient: it cancels the part of the log-ratio's gradient that is
        # quadratic in v - v_old.
        log_ratio = log_ratio + steps.bias * kl_old
        if objective.normalises_ratio:
            log_ratio = steps.equalizer * log_ratio
            weight = weight / steps.equalizer
    scored = Scored(
        log_ratio=log_ratio,
        kl_old=kl_old,
        advantage=scores.advantage,
        noised=(scores, steps.row),
    )
    policy = -weight * surrogate.value(scored, objective.settings)

    velocity = kl_old if objective.closed_form else scores.log_prob_old - scores.log_prob
    kl_anchor = scores.anchor_weight * scores.kl_anchor
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
        clipped=surrogate.clipped(scored, objective.settings).float(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """Gradients in the velocity of the terms of the loss, each `[B]`.

    Attributes:
        policy: norm of the policy term's gradient.
        anchor: squared norm of the position term's gradient without lambda, minus what rounding
            adds. It is negative where rounding added less than its average: clamp the sum, not the
            terms.
        velocity: the same of the velocity term.
    """

    policy: Tensor
    anchor: Tensor
    velocity: Tensor


def gradient_norms(
    objective: Objective,
    loss: Loss,
    scores: TransitionScores,
    row: Coefficients,
    numel: int,
    rounding: Tensor,
) -> GradientNorms:
    """Return the gradient norms in the velocity of the policy term and of the KL terms.

    They follow from numbers of shape `[B]`, without a pass over the latents. With the residual
    r = x_next - a x - b v = r_old - b d and d = v - v_old,

        d logp / dv = -2 w b r / D,   mean(r^2) = (logp - k) / w
        d KL_old / dv = 2 m d / D,    mean(d^2) = KL_old / m
        mean(r d) = (mean(r_old^2) - mean(r^2) - b^2 mean(d^2)) / (2 b)

    The policy term depends on v through logp and, where centred or as in DiffusionNFT, through
    KL_old: its norm is exact. `kl.velocity_term = rollout` is left out (0), because its gradient is
    sampling noise many times larger than its pull.

    The squared norm of a KL term is 4 beta^2 m KL / D. Two velocities of equal weights differ by
    rounding, which adds its own KL on average: the squared norm is that of KL - `rounding`.

    Args:
        objective: as given to `sage_loss`.
        loss: result of `sage_loss`, before its backward.
        scores: as given to `sage_loss`.
        row: coefficients of the transitions.
        numel: D, elements of a sample.
        rounding: KL that rounding makes between velocities of equal weights, `[B]`.
    """
    log_prob = scores.log_prob
    kl_old = scores.kl_old
    kl = objective.kl

    # -- the policy term: slopes in log_prob and KL_old, then the chain rule above
    slope_log_prob, slope_kl = torch.autograd.grad(
        loss.policy.sum(), (log_prob, kl_old), retain_graph=True, allow_unused=True
    )
    if slope_log_prob is None:
        slope_log_prob = torch.zeros_like(log_prob)
    if slope_kl is None:
        slope_kl = torch.zeros_like(log_prob)
    residual = (log_prob.detach() - row.k) / row.w
    residual_old = (scores.log_prob_old.detach() - row.k) / row.w
    kl_distance = kl_old.detach() / row.m
    cross_term = (residual_old - residual - row.b.square() * kl_distance) / (2 * row.b)
    grad_logp = slope_log_prob * row.w * row.b
    grad_kl = slope_kl * row.m
    square = (
        grad_logp.square() * residual
        - 2 * grad_logp * grad_kl * cross_term
        + grad_kl.square() * kl_distance
    )
    policy = 2 * (square.clamp(min=0) / numel).sqrt()

    # -- the KL terms
    anchor = torch.zeros_like(policy)
    velocity = torch.zeros_like(policy)
    if objective.strategy.anchor is not None:
        # The mean of the weighted KL is that of the KL at all transitions.
        excess = loss.kl_anchor - scores.anchor_weight * rounding
        anchor = 4 * kl.beta_pos**2 * row.m * excess / numel
    if objective.strategy.velocity and objective.closed_form:
        # Without stored velocities the KL to the rollout policy is exactly 0: nothing was rounded
        # twice.
        rounded = rounding if objective.stores_velocities else torch.zeros_like(rounding)
        velocity = 4 * kl.beta_vel**2 * row.m * (loss.kl_velocity - rounded) / numel
    return GradientNorms(policy=policy, anchor=anchor, velocity=velocity)


def gradient_share(kl_weight: float, policy: float, anchor: float, velocity: float) -> float:
    """Return the KL's share of the gradient on the velocity, `kl/gradient_share`: k / (k + p), 0
    where both are 0.

    k is lambda times the root of the KL terms' mean squares, added; a mean that rounding alone
    would explain (at most 0) counts as 0. p is the root of the policy term's mean square.

    Args:
        kl_weight: lambda_KL.
        policy: mean square of `GradientNorms.policy` over the transitions of an update.
        anchor: mean of `GradientNorms.anchor` over the same transitions.
        velocity: mean of `GradientNorms.velocity` over the same transitions.
    """
    kl_norm = kl_weight * math.sqrt(max(anchor, 0.0) + max(velocity, 0.0))
    return kl_norm / max(kl_norm + math.sqrt(policy), 1e-30)
