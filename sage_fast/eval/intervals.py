"""95 % bootstrap interval of a mean over prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from sage_fast.eval.scores import MIN_PROMPTS, Interval, t_quantile

RESAMPLES = 10_000


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """Bootstrap interval of the mean of K values, one per prompt; None for fewer than `MIN_PROMPTS`.

    The expanded percentile interval of Hesterberg, "What teachers should know about the bootstrap", 2015, section 3.2,
    from 10,000 resamples with a fixed seed. With few values the 2.5 and 97.5 percentiles cover too little, so wider
    ones are used. They are chosen such that a normal distribution of the bootstrap's width, sqrt((K - 1) / K) of the
    standard error, gives the interval of Student's t. With many prompts they approach 2.5 and 97.5.
    """
    count = len(values)
    if count < MIN_PROMPTS:
        return None
    array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    shares = np.full(count, 1 / count)
    blocks = [generator.multinomial(count, shares, size=500) @ array for _ in range(RESAMPLES // 500)]
    tail = special.ndtr(-math.sqrt(count / (count - 1)) * t_quantile(count))
    low, high = np.quantile(np.concatenate(blocks) / count, (tail, 1 - tail))
    return float(low), float(high)
