"""The transition table against samplers.md, diffusers' scheduler, and distributions that are known
exactly."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from sage_fast.algorithm.transitions import SAMPLERS, sigma_schedule, transition_table
from sage_fast.util.errors import UserError
from studies.paper.mixture import Mixture, sample

STEPS = (1, 2, 3, 10, 37, 68, 100, 1000)
SHIFTS = (0.1, 1.0, 3.0, 5.0, 9.0, 17.0)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_finite_everywhere(sampler: str, shift: float) -> None:
    for steps in STEPS:
        for eta in (0.0, 0.3, 1.0):
            table = transition_table(sigma_schedule(steps, shift), sampler, eta)
            assert len(table) == steps
            for values in (table.a, table.b, table.c, table.equalizer()):
                assert values.dtype == torch.float64
                assert values.isfinite().all(), (sampler, steps, shift, eta)
            assert (table.c >= 0).all()
            for reduction in ("mean", "unscaled"):
                assert table.coefficients(reduction).isfinite().all()


def scalar_row(sampler: str, s: float, n: float, eta: float) -> tuple[float, float, float]:
    """One row by hand, with math alone."""
    d = s - n
    if sampler in ("cps", "dance-precise", "precise"):
        if sampler == "cps":
            r = n * math.cos(eta * math.pi / 2)
        elif sampler == "dance-precise":
            r = n * math.exp(-(eta**2) / 2 * (1 / n - 1 / s)) if n else 0.0
        else:
            rho = 0.0 if s == 1 else n * (1 - s) / (s * (1 - n))
            r = n * rho ** (eta**2 / 2)
        return (1 - n) + r, -(1 - n) * s + r * (1 - s), math.sqrt(n**2 - r**2)
    if sampler == "sage":
        variance = eta**2 * (-d + math.log(max(1 - n, 3e-3) / max(1 - s, 3e-3)))
    else:
        variance = {
            "ode": 0.0,
            "dance": eta**2 * d,
            "flow": eta**2 * d * s / (1 - (n if s == 1 else s)),
        }[sampler]
    return 1 - variance / (2 * s), -d - variance * (1 - s) / (2 * s), math.sqrt(variance)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rows_by_hand(sampler: str) -> None:
    sigmas = sigma_schedule(20, 5.0)
    table = transition_table(sigmas, sampler, 0.7)
    for t in range(20):
        expected = scalar_row(sampler, float(sigmas[t]), float(sigmas[t + 1]), 0.7)
        actual = (float(table.a[t]), float(table.b[t]), float(table.c[t]))
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-15), t


def test_schedule_and_ode_are_those_of_diffusers() -> None:
    """Ten Euler steps of the published scheduler, driven as the pipeline drives it."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    steps = 10
    scheduler.set_timesteps(sigmas=torch.linspace(1, 0, steps + 1)[:-1].numpy())
    sigmas = sigma_schedule(steps, 5.0)
    torch.testing.assert_close(scheduler.sigmas.double(), sigmas, rtol=1e-6, atol=1e-7)

    table = transition_table(sigmas, "ode", 0.0)
    ours = theirs = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))
    for t, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(torch.sin(theirs + t), timestep, theirs).prev_sample
        a, b, c = (float(x[t]) for x in (table.a, table.b, table.c))
        ours = a * ours + b * torch.sin(ours + t)
        assert (a, c) == (1.0, 0.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_eta_zero_is_euler(sampler: str) -> None:
    sigmas = sigma_schedule(12, 3.0)
    table, ode = transition_table(sigmas, sampler, 0.0), transition_table(sigmas, "ode", 0.0)
    for name in ("a", "b", "c"):
        torch.testing.assert_close(getattr(table, name), getattr(ode, name), rtol=0, atol=1e-15)


def test_cps_with_the_exact_ratio_is_exact() -> None:
    """At the eta where cps keeps the same share of noise, the two rows are the same."""
    sigmas = sigma_schedule(15, 5.0)
    exact = transition_table(sigmas, "precise", 0.8)
    for t in range(1, 14):
        s, n = float(sigmas[t]), float(sigmas[t + 1])
        kept = (n * (1 - s) / (s * (1 - n))) ** (0.8**2 / 2)
        cps = transition_table(sigmas[t : t + 2], "cps", 2 / math.pi * math.acos(kept))
        row = (float(cps.a[0]), float(cps.b[0]), float(cps.c[0]))
        assert row == pytest.approx(
            (float(exact.a[t]), float(exact.b[t]), float(exact.c[t])), rel=1e-9
        )


@pytest.mark.parametrize(("closed", "euler"), [("dance-precise", "dance"), ("precise", "flow")])
def test_a_closed_form_solves_the_sde_of_its_euler_step(closed: str, euler: str) -> None:
    """In short steps the rows are the same, and one long step keeps as much of the old noise as its
    parts do."""
    fine = sigma_schedule(100_000, 1.0)
    inside = slice(20_000, 80_000)  # at the ends a step is long beside sigma or 1 - sigma
    ours, theirs = (transition_table(fine, sampler, 0.8) for sampler in (closed, euler))
    for name in ("a", "b", "c"):
        torch.testing.assert_close(
            getattr(ours, name)[inside], getattr(theirs, name)[inside], rtol=1e-4, atol=1e-8
        )

    def kept(*sigmas: float) -> float:
        levels = torch.tensor(sigmas, dtype=torch.float64)
        return float(
            ((transition_table(levels, closed, 0.8).a - (1 - levels[1:])) / levels[:-1]).prod()
        )

    assert kept(0.7, 0.5, 0.4, 0.2) == pytest.approx(kept(0.7, 0.2), rel=1e-12)
    assert kept(0.7, 0.2) < 0.2 / 0.7


def test_flow_is_dance_with_its_own_noise_level() -> None:
    """dance is flow's formula with g = eta in place of eta sqrt(s/(1-s))."""
    sigmas = sigma_schedule(15, 5.0)
    flow = transition_table(sigmas, "flow", 0.8)
    for t in range(1, 15):
        g = 0.8 * math.sqrt(sigmas[t] / (1 - sigmas[t]))
        dance = transition_table(sigmas[t : t + 2], "dance", g)
        for name in ("a", "b", "c"):
            assert float(getattr(dance, name)[0]) == pytest.approx(
                float(getattr(flow, name)[t]), rel=1e-12
            )


def test_sage_at_its_clamp() -> None:
    """departures.md: noisier than flow at step 0, deterministic where naive code is nan; it says
    what it leaves."""
    sage, flow = (transition_table(sigma_schedule(20, 5.0), name, 0.5) for name in ("sage", "flow"))
    assert float(sage.c[0]) == pytest.approx(0.556, abs=5e-4)
    assert float(flow.c[0]) == pytest.approx(0.500, abs=5e-4)
    assert "leaves noise of std" in sage.notes[0]
    assert not flow.notes
    assert float(transition_table(sigma_schedule(20, 5.0), "precise", 0.5).c[-1]) == 0.0
    for steps, shift in ((68, 5.0), (38, 9.0)):
        table = transition_table(sigma_schedule(steps, shift), "sage", 1.0)
        assert float(table.c[0]) == 0.0
        assert 0 not in table.stochastic_steps


def test_equalizer_by_hand() -> None:
    table = transition_table(sigma_schedule(9, 5.0), "flow", 0.7)
    norms = sorted(float(b.abs() / c) for b, c in zip(table.b, table.c))
    expected = [norms[4] / float(b.abs() / c) for b, c in zip(table.b, table.c)]
    assert table.equalizer().tolist() == pytest.approx(expected, rel=1e-6)
    exact = transition_table(sigma_schedule(9, 5.0), "precise", 0.7)
    assert exact.equalizer()[-1] == 0
    assert not transition_table(sigma_schedule(9, 5.0), "ode", 0.7).equalizer().any()
    even = transition_table(sigma_schedule(20, 5.0), "sage", 0.5)  # the lower median: departures.md
    assert float(
        even.gradient_scale().median() / even.gradient_scale().quantile(0.5)
    ) == pytest.approx(0.917, abs=5e-4)


def test_window_is_ode_outside() -> None:
    sigmas = sigma_schedule(10, 5.0)
    table, ode = transition_table(sigmas, "flow", 0.7), transition_table(sigmas, "ode", 0.0)
    window = table.window(3, 6)
    assert window.stochastic_steps == [3, 4, 5]
    for name in ("a", "b", "c"):
        assert torch.equal(getattr(window, name)[3:6], getattr(table, name)[3:6])
        assert torch.equal(getattr(window, name)[6:], getattr(ode, name)[6:])


def test_coefficients_by_hand() -> None:
    table = transition_table(sigma_schedule(4, 3.0), "dance", 0.6)
    a, b, c, w, k, m = table.coefficients()[2].tolist()
    assert (a, b, c) == pytest.approx(
        (float(table.a[2]), float(table.b[2]), float(table.c[2])), rel=1e-6
    )
    assert w == pytest.approx(-1 / (2 * c**2), rel=1e-6)
    assert k == pytest.approx(-math.log(c) - 0.5 * math.log(2 * math.pi), rel=1e-6)
    assert m == pytest.approx(b**2 / (2 * c**2), rel=1e-6)
    assert table.coefficients("unscaled")[2, 3:].tolist() == pytest.approx([-1, 0, m], rel=1e-6)


# -- distributions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("sampler", ["precise", "cps", "ode"])
def test_point_mass_keeps_its_marginal(sampler: str, steps: int) -> None:
    """With all data at x0, x_s ~ N((1-s) x0, s^2): mean and variance are followed in closed form,
    step by step.

    v = (x - x0)/s there, so x_next = (a + b/s) x - (b/s) x0 + c noise.
    """
    x0 = 0.7
    table = transition_table(sigma_schedule(steps, 5.0), sampler, 0.9)
    mean, variance = 0.0, 1.0
    for t in range(steps):
        s, n = float(table.sigmas[t]), float(table.sigmas[t + 1])
        gain = float(table.a[t] + table.b[t] / s)
        mean = gain * mean - float(table.b[t]) / s * x0
        variance = gain**2 * variance + float(table.c[t]) ** 2
        assert mean == pytest.approx((1 - n) * x0, abs=1e-13)
        assert variance == pytest.approx(n**2, abs=1e-13)


@pytest.mark.parametrize(
    ("sampler", "eta", "std"),
    [("ode", 0.0, 0.2896), ("precise", 1.0, 0.2830), ("precise", math.sqrt(2), 0.2765)],
)
def test_freezing_x0_hat_costs_more_with_noise(sampler: str, eta: float, std: float) -> None:
    """samplers.md: final std of data N(0, 0.3^2) under its exact velocity, a multiple of x; 200
    steps, shift 5."""
    table = transition_table(sigma_schedule(200, 5.0), sampler, eta)
    variance = 1.0
    for s, a, b, c in zip(table.sigmas.tolist(), table.a, table.b, table.c):
        velocity = (s - (1 - s) * 0.09) / ((1 - s) ** 2 * 0.09 + s**2)
        variance = float((a + b * velocity) ** 2 * variance + c**2)
    assert math.sqrt(variance) == pytest.approx(std, abs=5e-5)


def test_mixture_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """On modes this narrow `precise` has the ODE's error at any number of steps; the others exceed
    it as printed."""
    mixture, count = Mixture(), 4000
    lines = [
        f"{'steps':>6}"
        + "".join(f"{name:>16}" for name in ("ode", "precise", "sage", "flow", "dance", "cps"))
    ]
    for steps in (5, 10, 20, 40):
        rms: dict[str, tuple[float, float]] = {}
        shares: dict[str, Tensor] = {}
        for sampler in ("ode", "precise", "sage", "flow", "dance", "cps"):
            table = transition_table(sigma_schedule(steps, 5.0), sampler, 1.0)
            x = sample(mixture, table, count, seed=steps)
            squared = mixture.distance(x).square()
            mean = float(squared.mean())
            rms[sampler] = (
                math.sqrt(mean),
                float(squared.std()) / math.sqrt(count) / (2 * math.sqrt(mean)),
            )
            shares[sampler] = mixture.shares(x)
        lines.append(
            f"{steps:>6}"
            + "".join(f"{v:>9.4f} x{v / rms['ode'][0]:<5.2f}" for v, _ in rms.values())
        )
        (ode, ode_se), (exact, exact_se) = rms["ode"], rms["precise"]
        assert abs(exact - ode) < 4 * math.hypot(ode_se, exact_se), (steps, rms)
        for sampler in ("sage", "flow", "dance"):
            assert rms[sampler][0] > 1.5 * ode, (steps, sampler, rms)
            table = transition_table(sigma_schedule(steps, 5.0), sampler, 1.0)
            predicted = 4 * float(table.excess_noise()[-1])  # in 16 dimensions
            assert math.sqrt(rms[sampler][0] ** 2 - ode**2) == pytest.approx(predicted, rel=0.1), (
                steps,
                sampler,
            )
        assert (shares["precise"] - 0.25).abs().sum() < 0.1, (steps, shares)
    with capsys.disabled():
        print(
            "\nrms distance to the nearest mode, and its ratio to the ODE's (shift 5, eta 1)\n"
            + "\n".join(lines)
        )


def test_excess_noise_by_hand() -> None:
    """Two steps of dance multiply y by n/s - S/(2 s^2) and add S to its variance; who keeps the
    marginal has none."""
    table = transition_table(torch.tensor([1.0, 0.6, 0.0], dtype=torch.float64), "dance", 0.5)
    first = (0.6 - 0.1 / 2) ** 2 + 0.1
    second = (0 - 0.15 / (2 * 0.36)) ** 2 * first + 0.15
    assert table.excess_noise().tolist() == pytest.approx(
        [math.sqrt(first - 0.36), math.sqrt(second)], rel=1e-12
    )
    for sampler in ("precise", "cps", "ode"):
        assert transition_table(sigma_schedule(20, 5.0), sampler, 0.9).excess_noise().max() < 1e-7


# -- messages --------------------------------------------------------------------------------------


def test_messages() -> None:
    with pytest.raises(
        UserError, match=r"sampling.eta = 1.5: cps is defined up to 1; the nearest is 1"
    ):
        transition_table(sigma_schedule(5, 5.0), "cps", 1.5)
    with pytest.raises(ValueError, match="strictly falling"):
        transition_table(torch.tensor([0.0, 1.0]), "ode", 0.0)
