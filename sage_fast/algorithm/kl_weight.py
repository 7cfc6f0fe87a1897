"""lambda_KL, the weight of the KL, and how it follows what an update observes."""

from __future__ import annotations

import dataclasses
from collections import deque

from sage_fast.config.schema import KLConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedbackRow:
    """Response of lambda to what an optimizer step observes.

    Attributes:
        factors: factors on lambda when the KL is too large and too small; None if lambda does not follow the KL.
        holds_share: lambda follows the KL's share of the gradient, up to `kl.lambda_limit`. It has no warm-up, so
            `kl.lambda_min` must be above 0.
    """

    factors: tuple[float, float] | None = None
    holds_share: bool = False


FEEDBACKS = {
    "paper": FeedbackRow(factors=(0.9, 1.1)),
    "share": FeedbackRow(holds_share=True),
    "none": FeedbackRow(),
}
LARGEST_FACTOR, FIRST_FACTOR = 1.5, 10.0
"""Bounds on the factor by which `share` moves lambda in one update: with a full history, and before it is full."""


class KLController:
    """lambda_KL: linear warm-up (Eq. 41), then feedback on the mean of the last H observations (Eq. 42).

    Eq. 42 lowers lambda when the KL is too large ("relax"), the opposite of the usual direction. `share` has no
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
        elif row.factors is None:
            self.value = config.lambda_max
        else:
            mean = sum(self.history) / len(self.history)
            if mean > 1.5 * config.target:
                self.value *= row.factors[0]
            elif mean < 0.5 * config.target:
                self.value *= row.factors[1]
            self.value = min(max(self.value, config.lambda_min), config.lambda_max)

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
        history, holds_share = list(self.history), self.row.holds_share
        return {"step": self.step, "value": self.value, "history": history, "holds_share": holds_share}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict`. The history starts empty if the feedback observes something else now."""
        self.step, self.value = state["step"], state["value"]
        same = state["holds_share"] == self.row.holds_share
        self.history = deque(state["history"] if same else [], maxlen=self.config.history)
