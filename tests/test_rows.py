"""A row added to a table works everywhere by what it says it can do; no code compares its name.

The rows here live in these tests alone: each is added to the setting's choices and to its table, as CONTRIBUTING says.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import sage_fast
from sage_fast.algorithm.objective import (
    FEEDBACKS,
    KL_STRATEGIES,
    RATIOS,
    SURROGATES,
    Scored,
    SurrogateRow,
    outside_clip_range,
)
from sage_fast.algorithm.schedule import check_log_prob, check_trainable
from sage_fast.algorithm.transitions import REDUCTIONS, SAMPLERS
from sage_fast.config.engines import ADAPTERS, BYTES, ENGINES, OFFLOADS, OPTIMIZERS
from sage_fast.config.rewards import SHIPPED as REWARDS
from sage_fast.config.schema import Config, ObjectiveConfig
from sage_fast.data.prompts import SETS
from sage_fast.models import load
from sage_fast.models.attention import ATTENTION, REFERENCE
from sage_fast.models.checkpointing import MODES
from sage_fast.models.registry import CHECKPOINTS
from sage_fast.models.registry import SHIPPED as FAMILIES
from sage_fast.parallel.memory import held_bytes
from sage_fast.parallel.optimizers import SCHEDULES
from sage_fast.parallel.settings import deepspeed_settings
from sage_fast.run.writer import TRACKERS
from sage_fast.util.errors import UserError
from tests.tiny import settings, tiny_model, tiny_trainer

PACKAGE = Path(sage_fast.__file__).parent


def cispo(scored: Scored, objective: ObjectiveConfig) -> Tensor:
    """Advantage x log-prob, weighted by the clipped ratio (arXiv 2506.13585)."""
    weight = scored.log_ratio.exp().clamp(1 - objective.clip_range, 1 + objective.clip_range).detach()
    return weight * scored.advantage * scored.log_ratio


def config_with(monkeypatch: pytest.MonkeyPatch, table: dict[str, Any], row: Any, **overrides: Any) -> Config:
    """Settings that name `row`, which is added to `table` as `mine`, for a setting given as `"mine"`."""
    monkeypatch.setitem(table, "mine", row)
    known = {key: value for key, value in overrides.items() if value != "mine"}
    config = settings(**known)
    (key,) = overrides.keys() - known.keys()
    section, field = key.split("__")
    setattr(getattr(config, section), field, "mine")
    return config


UPDATED_TWICE = {"train__optimizer_steps": 2, "objective__clip_range": 1e-6, "train__parity_gate": False}


def iteration(config: Config) -> dict[str, Any]:
    return tiny_trainer(config).iteration(0)


def test_a_surrogate_that_clips_has_all_that_goes_with_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clip fraction, centring, and both gates, as for `clip`."""
    row = SurrogateRow(title="CISPO", value=cispo, held=outside_clip_range, uses_ratio=True)
    mine = config_with(monkeypatch, SURROGATES, row, objective__surrogate="mine", **UPDATED_TWICE)
    found, clip = iteration(mine), iteration(settings(**UPDATED_TWICE))
    assert found["ratio/clip_fraction"] == pytest.approx(clip["ratio/clip_fraction"], abs=0.2)
    assert found["ratio/clip_fraction"] > 0.2

    mine.objective.ratio = "centred"
    assert iteration(mine)["loss"] != found["loss"]

    mine.train.parity_gate = True
    mine.objective.clip_range, mine.objective.ratio = 1e-3, "plain"
    assert "log_prob/rounding" in iteration(mine)

    mine.objective.log_prob = "sum"
    with pytest.raises(UserError, match="the nearest choice is 'mean'"):
        check_log_prob(mine, 30_000_000)


def test_a_surrogate_of_the_forward_process_trains_with_the_ode(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(SURROGATES["nft"])
    given = {"objective__surrogate": "mine", "sampling__sampler": "ode", "kl__strategy": "none"}
    mine = config_with(monkeypatch, SURROGATES, row, **given)
    check_trainable(mine)
    assert iteration(mine)["loss"] == iteration(settings(**given | {"objective__surrogate": "nft"}))["loss"]


def test_a_strategy_with_the_rollout_policy_alone_is_refused_where_it_is_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = config_with(
        monkeypatch, KL_STRATEGIES, KL_STRATEGIES["stepwise"], kl__strategy="mine", kl__velocity_term="closed_form"
    )
    with pytest.raises(UserError, match=r"train.optimizer_steps = 1: the KL of kl.strategy = 'mine' .*is 0"):
        check_trainable(mine)
    mine.kl.velocity_term, mine.kl.feedback, mine.kl.lambda_min = "rollout", "share", 1e-6
    with pytest.raises(UserError, match=r"kl.feedback = 'share': strategy 'mine' has a gradient to hold only with"):
        check_trainable(mine)


def test_a_feedback_that_multiplies_lambda_needs_one_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"kl__velocity_term": "closed_form", "kl__lambda_min": 1e-6, "train__optimizer_steps": 2}
    mine = config_with(monkeypatch, FEEDBACKS, FEEDBACKS["share"], kl__feedback="mine", **given)
    found, share = iteration(mine), iteration(settings(kl__feedback="share", **given))
    assert found["kl/lambda"] == share["kl/lambda"] > 1e-6
    mine.kl.lambda_min = 0.0
    with pytest.raises(UserError, match=r"kl.lambda_min = 0.0: feedback 'mine' multiplies lambda"):
        check_trainable(mine)


def test_a_sampler_is_refused_above_its_largest_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = config_with(monkeypatch, SAMPLERS, SAMPLERS["cps"], sampling__sampler="mine", sampling__eta=1.5)
    with pytest.raises(UserError, match=r"sampling.eta = 1.5: mine is defined up to 1; the nearest is 1"):
        check_trainable(mine)


def test_an_engine_offloads_what_its_row_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its own name, with another row."""
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(ENGINES["plain"], shards=("state",)))
    assert settings(train__offload="optimizer").train.engine == "plain"


def test_the_plan_asks_the_rows_of_an_engine_and_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ENGINES["zero1"], shards=("state", "gradients"))
    mine = config_with(monkeypatch, ENGINES, row, train__engine="mine")
    held, zero2 = (held_bytes(c, tiny_model(c).policy, ranks=4) for c in (mine, settings(train__engine="zero2")))
    assert held == zero2
    assert deepspeed_settings(mine.train, 1)["zero_optimization"]["stage"] == 2
    lean = dataclasses.replace(OPTIMIZERS["adamw"], state_bytes=lambda is_muon: 1.0)
    mine = config_with(monkeypatch, OPTIMIZERS, lean, train__optimizer="mine")
    policy = tiny_model(mine).policy
    planned = held_bytes(mine, policy).training["state of the optimizer (mine)"]
    assert planned == sum(p.numel() for p in policy.parameters().values())


def test_a_backend_that_is_the_reference_gets_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "try_attention", lambda *_: pytest.fail("tried"))
    monkeypatch.setitem(ATTENTION, "mine", dataclasses.replace(ATTENTION[REFERENCE]))
    model = tiny_model(settings())
    load.choose_attention(model, "mine", settings().sampling)
    assert model.attention == "mine"


TABLES: dict[str, tuple[Iterable[str], ...]] = {
    "sage_fast/algorithm/objective.py": (SURROGATES, RATIOS, KL_STRATEGIES, FEEDBACKS),
    "sage_fast/algorithm/transitions.py": (SAMPLERS, REDUCTIONS),
    "sage_fast/config/engines.py": (ENGINES, OFFLOADS, OPTIMIZERS, ADAPTERS, BYTES),
    "sage_fast/config/rewards.py": (REWARDS,),
    "sage_fast/data/prompts.py": (SETS,),
    "sage_fast/models/attention.py": (ATTENTION,),
    "sage_fast/models/checkpointing.py": (MODES,),
    "sage_fast/models/registry.py": (FAMILIES, CHECKPOINTS),
    "sage_fast/parallel/optimizers.py": (SCHEDULES,),
    "sage_fast/run/writer.py": (TRACKERS,),
}
"""File -> the tables in it. A table's own file may name its rows."""
ALLOWED = {
    "'linear' in recomputed": "a part of a block's FLOPs",
    "'attention' in recomputed": "a part of a block's FLOPs",
    "axes.get_yscale() == 'linear'": "the scale of an axis",
    "op == 'mean'": "an operation over the ranks",
    "'attention' in row": "a column of a benchmark's rows",
    "name != 'all'": "all claims of a study",
    "'all' in options.claims": "all claims of a study",
    "kl == 'fixed'": "the name of a study's variant",
    "name == DEFAULT": "the name of a study's variant",
    "name != DEFAULT": "the name of a study's variant",
    "label.startswith('sage')": "a study's own label of a curve",
    "name == 'paper'": "a claim about this feedback",
    "name == 'sage'": "a claim about this sampler",
}
"""Expression -> what its word is, where it is no row's name or a study is about the row."""


def row_names(own: str = "") -> set[str]:
    """Names of all rows, except for those in the file `own`."""
    return {name for file, tables in TABLES.items() if file != own for table in tables for name in table}


def comparisons(source: str, rows: set[str]) -> Iterator[str]:
    """Expressions that compare something with the name of a row, spelled out or kept in a variable."""
    tree = ast.parse(source)
    fields = {id(statement) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body}
    kept = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and id(node) not in fields
        for target in getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }

    def texts(side: ast.AST) -> Iterator[str]:
        side = kept.get(side.id, side) if isinstance(side, ast.Name) else side
        for part in getattr(side, "elts", [side]):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value

    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                named = any(text in rows for side in (left, *others) for text in texts(side))
            case ast.match_case(pattern=pattern):
                values = (part.value for part in ast.walk(pattern) if isinstance(part, ast.MatchValue))
                named = any(text in rows for value in values for text in texts(value))
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith" as how), args=[given, *_]):
                named = any(text and getattr(row, how)(text) for text in texts(given) for row in rows)
            case _:
                continue
        if named:
            yield ast.unparse(node)


def test_no_code_compares_the_name_of_a_row() -> None:
    repository = PACKAGE.parent
    found = {}
    for room in ("sage_fast", "kernels", "benchmarks", "studies", "scripts"):
        for file in sorted((repository / room).rglob("*.py")):
            name = str(file.relative_to(repository))
            found |= dict.fromkeys(comparisons(file.read_text(), row_names(name)), name)
    assert {text: name for text, name in found.items() if text not in ALLOWED} == {}
    assert found.keys() >= ALLOWED.keys()


@pytest.mark.parametrize(
    "source",
    [
        "surrogate = objective.surrogate\nif surrogate == 'clip': ...",
        "match config.train.engine:\n    case 'plain' | 'zero1': ...",
        "if name in ('clip', 'kl_mask'): ...",
        "if name not in {'clip'}: ...",
        "CLIPPED = ('clip', 'kl_mask')\nif name in CLIPPED: ...",
        "if model.attention != 'sdpa': ...",
        "if 'sdpa' != asked: ...",
        "if model.gradient_checkpointing == 'full': ...",
        "if config.train.schedule in ['cosine']: ...",
        "if reward.name == 'testbed': ...",
        "if 'wandb' in config.tracking.trackers: ...",
        "if config.eval.judge == 'testbed-judge': ...",
        "if surrogate.startswith('nft'): ...",
        "if engine.startswith(('plain', 'zero')): ...",
        "if source.startswith('testbed:'): ...",
        "if path == 'testbed': ...",
    ],
)
def test_a_comparison_with_the_name_of_a_row_is_found(source: str) -> None:
    assert list(comparisons(source, row_names()))


@pytest.mark.parametrize(
    "source",
    ["row = ATTENTION['sdpa']", "settings(kl__strategy='dual')", "if KL_STRATEGIES[name].velocity: ...",
     "if kl.velocity_term == 'closed_form': ...", "if std['sage'] < std['flow']: ..."],
)  # fmt: skip
def test_a_row_may_be_looked_up_and_asked(source: str) -> None:
    assert not list(comparisons(source, row_names()))
