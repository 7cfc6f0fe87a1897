"""Intervals of 95 %: of a mean over prompts by the bootstrap, and of a share of votes by Wilson's formula.

Videos of one prompt share its difficulty, and votes on one pair of videos share that pair: both are clusters. What is
drawn again in a bootstrap, and what is counted in a share, are prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from scipy import special  # scipy.stats takes five times as long to import

from sage_fast.report.comparison import MIN_PROMPTS

Interval = tuple[float, float]

RESAMPLES = 10_000
UPPER = 0.975
"""The upper end of an interval of 95 %, as a share of the distribution."""


def means_by_prompt(prompts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Prompt -> mean of its finite values; prompts without one are skipped."""
    found: dict[str, list[float]] = {}
    for prompt, value in zip(prompts, values):
        if math.isfinite(value):
            found.setdefault(prompt, []).append(value)
    return {prompt: fmean(of) for prompt, of in found.items()}


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """Interval of the mean of K values, one for each prompt; None for fewer than `MIN_PROMPTS`.

    Percentiles of the means of 10,000 resamples, always the same ones. The percentiles are further out than 2.5 and
    97.5, since those of few values cover too seldom: they are those at which a normal distribution of the bootstrap's
    width, sqrt((K - 1) / K) of the standard error, gives the interval of Student's t (Hesterberg, "What teachers should
    know about the bootstrap", 2015, section 3.2, the expanded percentile interval). With many prompts they are 2.5 and
    97.5.
    """
    count = len(values)
    if count < MIN_PROMPTS:
        return None
    array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(0)
    shares = np.full(count, 1 / count)
    blocks = [generator.multinomial(count, shares, size=500) @ array for _ in range(RESAMPLES // 500)]
    tail = special.ndtr(-math.sqrt(count / (count - 1)) * special.stdtrit(count - 1, UPPER))
    low, high = np.quantile(np.concatenate(blocks) / count, (tail, 1 - tail))
    return float(low), float(high)


def share_interval(prompts: Sequence[str], votes: Sequence[float]) -> Interval | None:
    """Wilson's interval of the mean of `votes`, each 0, 1 or, for no preference, 1/2.

    Several votes on one prompt agree more than votes on different prompts do, and count for less: for n divided by the
    design effect, the ratio of the variance clustered by prompt to the binomial one, which is not taken below 1; and
    with the degrees of freedom of the prompts (Korn and Graubard, "Confidence intervals for proportions with small
    expected number of positive counts estimated from survey data", 1998). If all votes are equal, a prompt counts as
    one vote. With one vote on each prompt it is Wilson's own interval. None for several votes on fewer than
    `MIN_PROMPTS` prompts.
    """
    counts: dict[str, list[float]] = {}
    for prompt, vote in zip(prompts, votes):
        counts.setdefault(prompt, []).append(vote)
    n, clusters = len(votes), len(counts)
    share = sum(votes) / n
    effective, quantile = float(n), special.ndtri(UPPER)
    if n > clusters:
        if clusters < MIN_PROMPTS:
            return None
        binomial = share * (1 - share) / n
        residuals = [sum(of) - share * len(of) for of in counts.values()]
        clustered = clusters / (clusters - 1) * sum(r**2 for r in residuals) / n**2
        effective = n / max(1.0, clustered / binomial) if binomial else float(clusters)
        quantile = special.stdtrit(clusters - 1, UPPER)  # of Student's t
    z2 = float(quantile) ** 2
    middle = (share + z2 / (2 * effective)) / (1 + z2 / effective)
    half = math.sqrt(share * (1 - share) * z2 / effective + (z2 / (2 * effective)) ** 2) / (1 + z2 / effective)
    return max(0.0, middle - half), min(1.0, middle + half)
