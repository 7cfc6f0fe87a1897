"""Data with a known velocity field: four narrow Gaussian modes in 16 dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

from sage_fast.algorithm.transitions import TransitionTable


class Mixture:
    """The Gaussian mixture.

    Attributes:
        std: standard deviation of each mode in each dimension.
        modes: centres, float64 `[4, 16]`, with equal weights.
    """

    std = 0.015

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.modes = torch.randn(4, 16, generator=generator, dtype=torch.float64)

    def velocity(self, x: Tensor, s: float) -> Tensor:
        """Return the exact velocity at `x` `[N, 16]` and sigma `s`."""
        variance = (1 - s) ** 2 * self.std**2 + s**2
        offset = x[:, None] - (1 - s) * self.modes
        weight = torch.softmax(-offset.square().sum(-1) / (2 * variance), dim=1)
        x0_hat = (weight[..., None] * (self.modes + (1 - s) * self.std**2 / variance * offset)).sum(
            1
        )
        return (x - x0_hat) / s

    def distance(self, x: Tensor) -> Tensor:
        """Return the distance of each sample to its nearest mode, `[N]`."""
        return torch.cdist(x, self.modes).amin(1)

    def spread(self) -> float:
        """Return the mean distance of exact samples of the mixture to their modes."""
        return self.std * float(stats.chi(self.modes.shape[1]).mean())

    def shares(self, x: Tensor) -> Tensor:
        """Return the share of samples nearest to each mode, `[4]`; the exact value is 1/4."""
        return torch.cdist(x, self.modes).argmin(1).bincount(minlength=len(self.modes)) / len(x)


Step = Callable[[Mixture, TransitionTable, int, Tensor], Tensor]
"""(mixture, table, step, x) -> the mean of the next x."""


def follow_table(mixture: Mixture, table: TransitionTable, t: int, x: Tensor) -> Tensor:
    """Return a x + b v."""
    return table.a[t] * x + table.b[t] * mixture.velocity(x, float(table.sigmas[t]))


def follow_printed_score(mixture: Mixture, table: TransitionTable, t: int, x: Tensor) -> Tensor:
    """Step by Eq. 7 with the score as printed, -(x - x0_hat)/s^2 = -v/s, for samplers of the SDE
    family."""
    s, n = float(table.sigmas[t]), float(table.sigmas[t + 1])
    v = mixture.velocity(x, s)
    return x - (s - n) * v - table.c[t] ** 2 / 2 * v / s


def sample(
    mixture: Mixture, table: TransitionTable, count: int, seed: int, step: Step = follow_table
) -> Tensor:
    """Return samples at the end of the table, float64 `[count, 16]`.

    A seed gives the same noise for every table.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, mixture.modes.shape[1], generator=generator, dtype=torch.float64)
    for t in range(len(table)):
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        x = step(mixture, table, t, x) + table.c[t] * noise
    return x
