"""The line that names a rank which all others wait for."""

from typing import Any

import pytest

from sage_fast.callbacks.stragglers import STRAGGLER_FACTOR, STRAGGLER_ITERATIONS, Stragglers
from sage_fast.util.meters import slowest_and_fastest

RUN: Any = None


def row(*work: float) -> dict[str, Any]:
    """The times of an iteration whose ranks roll out for so long, and train for a second."""
    seconds = [{"time/rollout": of_rank, "time/train": 1.0} for of_rank in work]
    return {"time/ranks": slowest_and_fastest(seconds)}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sage_fast.util.console.PACKAGE.propagate", True)
    return lambda: [" ".join(record.message.split()) for record in caplog.records]


def test_a_rank_that_stays_slow_is_named_once(said: Any) -> None:
    callback = Stragglers()
    for _ in range(STRAGGLER_ITERATIONS):  # the first one warms up
        callback.on_iteration_end(RUN, row(9.0, 8.0, 14.0))
    assert said() == []
    for _ in range(2 * STRAGGLER_ITERATIONS):
        callback.on_iteration_end(RUN, row(9.0, 8.0, 14.0))
    (line,) = said()
    assert line.startswith(
        "note: rank 2 works 67 % longer than rank 1, most in rollout (14 s against 8 s), and has "
        "been the slowest for 5 iterations"
    )
    assert "docs/how-to/many-gpus.md" in line


def test_ranks_that_take_turns_and_small_differences_are_not_named(said: Any) -> None:
    turns, close = Stragglers(), Stragglers()
    for number in range(4 * STRAGGLER_ITERATIONS):
        turns.on_iteration_end(RUN, row(*([20.0, 8.0] if number % 2 else [8.0, 20.0])))
        close.on_iteration_end(RUN, row(9.0, 9.0 * STRAGGLER_FACTOR))
    assert said() == []


def test_one_rank_alone_has_no_times_of_ranks(said: Any) -> None:
    callback = Stragglers()
    for _ in range(2 * STRAGGLER_ITERATIONS):
        callback.on_iteration_end(RUN, {"time/total": 1.0})
    assert said() == []
