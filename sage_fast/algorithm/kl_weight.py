"""lambda_KL, the weight of the KL, and how it follows what an update observes."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any

from sage_fast.algorithm.rows import find_row
from sage_fast.config.schema import KLConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedbackRow:
    """Response of lambda to the KL that an optimizer step observes.

    Attributes:
        factors: factors on lambda when the KL is too large and too small; None if lambda does not
            follow the KL.
    """

    factors: tuple[float, float] | None = None


FEEDBACKS = {
    "none": FeedbackRow(),
    "paper": FeedbackRow(factors=(0.9, 1.1)),
}


def feedback_row(name: str) -> FeedbackRow:
    """Return the row of `kl.feedback`.

    Raises:
        UserError: there is no such feedback, or the user's own is not one.
    """
    return find_row(name, "kl.feedback", FEEDBACKS, _as_feedback)


def _as_feedback(found: Any) -> FeedbackRow:
    if not isinstance(found, FeedbackRow):
        raise ValueError(f"expected a sage_fast.algorithm.kl_weight.FeedbackRow; got {found!r:.80}")
    factors = found.factors
    if factors is None:
        return found
    is_pair = isinstance(factors, tuple) and len(factors) == 2
    if not is_pair or not all(_is_factor(factor) for factor in factors):
        raise ValueError(f"factors = {factors!r}: expected two numbers above 0, or None")
    return found


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


class KLController:
    """lambda_KL: linear warm-up (Eq. 41), then feedback on the mean of the last H observations (Eq.
    42).

    Eq. 42 lowers lambda when the KL is too large ("relax"), the opposite of the usual direction.
    """

    def __init__(self, config: KLConfig) -> None:
        self.config = config
        self.row = feedback_row(config.feedback)
        self.step = 0
        self.value = config.lambda_min
        self.history: deque[float] = deque(maxlen=config.history)

    def update(self, observed: float) -> None:
        """Record an optimizer step and move lambda.

        Args:
            observed: the step's KL. It must be the same on every rank, so that lambda is.
        """
        config = self.config
        factors = self.row.factors
        self.step += 1
        self.history.append(observed)
        span = config.lambda_max - config.lambda_min
        if self.step <= config.warmup_steps:
            self.value = config.lambda_min + span * self.step / config.warmup_steps
        elif factors is None:
            self.value = config.lambda_max
        else:
            when_large, when_small = factors
            mean = sum(self.history) / len(self.history)
            if mean > 1.5 * config.target:
                self.value *= when_large
            elif mean < 0.5 * config.target:
                self.value *= when_small
            self.value = min(max(self.value, config.lambda_min), config.lambda_max)

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "value": self.value, "history": list(self.history)}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict`."""
        self.step = state["step"]
        self.value = state["value"]
        self.history = deque(state["history"], maxlen=self.config.history)
