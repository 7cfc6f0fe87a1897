"""What a reward's code or server may do, kind by kind: the run depends on none of it, and says what
it put back."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from sage_fast.config.schema import RewardConfig, SamplingConfig
from sage_fast.rewards import CompositeReward, in_process, load_reward
from sage_fast.rewards.failure_policy import MAX_TEXT, RewardFailure
from sage_fast.rewards.http import MAX_JSON_VALUES, read_request, read_response
from sage_fast.rewards.in_process import MAX_PARTS, InProcess, checked
from sage_fast.util import guard
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from tests.reward_faults import request
from tests.tiny import keys_of
from tests.waits import HANG, wait_until

SMALL = SamplingConfig(num_frames=5, height=16, width=16)
VIDEOS = torch.rand(4, 5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
PROMPTS = keys_of(["a", "b", "c", "d"])


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Forget what was noted; the test reads the notes from `caplog`."""
    monkeypatch.setattr(guard, "_noted", set())
    monkeypatch.setattr(in_process, "_noted_training", set())
    caplog.set_level(logging.INFO)
    return []


def composite(reward: Any, **weights: float) -> CompositeReward:
    return CompositeReward(
        reward, RewardConfig(name="my:reward", weights=weights or {"a": 1.0}, retries=0)
    )


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(" ".join(record.getMessage().split()) for record in caplog.records)


# -- random numbers --------------------------------------------------------------------------------


class Draws:
    """Scores by chance: one part for each source of random numbers."""

    def __init__(self) -> None:
        random.random()

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Any]:
        count = len(prompts)
        return {
            "torch": torch.rand(count),
            "numpy": np.random.rand(count),
            "python": [random.random() for _ in prompts],
        }


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_are_those_of_the_seed_and_the_runs_stay(workers: int) -> None:
    settings = RewardConfig(
        name="tests.test_reward_kinds:Draws", weights={"torch": 1.0}, workers=workers
    )
    reward = CompositeReward.of(settings)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = reward(VIDEOS, PROMPTS, seed=5).parts
    again = reward(VIDEOS, PROMPTS, seed=5).parts
    other = reward(VIDEOS, PROMPTS, seed=6).parts
    for part in ("torch", "numpy", "python"):
        assert torch.equal(first[part], again[part]), part
        assert not torch.equal(first[part], other[part]), part
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_a_worker_draws_what_the_runs_own_process_draws() -> None:
    settings = [
        RewardConfig(name="tests.test_reward_kinds:Draws", weights={"torch": 1.0}, workers=n)
        for n in (0, 1)
    ]
    here, there = (CompositeReward.of(each)(VIDEOS, PROMPTS, seed=5).parts for each in settings)
    for part, values in here.items():
        assert torch.equal(values, there[part]), part


# -- networks in training mode ---------------------------------------------------------------------


def test_the_networks_of_a_script_are_not_those_of_its_reward() -> None:
    """A notebook holds the policy of its last run in a variable that the reward does not name."""
    names: dict[str, Any] = {"mine": torch.nn.Linear(1, 1), "policy": torch.nn.Linear(1, 1)}
    exec("def score(videos, prompts): return mine(videos)", names)
    assert in_process._networks_of(names["score"]) == [names["mine"]]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
    ).train()


class Holds:
    """Holds its network as `place` says."""

    def __init__(self, place: str) -> None:
        held = network()
        self.network = {
            "attribute": held,
            "list": [held],
            "mapping": {"inner": held},
            "object": Inner(held),
        }[place]
        self.run = held

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": self.run(videos.mean((1, 3, 4)))[:, 0]}


class Inner:
    def __init__(self, held: nn.Module) -> None:
        self.held = held


IN_MODULE = network()


def of_module(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    return {"a": IN_MODULE(videos.mean((1, 3, 4)))[:, 0]}


def of_closure() -> Any:
    held = network()

    def reward(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": held(videos.mean((1, 3, 4)))[:, 0]}

    return reward


@pytest.mark.parametrize(
    "place", ["attribute", "list", "mapping", "object", "module", "closure", "method"]
)
def test_equal_videos_have_equal_scores_whatever_their_neighbours(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    IN_MODULE.train()
    made = {
        "module": lambda: of_module,
        "closure": of_closure,
        "method": lambda: Holds("attribute").score,
    }
    reward = composite(made.get(place, lambda: Holds(place))())
    together = reward(VIDEOS, PROMPTS).rewards
    alone = torch.cat([reward(VIDEOS[i : i + 1], PROMPTS[i : i + 1]).rewards for i in range(4)])
    torch.testing.assert_close(together, alone)
    assert torch.equal(reward(VIDEOS, PROMPTS).rewards, together)
    assert "networks in training mode (Sequential); they are set to eval" in said(caplog)


# -- processes and groups --------------------------------------------------------------------------


class Group:
    """Does to the default process group what `how` says."""

    def __init__(self, how: str) -> None:
        self.how = how

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        if self.how == "destroy" and dist.is_initialized():
            dist.destroy_process_group()
        if self.how == "make":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return {"a": torch.ones(len(prompts))}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_reward_does_not_destroy_the_runs_process_group(caplog: pytest.LogCaptureFixture) -> None:
    destroy = dist.destroy_process_group
    assert composite(Group("destroy"))(VIDEOS, PROMPTS).dropped == 0
    assert dist.is_initialized()
    assert (
        "changes torch.distributed.destroy_process_group for the whole process; it was put back"
        in said(caplog)
    )
    assert dist.destroy_process_group is destroy


def test_a_group_of_its_own_ends_with_the_call(caplog: pytest.LogCaptureFixture) -> None:
    assert composite(Group("make"))(VIDEOS, PROMPTS).dropped == 0
    assert not dist.is_initialized()
    assert "torch.distributed.init_process_group" in said(caplog)


FORKS = """
import os, sys
import torch
from sage_fast.config.schema import RewardConfig
from sage_fast.rewards import CompositeReward
from sage_fast.util.captions import PromptKey

def reward(videos, prompts):
    os.fork()
    return {"a": torch.ones(len(prompts))}

composite = CompositeReward(reward, RewardConfig(name="my:reward", weights={"a": 1.0}))
scores = composite(torch.rand(1, 2, 3, 8, 8), [PromptKey("p")])
print("one run", flush=True)
"""


def test_a_fork_that_returns_from_a_reward_is_no_second_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout == "one run\n"


# -- scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [list, np.array, lambda values: torch.tensor(values, dtype=torch.float64)]
)
def test_scores_that_float32_cannot_tell_apart_stay_apart(kind: Any) -> None:
    values = [1e8 + 0.1, 1e8 + 0.5, 1e8 + 0.9]
    scores = composite(lambda videos, prompts: {"a": kind(values)})(VIDEOS[:3], PROMPTS[:3])
    assert scores.rewards.tolist() == values
    assert scores.parts["a"].tolist() == values


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ({f"p{i}": [1.0] for i in range(MAX_PARTS + 1)}, "101 parts; expected at most 100"),
        ({"a": ["1.0"]}, "expected numbers"),
        ({"a": [None]}, "expected numbers"),
        ({"a": [{}]}, "expected numbers"),
    ],
)
def test_what_is_no_answer_of_a_reward(returned: dict[str, Any], why: str) -> None:
    with pytest.raises(RewardFailure, match=why):
        checked(returned, 1)


def answer(**changes: Any) -> dict[str, Any]:
    return {"schema": "sage-fast-reward/1", "id": "x", "parts": {"a": [1, 2.5]}} | changes


def test_an_answer_of_a_server_is_numbers_or_null() -> None:
    assert read_response(answer(), "x", "url", 2) == {"a": [1.0, 2.5]}
    missing = read_response(answer(parts={"a": [None, 1]}), "x", "url", 2)["a"]
    assert missing[0] != missing[0]


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        [],
        None,
        answer(schema="sage-fast-reward/2"),
        {"id": "x", "parts": {"a": [1, 2]}},
        answer(id="y"),
        answer(parts=[[1, 2]]),
        answer(parts={"a": {"0": 1, "1": 2}}),
        answer(parts={"a": [True, False]}),
        answer(parts={"a": ["1", "2"]}),
        answer(parts={"a": "12"}),
        answer(parts={"a": [1]}),
        answer(parts={"a": [1, 2, 3]}),
        answer(parts={"a": [1, [2]]}),
        answer(parts={"a": [1, 10**400]}),
        answer(parts={f"p{i}": [1, 2] for i in range(5000)}),
    ],
    ids=str,
)
def test_any_other_answer_is_refused(wrong: Any) -> None:
    with pytest.raises(RewardFailure):
        read_response(wrong, "x", "url", 2)


def test_a_later_call_must_not_return_a_part_of_another_reward() -> None:
    calls = []

    def first(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": torch.ones(len(prompts))}

    def second(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        calls.append(1)
        parts = {"b": torch.ones(len(prompts))}
        return parts if len(calls) == 1 else parts | {stolen: torch.full((len(prompts),), 9.0)}

    sys.modules[__name__].first = first  # type: ignore[attr-defined]
    sys.modules[__name__].second = second  # type: ignore[attr-defined]
    same = [
        {"name": f"{__name__}:{name}", "weights": {part: 1.0}}
        for name, part in (("first", "a"), ("second", "b"))
    ]
    for stolen, why in (
        ("a", "so does reward.several[0]"),
        ("seed", "a reserved name"),
        ("advantage", "a reserved name"),  # that of a sample, beside its videos
        ("judge/x", "a reserved name"),
    ):
        calls.clear()
        reward = CompositeReward.of(RewardConfig(several=same, retries=0))
        reward.check(SMALL, PROMPTS)
        scores = reward(VIDEOS, PROMPTS)
        assert scores.dropped == 4, stolen
        assert why in scores.notes[0]
        assert 9.0 not in scores.parts.get(stolen, torch.zeros(1)).tolist()


# -- texts of failures -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_of_megabytes_is_cut(workers: int) -> None:
    settings = RewardConfig(
        name="tests.test_reward_kinds:says_much", weights={"a": 1.0}, workers=workers, retries=0
    )
    scores = CompositeReward.of(settings)(VIDEOS, PROMPTS)
    assert scores.dropped == 4
    assert max(map(len, scores.notes)) < MAX_TEXT + 200


def says_much(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    raise ValueError("x" * 5_000_000)


# -- look before you create ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "pathlib:Path"])
def test_what_does_not_score_is_not_created(name: str, tmp_path: Path) -> None:
    args = {"args": ["touch", str(tmp_path / "made")]} if name == "subprocess:Popen" else {}
    with pytest.raises(UserError, match=r"expected a (class with score|function of)"):
        load_reward(RewardConfig(name=name, args=args))
    assert not list(tmp_path.iterdir())


# -- requests of strangers -------------------------------------------------------------------------


def body(**changes: Any) -> bytes:
    videos = base64.b64encode(save({"videos": VIDEOS[:1].half()})).decode()
    return json.dumps(
        {"schema": "sage-fast-reward/1", "id": "x", "prompts": ["a"], "videos": videos} | changes
    ).encode()


def test_a_request_is_bounded_beside_its_videos() -> None:
    name, found = read_request(body(seed=7))
    assert (name, found.seed, found.prompts) == ("x", 7, ["a"])
    values = b'{"schema": [' + b"[]," * MAX_JSON_VALUES + b"0]}"
    with pytest.raises(ValueError, match="more than 100,000 values beside the videos"):
        read_request(values)
    header = json.dumps(
        {f"t{i}": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}
    )
    tensors = len(header).to_bytes(8, "little") + header.encode()
    with pytest.raises(ValueError, match="one tensor needs at most"):
        read_request(body(videos=base64.b64encode(tensors).decode()))
    for seed in (-1, 2**63, 1.5, True, "1", None):
        with pytest.raises(ValueError, match="a seed that is no whole number"):
            read_request(body(seed=seed))


# -- workers ---------------------------------------------------------------------------------------


def ones(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    return {
        "a": torch.ones(len(prompts)),
        "pid": torch.full((len(prompts),), os.getpid(), dtype=torch.float64),
    }


def test_a_worker_that_is_stopped_is_ended_in_time() -> None:
    """Its pipe holds 64 KiB: a larger request blocks the one who sends it."""
    settings = RewardConfig(
        name="tests.test_reward_kinds:ones",
        weights={"a": 1.0},
        workers=1,
        retries=0,
        timeout_seconds=30,
    )
    reward = CompositeReward.of(settings)
    pid = int(reward(VIDEOS[:1], [PromptKey("a")]).parts["pid"][0])
    os.kill(pid, signal.SIGSTOP)
    caller = reward.callers[0]
    large = torch.rand(1, 40, 3, 64, 64)
    with pytest.raises(
        RewardFailure, match=r"no answer for 1 video within 0.5 s; its process was ended"
    ):
        caller._backends[0].score(request(large), 0.5)
    assert not Path("/proc", str(pid)).exists()
    assert reward(large, [PromptKey("a")]).dropped == 0, "a new process scores the next one"
    caller.close()


IN_C = """
import ctypes
from pathlib import Path
def reward(videos, prompts):
    Path("begun").touch()
    ctypes.PyDLL(None).sleep(10000)  # holds the GIL, as a call in C may
"""
OWNER = """
import os, sys
import torch
from sage_fast.config.schema import RewardConfig
from sage_fast.rewards import CompositeReward
from sage_fast.util.captions import PromptKey
reward = CompositeReward.of(RewardConfig(name="in_c:reward", weights={"a": 1.0}, workers=1))
reward.submit(torch.rand(1, 2, 3, 8, 8), [PromptKey("a")])
print(reward.callers[0]._backends[0]._process.pid, flush=True)
input()
"""


def test_a_worker_within_a_call_in_c_ends_with_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "in_c.py").write_text(IN_C)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        encoding="utf-8",
    )
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    wait_until((tmp_path / "begun").exists)
    owner.kill()
    owner.wait(HANG)
    wait_until(lambda: not _runs(worker))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_main_thread_is_the_rewards_too() -> None:
    """A library that needs signals or an event loop of the main thread works in a call."""

    def reward(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGALRM, before)
        return {"a": torch.ones(len(prompts))}

    assert InProcess("my:reward", reward).score(request(VIDEOS))["a"].tolist() == [1, 1, 1, 1]


# -- what is no Exception, and what a worker may do ------------------------------------------------


class Panics(BaseException):
    """As a panic of a library in Rust, and a cancelled task of asyncio, derive from no
    Exception."""


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


ERRORS = {
    "panic": Panics("index out of bounds"),
    "cancelled": asyncio.CancelledError("late"),
    "mute": Mute(),
}


def raises(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    raise ERRORS[prompts[0]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("what", ERRORS)
def test_whatever_a_reward_raises_is_a_failure_of_the_call(what: str, workers: int) -> None:
    settings = RewardConfig(
        name="tests.test_reward_kinds:raises", weights={"a": 1.0}, workers=workers, retries=0
    )
    scores = CompositeReward.of(settings)(VIDEOS[:1], keys_of([what]))
    assert scores.dropped == 1
    assert type(ERRORS[what]).__name__ in scores.notes[0]


def test_ctrl_c_within_a_call_is_no_failure_of_it() -> None:
    def reward(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        composite(reward)(VIDEOS, PROMPTS)


class Settles:
    """Needs a process group and a function of its own, from its first call to its last."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        nn.Linear.forward = lambda self, x: x + 1  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float64)

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        one = torch.ones(len(prompts))
        dist.all_reduce(one)
        return {"a": nn.Linear(1, 1)(one), "wide": one * (one.dtype == torch.float64)}


def test_a_worker_belongs_to_its_reward() -> None:
    """A library for inference sets up process groups and its own functions, which it needs at every
    call."""
    settings = RewardConfig(
        name="tests.test_reward_kinds:Settles", weights={"a": 1.0}, workers=1, retries=0
    )
    reward = CompositeReward.of(settings)
    for _ in range(2):
        scores = reward(VIDEOS, PROMPTS)
        assert scores.notes == ()
        assert scores.parts["a"].tolist() == [2.0] * 4
        assert scores.parts["wide"].tolist() == [1.0] * 4


class Created:
    """Draws when it is created, as a random projection is."""

    def __init__(self) -> None:
        self.drawn = float(torch.rand(())), float(np.random.rand()), random.random()

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, list[float]]:
        parts = dict(zip(("a", "numpy", "python"), self.drawn))
        return {part: [value] * len(prompts) for part, value in parts.items()}


def test_a_reward_that_draws_when_it_is_created_is_the_same_in_each_process() -> None:
    found = []
    for workers in (0, 1, 0):
        settings = RewardConfig(
            name="tests.test_reward_kinds:Created", weights={"a": 1.0}, workers=workers
        )
        random.random()
        parts = CompositeReward.of(settings)(VIDEOS, PROMPTS).parts
        found.append({part: values.tolist() for part, values in parts.items()})
    assert found[0] == found[1] == found[2]


def test_a_clash_of_names_of_a_reward_that_is_only_logged_drops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": torch.ones(len(prompts))}

    def logged(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": torch.zeros(len(prompts))}

    for function in (first, logged):
        monkeypatch.setattr(sys.modules[__name__], function.__name__, function, raising=False)
    several = [
        {"name": f"{__name__}:first", "weights": {"a": 1.0}},
        {"name": f"{__name__}:logged", "weights": {}},
    ]
    scores = CompositeReward.of(RewardConfig(several=several, retries=0))(VIDEOS, PROMPTS)
    assert scores.rewards.tolist() == [1.0] * 4
    assert "returns 'a', and so does reward.several[0]" in scores.notes[0]


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64, torch.int64, torch.int32])
def test_whole_numbers_that_float32_cannot_tell_apart_stay_apart(dtype: torch.dtype) -> None:
    values = torch.tensor([2**24, 2**24 + 1], dtype=dtype)
    assert (
        composite(lambda videos, prompts: {"a": values})(VIDEOS[:2], PROMPTS[:2]).rewards.tolist()
        == values.tolist()
    )


# -- networks that no attribute holds --------------------------------------------------------------


@functools.cache
def cached() -> nn.Module:
    return network()


class OfClass:
    held = network()

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": self.held(videos.mean((1, 3, 4)))[:, 0]}


class OfCache:
    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": cached()(videos.mean((1, 3, 4)))[:, 0]}


class OfModule:
    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": IN_MODULE(videos.mean((1, 3, 4)))[:, 0]}


class Compiled:
    def __init__(self) -> None:
        self.run = torch.compile(cached(), backend="eager")

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"a": self.run(videos.mean((1, 3, 4)))[:, 0]}


@pytest.mark.parametrize("kind", [OfClass, OfCache, OfModule, Compiled])
def test_a_network_is_in_evaluation_mode_wherever_it_is(kind: type) -> None:
    for held in (IN_MODULE, cached(), OfClass.held):
        held.train()
    reward = composite(kind())
    together = reward(VIDEOS, PROMPTS).rewards
    alone = torch.cat([reward(VIDEOS[i : i + 1], PROMPTS[i : i + 1]).rewards for i in range(4)])
    torch.testing.assert_close(together, alone)


def test_a_reward_may_choose_training_mode_in_the_call() -> None:
    """Dropout on purpose, for an estimate of its own doubt."""
    held = nn.Dropout(0.5)

    def reward(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        held.train()
        return {"a": held(torch.ones(len(prompts), 64)).mean(1)}

    first, second = (composite(reward)(VIDEOS, PROMPTS, seed=seed).rewards for seed in (1, 2))
    assert not torch.equal(first, second)
    assert nn.Module.train.__name__ == "train"


def starts_and_hangs(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    started = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    Path(prompts[0]).write_text(str(started.pid), encoding="utf-8")
    time.sleep(100000)
    raise AssertionError


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    """Also in a session of its own, which the signal to the worker's process group does not
    reach."""
    settings = RewardConfig(
        name="tests.test_reward_kinds:starts_and_hangs", weights={"a": 1.0}, workers=1, retries=0
    )
    reward = CompositeReward.of(settings)
    told = tmp_path / "pid"
    pending = reward.submit(VIDEOS[:1], keys_of([str(told)]))
    wait_until(lambda: told.is_file() and told.read_text(encoding="utf-8") != "")
    reward.callers[0]._backends[0]._kill()  # as when its time is over
    assert pending.result().dropped == 1
    wait_until(lambda: not _runs(int(told.read_text(encoding="utf-8"))))
