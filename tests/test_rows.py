"""A row added to a table works everywhere by what it says it can do.

The rows here live in these tests alone: each is added to the setting's choices and to its table, as
CONTRIBUTING says.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from sage_fast.algorithm.kl_weight import FEEDBACKS
from sage_fast.algorithm.objective import (
    KL_STRATEGIES,
    SURROGATES,
    Scored,
    SurrogateRow,
    clipped_by_range,
)
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.algorithm.transitions import SAMPLERS
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
    setattr(getattr(config, section), field, "mine")
    return config


UPDATED_TWICE = {
    "train__optimizer_steps": 2,
    "objective__clip_range": 1e-6,
    "train__parity_gate": False,
}


def iteration(config: Config) -> dict[str, Any]:
    return tiny_trainer(config).iteration(0)


def test_a_surrogate_that_clips_has_all_that_goes_with_a_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clip fraction, centring, and both gates, as for `clip`."""
    row = SurrogateRow(title="CISPO", value=cispo, clipped=clipped_by_range, uses_ratio=True)
    mine = config_with(monkeypatch, SURROGATES, row, objective__surrogate="mine", **UPDATED_TWICE)
    found, clip = iteration(mine), iteration(settings(**UPDATED_TWICE))
    assert found["ratio/clip_fraction"] == pytest.approx(clip["ratio/clip_fraction"], abs=0.2)
    assert found["ratio/clip_fraction"] > 0.1

    mine.objective.ratio = "centred"
    assert iteration(mine)["loss"] != found["loss"]

    mine.train.parity_gate = True
    mine.objective.clip_range, mine.objective.ratio = 1e-3, "plain"
    assert "log_prob/rounding" in iteration(mine)


def test_a_surrogate_of_the_forward_process_trains_with_the_ode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = dataclasses.replace(SURROGATES["nft"])
    given = {"objective__surrogate": "mine", "sampling__sampler": "ode", "kl__strategy": "none"}
    mine = config_with(monkeypatch, SURROGATES, row, **given)
    check_trainable(mine)
    assert (
        iteration(mine)["loss"]
        == iteration(settings(**given | {"objective__surrogate": "nft"}))["loss"]
    )


def test_a_strategy_with_the_rollout_policy_alone_is_refused_where_it_is_inert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = config_with(
        monkeypatch,
        KL_STRATEGIES,
        KL_STRATEGIES["stepwise"],
        kl__strategy="mine",
        kl__velocity_term="closed_form",
    )
    with pytest.raises(
        UserError, match=r"train.optimizer_steps = 1: the KL of kl.strategy = 'mine' .*is 0"
    ):
        check_trainable(mine)


def test_a_feedback_is_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "kl__lambda_min": 1e-6,
        "kl__lambda_max": 1e-3,
        "kl__warmup_steps": 0,
        "kl__strategy": "stepwise",
    }
    mine = config_with(monkeypatch, FEEDBACKS, FEEDBACKS["paper"], kl__feedback="mine", **given)
    found, paper = iteration(mine), iteration(settings(kl__feedback="paper", **given))
    assert found["kl/lambda"] == paper["kl/lambda"] > 1e-6


def test_a_sampler_is_refused_above_its_largest_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = config_with(
        monkeypatch, SAMPLERS, SAMPLERS["cps"], sampling__sampler="mine", sampling__eta=1.5
    )
    with pytest.raises(
        UserError, match=r"sampling.eta = 1.5: mine is defined up to 1; the nearest is 1"
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
        "sage_fast.models.attention.choose.try_attention", lambda *_: pytest.fail("tried")
    )
    monkeypatch.setitem(ATTENTION, "mine", dataclasses.replace(ATTENTION[REFERENCE]))
    model = tiny_model(settings())
    choose_attention(model, "mine", settings().sampling)
    assert model.attention == "mine"
