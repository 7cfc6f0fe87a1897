"""What a run resolves, it resolves once: settings, ranks, the model's spec and the prompts."""

import functools
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.config.rank_checks import check_sequence_parallel
from sage_fast.config.schema import Config
from sage_fast.data.prompts import SETS, read_prompts
from sage_fast.models.find import find_spec
from sage_fast.util.errors import UserError
from sage_fast.util.process_group import initialize
from tests.tiny import settings, train

FUNCTIONS = (initialize, check_trainable, check_sequence_parallel, find_spec)


def count_calls(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    """Count calls of `FUNCTIONS` and of reading each prompt file, wherever they were imported."""
    places: dict[Any, Any] = {}

    def counting(function: Any) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[f"read {args[0]}" if function is read_prompts else function.__name__] += 1
            return function(*args, **kwargs)

        return counted

    for function in (*FUNCTIONS, read_prompts):
        places[function] = counting(function)
    for name, module in list(sys.modules.items()):
        if name.startswith("sage_fast"):
            for attribute, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__hash__", None) and value in places:
                    monkeypatch.setattr(module, attribute, places[value])


def count_made(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    """Count the objects that resolve settings."""
    for cls in (Objective, ResolvedConfig):
        made = cls.__init__

        def counted(self: Any, config: Config, made: Any = made) -> None:
            calls[type(self).__name__] += 1
            made(self, config)

        monkeypatch.setattr(cls, "__init__", counted)


def test_a_run_resolves_its_settings_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = settings(
        output=str(tmp_path / "run"), train__iterations=1, reward__name="testbed",
        sampling__num_frames=17,
        sampling__steps=2, eval__steps=1, eval__num_prompts=1, eval__seeds_per_prompt=1,
        tracking__trackers=[],
    )  # fmt: skip
    assert (config.data.prompts, config.data.eval_prompts) == tuple(SETS)
    calls: Counter[str] = Counter()
    count_calls(monkeypatch, calls)
    count_made(monkeypatch, calls)
    train(config)
    expected = {function.__name__: 1 for function in FUNCTIONS} | {
        "Objective": 1,
        "ResolvedConfig": 1,
    }
    assert calls == expected | {f"read {name}": 1 for name in SETS}


def test_settings_outside_a_samplers_range_are_refused_before_a_table_is_made() -> None:
    with pytest.raises(
        UserError, match=r"sampling.eta = 1.5: cps is defined up to 1; the nearest is 1"
    ):
        ResolvedConfig(settings(sampling__sampler="cps", sampling__eta=1.5))


def test_the_trained_steps_of_an_iteration_are_as_many_in_every_other() -> None:
    resolved = ResolvedConfig(settings(sampling__steps=10, train__timestep_fraction=0.35))
    draws = [resolved.trained_steps(resolved.table, iteration) for iteration in range(8)]
    assert {len(steps) for steps in draws} == {4}
    assert len(set(map(tuple, draws))) > 1
    assert all(steps == sorted(set(steps)) for steps in draws)
    assert resolved.longest_window == draws[0]


def test_a_fraction_of_the_steps_is_that_of_its_decimal() -> None:
    """0.07 of 100 is 7, though the product of the two floats is above it."""
    assert [p for p in range(1, 101) if math.ceil(p / 100 * 100) != p] == [7, 14, 28, 55, 56]
    for percent, steps in ((7, 100), (28, 100), (55, 100), (35, 20), (1, 1), (29, 100)):
        given = {
            "sampling__sampler": "flow",
            "sampling__steps": steps,
            "train__timestep_fraction": percent / 100,
        }
        assert len(ResolvedConfig(settings(**given)).longest_window) == -(-percent * steps // 100)
