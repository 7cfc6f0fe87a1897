"""95 % intervals over prompts: of a mean by the bootstrap, and of a share of votes by Wilson."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from sage_fast.eval.scores import MIN_PROMPTS, UPPER, Interval, clustered_variance, t_quantile

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


def share_interval(prompts: Sequence[str], votes: Sequence[float]) -> Interval | None:
    """Wilson interval of the mean of `votes`, each 0, 1 or 1/2 (no preference).

    Votes on one prompt agree more than votes on different prompts, so they count for less. The effective number of
    votes is n divided by the design effect: the variance clustered by prompt over the binomial variance, at least 1.
    The degrees of freedom are those of the prompts (Korn and Graubard, "Confidence intervals for proportions with small
    expected number of positive counts estimated from survey data", 1998). If all votes are equal, each prompt counts
    as one vote. With one vote per prompt it is the plain Wilson interval. None if a prompt has several votes and there
    are fewer than `MIN_PROMPTS` prompts.
    """
    n, clusters = len(votes), len(set(prompts))
    share = sum(votes) / n
    effective, quantile = float(n), special.ndtri(UPPER)
    if n > clusters:
        if clusters < MIN_PROMPTS:
            return None
        binomial = share * (1 - share) / n
        effective = n / max(1.0, clustered_variance(votes, prompts) / binomial) if binomial else float(clusters)
        quantile = t_quantile(clusters)
    z2 = float(quantile) ** 2
    middle = (share + z2 / (2 * effective)) / (1 + z2 / effective)
    half = math.sqrt(share * (1 - share) * z2 / effective + (z2 / (2 * effective)) ** 2) / (1 + z2 / effective)
    return max(0.0, middle - half), min(1.0, middle + half)
