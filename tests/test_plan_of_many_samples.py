"""The plan of an iteration against its rules written out, and the work that it takes for many
samples."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from sage_fast.algorithm import iteration_plan
from sage_fast.algorithm.iteration_plan import Rollouts, assign_to_ranks, plan_iteration, share_of
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.loader import build
from sage_fast.util.seeding import permutation
from tests.tiny import keys_of


def assigned_by_the_rules(
    tokens: list[int], ranks: int, batch_size: int, rollouts: Rollouts
) -> list[list[int]]:
    """The rules of `assign_to_ranks` as they are said: the work of each rank is counted anew for
    every batch."""
    size, prefixes = rollouts.group_size, rollouts.prefixes
    group_of = [sample // size for sample in range(len(tokens))]
    work = [rollouts.count(range(g * size, g * size + size), tokens) for g in range(len(prefixes))]
    order = sorted(range(len(tokens)), key=lambda sample: (-work[group_of[sample]], sample))
    key = [(tokens[s], group_of[s] if prefixes[group_of[s]] else None) for s in range(len(tokens))]

    found = []
    for length in range(size, 0, -1) if any(prefixes) else [batch_size]:
        shares: list[list[int]] = [[] for _ in range(ranks)]
        places = [len(share_of(len(tokens), ranks, rank)) for rank in range(ranks)]
        left = list(order)
        while left:
            free = {rank: places[rank] - len(shares[rank]) for rank in range(ranks)}
            rank = min(
                (rank for rank in free if free[rank]),
                key=lambda rank: (rollouts.count(shares[rank], tokens), free[rank], rank),
            )
            batch = left[: min(length, free[rank])]
            batch = [sample for sample in batch if key[sample] == key[left[0]]]
            shares[rank] += batch
            left = left[len(batch) :]
        found.append(shares)

    def longest(shares: list[list[int]]) -> tuple[int, int]:
        counts = [rollouts.count(share, tokens) for share in shares]
        return max(counts), sum(counts)

    best = min(found, key=longest)
    return [
        sorted(share, key=lambda s: (tokens[s], rollouts.windows[group_of[s]], s)) for share in best
    ]


@pytest.mark.parametrize("seed", range(8))
def test_samples_are_assigned_by_the_rules(seed: int) -> None:
    random_of = random.Random(seed)
    for _ in range(60):
        size, groups = random_of.randint(1, 8), random_of.randint(1, 6)
        ranks, steps = random_of.randint(1, size * groups), random_of.randint(1, 12)
        tokens = [
            count for _ in range(groups) for count in [random_of.choice([1, 3, 5, 7, 100])] * size
        ]
        windows = [random_of.randint(0, steps) for _ in range(groups)]
        shared, batch_size = random_of.random() < 0.6, random_of.randint(1, 9)
        rollouts = Rollouts(steps=steps, group_size=size, windows=windows, shared=shared)
        expected = assigned_by_the_rules(tokens, ranks, batch_size, rollouts)
        assert assign_to_ranks(tokens, ranks, batch_size, rollouts) == expected


WINDOWS = {
    "sampling.sde_window": 2,
    "sampling.window_per_prompt": True,
    "sampling.shared_initial_noise": True,
}


def resolved_of(prompts: int, group_size: int, **others: Any) -> ResolvedConfig:
    sizes = {
        "train.prompts_per_iteration": prompts,
        "train.group_size": group_size,
        "sampling.steps": 6,
    }
    return ResolvedConfig(build(WINDOWS | sizes | others))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_updates_are_the_parts_of_each_samples_own_order(count: int) -> None:
    """Each update has every kept sample, at its own share of its steps, position by position."""
    resolved = resolved_of(
        3, 4, **{"sampling.sde_window": 5, "train.optimizer_steps": count, "seed": count}
    )
    plan = plan_iteration(resolved, keys_of(["a", "bb"]), lambda key: len(key.text), 2, ranks=2)
    kept = [number % 5 != 1 for number in range(len(plan.samples))]
    orders = []
    for sample in plan.samples:
        steps = plan.trained[sample.group]
        places = permutation(len(steps), count, "timesteps", 2, sample.group, sample.index)
        orders.append([steps[i] for i in places])
    expected = [
        [
            (sample, order[position])
            for position in range(max(map(len, orders)))
            for sample, order in enumerate(orders)
            if kept[sample] and u * len(order) // count <= position < (u + 1) * len(order) // count
        ]
        for u in range(count)
    ]
    assert plan.updates(kept) == expected
    assert plan.updates([False] * len(kept)) == [[]] * count


def lines_run(prompts: int, group_size: int) -> int:
    """Return how many lines of iteration_plan.py the plan of an iteration runs, with its
    updates."""
    resolved, lines = resolved_of(prompts, group_size), 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != iteration_plan.__file__:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan = plan_iteration(resolved, keys_of(["a"]), lambda key: len(key.text), 0, ranks=4)
        plan.forwards()
        plan.updates([True] * len(plan.samples))
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(("prompts", "group_size"), [(24, 4), (2, 48)])
def test_the_work_grows_with_the_samples_and_not_with_their_square(
    prompts: int, group_size: int
) -> None:
    """Four times the samples, in more groups or in larger ones, take four times the work, and a
    logarithm."""
    more = (4 * prompts, group_size) if prompts > group_size else (prompts, 4 * group_size)
    assert lines_run(*more) < 6 * lines_run(prompts, group_size)
