"""Samplers as rows of numbers: x_next = a x + b v + c noise.

Rectified flow writes x_s = (1-s) x0 + s z with velocity v = dx/ds = z - x0, so x0_hat = x - s v,
z_hat = x + (1-s) v and score = -z_hat / s. For every sampler of this field, a step from s = sigma_t
to n = sigma_{t+1} is an affine Gaussian transition, and its three scalars depend only on the step.
This module computes them once, on the host in float64; the operators in `sage_fast.ops` read the
finished table.

    SDE family,                        coefficient-preserving family,
    integrated variance S, d = s - n   r = noise that is kept
        a = 1 - S/(2s)                     a = (1-n) + r
        b = -d - S (1-s)/(2s)              b = -(1-n) s + r (1-s)
        c = sqrt(S)                        c = sqrt(n^2 - r^2)

docs/explanation/samplers.md derives each row; docs/explanation/departures.md lists the departures
from the paper.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.rows import called, find_row, of_table
from sage_fast.config.fields import require
from sage_fast.util.errors import UserError

SAGE_CLAMP = 3e-3
"""Floor of 1 - sigma in the sage variance (paper, Appendix A.2, regime c)."""


def sigma_schedule(steps: int, shift: float) -> Tensor:
    """Return the noise levels of a shifted uniform schedule.

    Args:
        steps: number of transitions T, at least 1.
        shift: timestep shift, above 0; HunyuanVideo 1.5 uses 5 (480p t2v), 9 (720p t2v), 7 (720p
            i2v).

    Returns:
        float64 `[T+1]`, strictly decreasing from 1 to 0. Equal to diffusers'
        `FlowMatchEulerDiscreteScheduler(shift=shift)` as the HunyuanVideo 1.5 pipeline drives it.
    """
    uniform = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    # rounding exceeds 1 at shift 0.1
    return (shift * uniform / (1 + (shift - 1) * uniform)).clamp(max=1)


def _sde(s: Tensor, n: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, b, c of a step that integrates `variance` S of an SDE to first order."""
    a = 1 - variance / (2 * s)
    b = -(s - n) - variance * (1 - s) / (2 * s)
    return a, b, variance.sqrt()


def _coefficient_preserving(
    s: Tensor, n: Tensor, kept: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, b, c of a step that keeps (1-n) x0_hat and `kept` of the noise z_hat."""
    a = (1 - n) + kept
    b = -(1 - n) * s + kept * (1 - s)
    return a, b, c


def _ode(s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Euler step of the ODE; `eta` has no effect."""
    return _sde(s, n, torch.zeros_like(s))


def _dance(s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """DanceGRPO (arXiv 2505.07818): the diffusion coefficient is eta at every noise level."""
    return _sde(s, n, eta**2 * (s - n))


def _flow(s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Flow-GRPO (arXiv 2505.05470): eta sqrt(s/(1-s)), first order; at s = 1 the denominator uses
    sigma_1."""
    below_one = torch.where(s == 1, n, s)
    return _sde(s, n, eta**2 * (s - n) * s / (1 - below_one))


def _sage(s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """SAGE-GRPO (Eq. 5): the integral of eta^2 s/(1-s), with 1 - sigma clamped and the result at
    least 0."""
    data_after = (1 - n).clamp(min=SAGE_CLAMP)
    data_before = (1 - s).clamp(min=SAGE_CLAMP)
    log_ratio = torch.log(data_after / data_before)
    variance = eta**2 * (log_ratio - (s - n))
    return _sde(s, n, variance.clamp(min=0))


def _cps(s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients-preserving sampling (arXiv 2509.05952)."""
    angle = eta * math.pi / 2
    return _coefficient_preserving(s, n, n * math.cos(angle), n * math.sin(angle))


def _frozen(s: Tensor, n: Tensor, eta: float, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An SDE solved in closed form over the step, with x0_hat frozen
    (docs/explanation/samplers.md).

    A share exp(eta^2 exponent) of the old noise's variance survives; `exponent` is -inf where none
    does.
    """
    if eta == 0:  # 0 * inf below would be nan
        return _ode(s, n, eta)
    kept = n * torch.exp(0.5 * eta**2 * exponent)
    c = n * torch.sqrt(-torch.expm1(eta**2 * exponent))
    return _coefficient_preserving(s, n, kept, c)


def _precise(s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Precise (arXiv 2605.23522): the SDE of flow and sage in closed form."""
    log_rho = torch.log(n * (1 - s) / (s * (1 - n)))
    return _frozen(s, n, eta, log_rho)


def _dance_precise(s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """The SDE of dance in closed form, as in the code of Precise."""
    return _frozen(s, n, eta, 1 / s - 1 / n)


def _sage_notes(c: Tensor) -> tuple[str, ...]:
    if c[-1] == 0:
        return ()
    return (
        f"sage: as in the paper, the last step leaves noise of std {c[-1]:.3g} on the latent that "
        "is scored; sampling.sampler = precise leaves none",
    )


def _no_notes(c: Tensor) -> tuple[str, ...]:
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerRow:
    """A sampler.

    Attributes:
        step: (s, n, eta) -> a, b, c; float64 `[T]` each.
        largest_eta: largest eta for which the sampler is defined.
        notes: c -> sentences on unusual steps.
        log_corrected: integrates the SDE of eta^2 s/(1-s) over the step, as SAGE-GRPO does, instead
            of its first order.
    """

    step: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    largest_eta: float = math.inf
    notes: Callable[[Tensor], tuple[str, ...]] = _no_notes
    log_corrected: bool = False


SAMPLERS = {
    "sage": SamplerRow(step=_sage, notes=_sage_notes, log_corrected=True),
    "flow": SamplerRow(step=_flow),
    "dance": SamplerRow(step=_dance),
    "cps": SamplerRow(step=_cps, largest_eta=1.0),
    "dance-precise": SamplerRow(step=_dance_precise),
    "precise": SamplerRow(step=_precise, log_corrected=True),
    "ode": SamplerRow(step=_ode),
}


def sampler_row(sampler: str | SamplerRow | Callable[..., Any]) -> SamplerRow:
    """Return a sampler.

    Args:
        sampler: name in `SAMPLERS`; `package.module:name` of a function (s, n, eta) -> a, b, c or
            of a `SamplerRow`; or one of these objects itself.

    Raises:
        UserError: there is no such sampler.
    """
    if isinstance(sampler, str):
        return find_row(sampler, "sampling.sampler", SAMPLERS, _as_sampler)
    return _as_sampler(sampler)


def _as_sampler(found: Any) -> SamplerRow:
    """Return the row of a user's sampler.

    Raises:
        ValueError: it is none, or does not return finite a, b, c of a step.
    """
    if isinstance(found, type) or not (isinstance(found, SamplerRow) or callable(found)):
        raise ValueError(
            f"expected a function of (s, n, eta) that returns a, b, c, or a SamplerRow; got "
            f"{found!r:.80}"
        )
    row = found if isinstance(found, SamplerRow) else SamplerRow(step=found)

    # A schedule from sigma = 1 to 0, where formulas divide by 0 or take the logarithm of it.
    sigmas = sigma_schedule(4, 5.0)
    eta = min(0.5, row.largest_eta)
    _step_of(row, sigmas[:-1], sigmas[1:], eta)
    return row


def _step_of(row: SamplerRow, s: Tensor, n: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a, b, c of a sampler, checked.

    Raises:
        ValueError: the sampler fails, or returns something else than finite float64 `[T]` with c at
            least 0.
    """
    shape = list(s.shape)
    returned = called(row.step, s, n, eta, form="a function (s, n, eta) -> a, b, c")
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise ValueError(f"expected three tensors a, b, c; it returned {returned!r:.80}")
    for name, value in zip("abc", returned):
        if not isinstance(value, Tensor) or list(value.shape) != shape:
            raise ValueError(f"expected {name} as a tensor {shape}; it returned {value!r:.80}")
        if value.dtype != torch.float64:
            raise ValueError(f"expected {name} in float64, as s and n are; got {value.dtype}")
        if not value.isfinite().all():
            raise ValueError(
                f"{name} is not finite at eta {eta:g}: {value.tolist()} for s = {s.tolist()}"
            )
    a, b, c = returned
    if (c < 0).any():
        raise ValueError(f"c is a standard deviation, so at least 0; it returned {c.tolist()}")
    return a, b, c


REDUCTIONS = {"mean": True, "unscaled": False}
"""Reduction of the log-prob over the elements of a sample -> whether it is the Gaussian log-prob, a
mean per element; otherwise it is -mean((x_next - mean)^2)."""


def _is_log_prob(reduction: str) -> bool:
    """Whether a reduction gives the Gaussian log-prob.

    Raises:
        UserError: there is no such reduction.
    """
    return of_table(REDUCTIONS, reduction, "objective.log_prob")


# tensors have no equality that is a bool
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TransitionTable:
    """The T transitions of a sampler on a schedule.

    Attributes:
        sigmas: float64 `[T+1]`, in [0, 1].
        a: float64 `[T]`; the mean is a x + b v.
        b: float64 `[T]`.
        c: float64 `[T]`, the standard deviation. Rows with c = 0 are deterministic.
        notes: sentences on unusual rows.
    """

    sigmas: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.a)

    @property
    def stochastic_steps(self) -> list[int]:
        """Indices of the steps with c > 0, the only ones with a policy gradient."""
        return [int(t) for t in self.c.nonzero()]

    @property
    def first_stochastic(self) -> int:
        """Index of the first stochastic step; 0 if there is none."""
        return min(self.stochastic_steps, default=0)

    def window(self, start: int, stop: int) -> TransitionTable:
        """Return the table with ODE rows outside steps `[start, stop)`."""
        inside = torch.zeros(len(self), dtype=torch.bool)
        inside[start:stop] = True
        a, b, c = _ode(self.sigmas[:-1], self.sigmas[1:], 0.0)
        return dataclasses.replace(
            self,
            a=torch.where(inside, self.a, a),
            b=torch.where(inside, self.b, b),
            c=torch.where(inside, self.c, c),
        )

    def excess_noise(self) -> Tensor:
        """Return the noise in x beyond the next sigma, as the standard deviation after each step,
        float64 `[T]`.

        It is exact for data at a point, where the network's x0_hat is right: x = (1 - sigma) x0 +
        y, and a step multiplies y by a + b/s and adds c noise. The last entry stays on the final
        sample.
        """
        variance = 1.0
        excess = []
        sigmas = self.sigmas.tolist()
        steps = zip(sigmas[:-1], sigmas[1:], self.a.tolist(), self.b.tolist(), self.c.tolist())
        for s, n, a, b, c in steps:
            variance = (a + b / s) ** 2 * variance + c**2
            excess.append(max(variance - n**2, 0.0) ** 0.5)
        return torch.tensor(excess, dtype=torch.float64)

    def _log_prob_weight(self, reduction: str) -> Tensor:
        """Return the factor of mean((x_next - mean)^2) in the log-prob; 0 where c = 0."""
        weight = -torch.ones_like(self.c)
        if _is_log_prob(reduction):
            weight = -1 / (2 * self.c.square())
        return torch.where(self.c > 0, weight, 0.0)

    def coefficients(self, reduction: str = "mean") -> Tensor:
        """Return the table in the form the operators read.

        Args:
            reduction: `mean` (mean log-prob per element), or `unscaled` (-mean((x_next - mean)^2),
                as the authors of cps use).

        Returns:
            float32 `[T, 6]`, rows (a, b, c, w, k, m) with log-prob = w mean((x_next - a x - b v)^2)
            + k and KL = m mean((v - v_anchor)^2) (Eq. 11 with 2 x variance). Logarithms and
            quotients are computed here in float64. w = k = m = 0 where c = 0.
        """
        noisy = self.c > 0
        w = self._log_prob_weight(reduction)
        if _is_log_prob(reduction):
            k = torch.where(noisy, -(self.c.log() + 0.5 * math.log(2 * math.pi)), 0.0)
        else:
            k = torch.zeros_like(self.c)
        m = torch.where(noisy, self.b.square() / (2 * self.c.square()), 0.0)
        return torch.stack([self.a, self.b, self.c, w, k, m], dim=1).float()

    def gradient_scale(self, reduction: str = "mean") -> Tensor:
        """Return N_t, the expected size of the log-prob's gradient in the velocity (Eq. 38),
        float64 `[T]`.

        |b| is the sensitivity of the mean to the network; for the mean log-prob N_t = |b|/c.
        """
        return 2 * self._log_prob_weight(reduction).abs() * self.b.abs() * self.c

    def log_ratio_bias(self, reduction: str = "mean") -> Tensor:
        """Return -E[log-ratio] under the rollout policy in units of the KL, float64 `[T]`: 1 for a
        true log-prob.

        `unscaled` is not a log-prob: there E[log-ratio] = -mean((mu - mu_old)^2), which is -2 c^2
        times the KL.
        """
        return torch.ones_like(self.c) if _is_log_prob(reduction) else 2 * self.c.square()

    def equalizer(self, reduction: str = "mean") -> Tensor:
        """Return S_t = median(N) / (N_t + 1e-8) over the stochastic steps (Eq. 9), float64 `[T]`; 0
        where c = 0."""
        scale = self.gradient_scale(reduction)
        noisy = self.c > 0
        if not noisy.any():
            return torch.zeros_like(scale)
        return torch.where(noisy, scale[noisy].quantile(0.5) / (scale + 1e-8), 0.0)


def transition_table(
    sigmas: Tensor, sampler: str | SamplerRow | Callable[..., Any], eta: float
) -> TransitionTable:
    """Compute the transition scalars of a sampler on a schedule.

    Args:
        sigmas: float64 `[T+1]`, strictly decreasing, in [0, 1].
        sampler: name in `SAMPLERS`, or a sampler of your own, as for `sampler_row`.
        eta: noise level, from 0 (the ODE, for every sampler) to the sampler's `largest_eta`.

    Raises:
        UserError: there is no such sampler, or eta is outside its range.
        ValueError: the schedule is not strictly decreasing within [0, 1].
    """
    row = sampler_row(sampler)
    name = sampler if isinstance(sampler, str) else "the sampler"
    expected = f"{name} is defined up to {row.largest_eta:g}; the nearest is {row.largest_eta:g}"
    require(eta <= row.largest_eta, "sampling.eta", eta, expected)
    sigmas = sigmas.detach().to("cpu", torch.float64)
    s = sigmas[:-1]
    n = sigmas[1:]
    is_row = sigmas.ndim == 1 and len(s) >= 1
    if not is_row or not (s > n).all() or sigmas[-1] < 0 or sigmas[0] > 1:
        raise ValueError("sigmas must be a row of at least 2 strictly falling values within [0, 1]")
    try:
        a, b, c = _step_of(row, s, n, float(eta))
    except ValueError as error:
        raise UserError(f"sampling.sampler = {name!r}: {error}") from error
    return TransitionTable(sigmas=sigmas, a=a, b=b, c=c, notes=row.notes(c))


def forward_table(sigmas: Tensor) -> TransitionTable:
    """Return the table that scores a noised sample x_s = (1-s) x0 + s z by the clean x0: one step
    from s to 0.

    The mean is x0_hat = x_s - s v and the standard deviation s / sqrt(2). The log-prob is then
    -mean((v - (z - x0))^2) up to a constant, and the KL mean((v - v_anchor)^2). See
    forward-process.md.
    """
    s = sigmas[:-1]
    return TransitionTable(sigmas=sigmas, a=torch.ones_like(s), b=-s, c=s / math.sqrt(2))
