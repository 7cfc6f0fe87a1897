"""Claims that need no training: their rules on made-up data; their numbers against known ones."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from sage_fast.algorithm.transitions import sigma_schedule
from studies.drawn import picture
from studies.finding import Claim, Material
from studies.paper import adapter, gradients, printed, samplers
from tests.tiny import paper_trainer

pytestmark = pytest.mark.soak

QUICK = Material(quick=True, runs={})
CLAIMS = {
    claim.name: claim
    for module in (samplers, gradients, printed, adapter)
    for claim in module.CLAIMS
}


def test_step_noise() -> None:
    finding = CLAIMS["step-noise"].find(QUICK)
    assert finding.verdict == "held"
    assert finding.table[3][:3] == ["step 0 in (c)", "0.556", "0.500"]
    default = {
        row["sampler"]: row["std"]
        for row in finding.rows
        if (row["regime"], row["step"]) == ("c", 0)
    }
    assert default.keys() == set(samplers.NOISY)
    n = float(sigma_schedule(20, 5.0)[1])
    clamped = samplers.step_noise(20, 5.0, "b")["flow"]
    assert float(clamped[0]) == pytest.approx(0.5 * ((1 - n) / 3e-3) ** 0.5)
    assert picture(finding.draw, CLAIMS["step-noise"].size, "svg", "x").startswith(b"<?xml")
    # the rule has to see that sage is above flow at most steps
    noise = {
        (regime, *at): samplers.step_noise(*at, regime)
        for regime in samplers.REGIMES
        for at in samplers.GRID
    }
    one = noise["c", 20, 5.0]
    noise["c", 20, 5.0] = {**one, "sage": one["flow"], "flow": one["sage"]}
    assert samplers.judge_step_noise(noise) == ("not held", {"a": True, "b": True, "c": False})


def test_rule_of_excess_noise() -> None:
    draw = np.random.default_rng(0).normal(0, 0.01, 400)
    world = {(name, 1.0): at + draw for name, at in (("sage", 1.0), ("flow", 1.1), ("dance", 1.2))}
    noise = np.random.default_rng(1).normal(0, 0.1, 400)
    assert samplers.judge_excess_noise([world]) == "held"
    assert (
        samplers.judge_excess_noise([world, {**world, ("flow", 1.0): 0.9 + draw + noise}])
        == "not held"
    )
    unsure = {**world, ("flow", 1.0): 1.0 + draw + noise - noise.mean()}
    assert samplers.judge_excess_noise([world, unsure]) == "not decidable"


def test_rules_of_gradients_and_adapters() -> None:
    predicted = np.array([1.0, 4.0, 16.0])
    flat = np.ones(3)
    norms = gradients.Norms(
        sigma=flat, by_std=predicted, by_row=flat, weight=1 / predicted, velocity=flat,
        log_prob=flat,
        policy=3 * predicted,
    )  # fmt: skip
    assert gradients.mismatch(3 * predicted, predicted) == pytest.approx(1)
    assert gradients.mismatch(np.array([1.0, 4.0]), np.array([1.0, 1.0])) == pytest.approx(2)
    assert (
        gradients.judge_law(norms)
        == gradients.judge_range(norms)
        == gradients.judge_equalizer(norms)
        == "held"
    )
    assert gradients.judge_equalizer(dataclasses.replace(norms, weight=flat)) == "not held"
    # another law, the same range; then the other way round
    other = dataclasses.replace(norms, by_std=flat)
    assert (gradients.judge_law(other), gradients.judge_range(other)) == ("not held", "held")
    narrow = dataclasses.replace(norms, by_std=flat, policy=flat)
    assert (gradients.judge_law(narrow), gradients.judge_range(narrow)) == ("held", "not held")
    assert gradients.room_for_importance(np.array([1.0, 3.0])) == pytest.approx(1 - 4 / 5)
    at = adapter.JUDGED
    assert adapter.judge_responses({(at, "ours"): (1.0, 0.05), (at, "peft"): (0.3, 0.05)}) == "held"
    assert (
        adapter.judge_responses({(at, "ours"): (0.4, 0.05), (at, "peft"): (0.3, 0.05)})
        == "not decidable"
    )
    assert (
        adapter.judge_responses({(at, "ours"): (0.3, 0.05), (at, "peft"): (1.0, 0.05)})
        == "not held"
    )


def test_gradients_are_those_of_the_trainer(tmp_path: Path) -> None:
    """On the weights, the gradient of a single step is that of the trainer's update.

    On the velocity it is N_t / sqrt(D) at every step, not 1/sqrt(Sigma).
    """
    overrides = {key.replace(".", "__"): value for key, value in gradients.SETTINGS.items()}
    trainer = paper_trainer(
        tmp_path, **overrides, sampling__steps=1, sampling__eta=0.5, train__prompts_per_iteration=1
    )
    one = gradients.measure_gradients(eta=0.5, groups=1, steps=1)
    assert float(one.policy[0]) == pytest.approx(trainer.iteration(0)["grad_norm"], rel=1e-3)
    norms = gradients.measure_gradients(eta=0.5, groups=1, steps=4)
    np.testing.assert_allclose(norms.velocity, norms.by_row / (32 * 5 * 4 * 4) ** 0.5, rtol=0.03)
    assert gradients.spread(norms.weight * norms.velocity) < 1.06
    assert gradients.mismatch(norms.velocity, norms.by_std) > 2
    assert (norms.policy > 0).all()


def test_print() -> None:
    """As departures.md says, the score without its (1-s) factor moves the mode weights; the
    corrected one does not."""
    finding = CLAIMS["print"].find(QUICK)
    assert finding.verdict == "not held"
    drift = printed.mode_drift(4000)
    assert drift["ours"] < 0.12 < 0.3 < drift["printed"]
    assert picture(finding.draw, (8.6, 3.4), "svg", "x").startswith(b"<?xml")
    loops = {(name, 1.0): [(1.0, printed.TARGET)] for name in ("printed", "opposite")}
    assert printed.judge_print({"ours": 0.0, "printed": 0.0}, loops) == "held"
    assert printed.judge_print({"ours": 0.0, "printed": 0.5}, loops) == "not held"
    assert printed.judge_print({"ours": 0.5, "printed": 0.5}, loops) == "not decidable"
    for start in printed.STARTS:  # no loop starts at its target
        assert not printed.arrives(printed.closed_loop("opposite", start)[:1])
    # the KL is ten times its target
    values = [value for value, _ in printed.closed_loop("printed", 0.01)]
    assert values[1] == pytest.approx(0.009)
    assert values[-1] == pytest.approx(printed.BALANCE / 1000)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.soak
def test_quick_findings(claim: Claim) -> None:
    finding = claim.find(QUICK)
    assert finding.rows
    assert not re.search(r"nan|inf", finding.text)
    assert picture(finding.draw, claim.size, "svg", claim.name).startswith(b"<?xml")
