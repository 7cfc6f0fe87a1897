"""Scores from comparisons in pairs, by the model of Bradley and Terry.

P(i wins against j) = sigmoid(s_i - s_j), and a tie is half a win of each. The scores are those of
largest posterior probability. The prior is one tie of every video against a video of score 0. So
scores are finite where a video wins all its comparisons, and scores of videos that no chain of
comparisons joins are both relative to 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRIOR_COMPARISONS = 1.0
"""Comparisons of each video with one of score 0, all ties."""
MAX_STEPS = 200
"""Largest number of Newton steps; a few are enough."""
TOLERANCE = 1e-12
"""Largest step of a score after which the search ends."""


def bradley_terry(wins: Tensor) -> Tensor:
    """Return the scores of G videos, float64 `[G]`.

    Args:
        wins: `[G, G]`: how often i won against j; a tie is a half for both.
    """
    wins = wins.double()
    comparisons = wins + wins.T
    scores = torch.zeros(len(wins), dtype=torch.float64)
    for _ in range(MAX_STEPS):
        expected = torch.sigmoid(scores[:, None] - scores)  # that i wins against j
        expected_prior = torch.sigmoid(scores)
        gradient = (wins - comparisons * expected).sum(1)
        gradient += PRIOR_COMPARISONS * (0.5 - expected_prior)

        # The curvature, minus the second derivatives: a Laplacian, and the prior on its diagonal.
        weights = comparisons * expected * (1 - expected)
        of_prior = PRIOR_COMPARISONS * expected_prior * (1 - expected_prior)
        curvature = torch.diag(weights.sum(1) + of_prior) - weights
        step = torch.linalg.solve(curvature, gradient)

        # Far from the maximum a whole step could pass it.
        longest = float(step.abs().max())
        scores = scores + step / max(1.0, longest)
        if longest < TOLERANCE:
            break
    return scores
