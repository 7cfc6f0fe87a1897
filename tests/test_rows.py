"""A row of a user's, or one added to a table, works everywhere by what it says it can do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from sage_fast.algorithm.kl_weight import FeedbackRow
from sage_fast.algorithm.objective import (
    KL_STRATEGIES,
    SURROGATES,
    KLStrategy,
    Scored,
    SurrogateRow,
    clipped_by_range,
)
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.algorithm.transitions import SAMPLERS, SamplerRow
from sage_fast.config.engines import ENGINES, OPTIMIZERS
from sage_fast.config.schema import Config, ObjectiveConfig
from sage_fast.models.attention.backends import ATTENTION, REFERENCE
from sage_fast.models.attention.choose import choose_attention
from sage_fast.parallel.deepspeed_config import deepspeed_settings
from sage_fast.parallel.engine_memory import engine_memory
from sage_fast.util.errors import UserError
from tests.tiny import settings, tiny_model, tiny_trainer


def cispo(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Advantage x log-prob, weighted by the clipped ratio (arXiv 2506.13585)."""
    weight = (
        scored.log_ratio.exp().clamp(1 - objective.clip_range, 1 + objective.clip_range).detach()
    )
    return weight * scored.advantage * scored.log_ratio


def config_with(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, Any], row: Any, **overrides: Any
) -> Config:
    """Settings that name `row`, which is added to `table` as `mine`, for a setting given as
    `"mine"`."""
    monkeypatch.setitem(table, "mine", row)
    known = {key: value for key, value in overrides.items() if value != "mine"}
    config = settings(**known)
    (key,) = overrides.keys() - known.keys()
    section, field = key.split("__")
    # past the check, which knows shipped names alone
    object.__setattr__(getattr(config, section), field, "mine")
    return config


UPDATED_TWICE = {
    "train__optimizer_steps": 2,
    "objective__clip_range": 1e-6,
    "train__parity_gate": False,
}


def iteration(config: Config) -> dict[str, Any]:
    return tiny_trainer(config).iteration(0)


CISPO = SurrogateRow(title="CISPO", value=cispo, clipped=clipped_by_range, uses_ratio=True)
NFT = dataclasses.replace(SURROGATES["nft"])
TO_ROLLOUT = KLStrategy(anchor=None, velocity=True)
AS_PRINTED = FeedbackRow(factors=(0.9, 1.1))
CPS = SamplerRow(step=SAMPLERS["cps"].step, largest_eta=1.0)
HERE = "tests.test_rows"
"""Module of these rows, as settings name it."""


def test_a_surrogate_that_clips_has_all_that_goes_with_a_ratio() -> None:
    """Clip fraction, centring, and both gates, as for `clip`."""
    mine = settings(objective__surrogate=f"{HERE}:CISPO", **UPDATED_TWICE)
    found, clip = iteration(mine), iteration(settings(**UPDATED_TWICE))
    assert found["ratio/clip_fraction"] == pytest.approx(clip["ratio/clip_fraction"], abs=0.2)
    assert found["ratio/clip_fraction"] > 0.1

    centred = mine.replace({"objective.ratio": "centred"})
    assert iteration(centred)["loss"] != found["loss"]

    gated = mine.replace({"train.parity_gate": True, "objective.clip_range": 1e-3})
    assert "log_prob/rounding" in iteration(gated)


def test_a_surrogate_of_the_forward_process_trains_with_the_ode() -> None:
    given = {"sampling__sampler": "ode", "kl__strategy": "none"}
    mine = settings(objective__surrogate=f"{HERE}:NFT", **given)
    check_trainable(mine)
    shipped = settings(objective__surrogate="nft", **given)
    assert iteration(mine)["loss"] == iteration(shipped)["loss"]


def test_a_strategy_with_the_rollout_policy_alone_is_refused_where_it_is_inert() -> None:
    mine = settings(kl__strategy=f"{HERE}:TO_ROLLOUT", kl__velocity_term="closed_form")
    with pytest.raises(
        UserError,
        match=r"train.optimizer_steps = 1: the KL of kl.strategy = '.*:TO_.*is 0",
    ):
        check_trainable(mine)


def test_a_feedback_is_its_factors() -> None:
    given = {
        "kl__lambda_min": 1e-6,
        "kl__lambda_max": 1e-3,
        "kl__warmup_steps": 0,
        "kl__strategy": "stepwise",
    }
    found = iteration(settings(kl__feedback=f"{HERE}:AS_PRINTED", **given))
    paper = iteration(settings(kl__feedback="paper", **given))
    assert found["kl/lambda"] == paper["kl/lambda"] > 1e-6


def test_a_sampler_is_refused_above_its_largest_eta() -> None:
    mine = settings(sampling__sampler=f"{HERE}:CPS", sampling__eta=1.5)
    with pytest.raises(
        UserError, match=r"sampling.eta = 1.5: .*:CPS is defined up to 1; the nearest is 1"
    ):
        check_trainable(mine)


def test_the_plan_asks_the_rows_of_an_engine_and_an_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = dataclasses.replace(ENGINES["zero1"], shards=("state", "gradients"))
    mine = config_with(monkeypatch, ENGINES, row, train__engine="mine")
    anchored = KL_STRATEGIES["dual"]
    held, zero2 = (
        engine_memory(c.model, c.train, anchored, tiny_model(c).policy, ranks=4)
        for c in (mine, settings(train__engine="zero2"))
    )
    assert held == zero2
    assert deepspeed_settings(mine.train, 1)["zero_optimization"]["stage"] == 2
    mine = config_with(monkeypatch, OPTIMIZERS, True, train__optimizer="mine")
    policy = tiny_model(mine).policy
    planned, muon, adamw = (
        engine_memory(
            mine.model,
            settings(train__optimizer=name).train if name else mine.train,
            anchored,
            policy,
        )
        for name in ("", "muon", "adamw")
    )
    assert planned == muon
    assert (
        planned.optimizer_state
        < adamw.optimizer_state
        == 8 * sum(p.numel() for p in policy.parameters().values())
    )


def test_a_backend_that_is_the_reference_gets_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sage_fast.models.attention.choose.try_uses", lambda *_: pytest.fail("tried")
    )
    monkeypatch.setitem(ATTENTION, "mine", dataclasses.replace(ATTENTION[REFERENCE]))
    model = tiny_model(settings())
    choose_attention(model, "mine", settings().sampling)
    assert model.attention == "mine"
