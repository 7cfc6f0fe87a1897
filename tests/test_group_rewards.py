"""Rewards that compare the videos of a group: in this process, in workers and behind HTTP, beside
rewards that score each video alone, and on ranks that share a group."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import assign_groups
from sage_fast.callbacks.checkpoints import _weights_of_best
from sage_fast.config.loader import load
from sage_fast.config.schema import Config, RewardConfig, SamplingConfig
from sage_fast.eval.evaluation import Chunk, evaluate, rewards_of, score_videos
from sage_fast.loading import load_setup, resolve
from sage_fast.rewards import CompositeReward, Judge, Scores, load_rewards
from sage_fast.rewards.comparing import check_comparing, comparing_keys, notes_on_comparing
from sage_fast.rewards.http import HttpReward
from sage_fast.rewards.interface import compares_group
from sage_fast.rewards.server import RewardServer
from sage_fast.rollout.groups import Group, HeldVideo, compare_groups, gather_groups
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import RankError, RewardError, UserError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import fail_together, rank, shutdown
from tests.ranks import run_ranks, screens
from tests.reward_faults import fingerprints, request
from tests.tiny import BrightnessReward, keys_of, settings, tiny_trainer
from tests.waits import HANG

REPOSITORY = Path(__file__).parent.parent
HERE = f"{REPOSITORY}/tests.test_group_rewards"
PAPER = REPOSITORY / "configs" / "recipes" / "paper.yaml"
SMALL = SamplingConfig(num_frames=5, height=16, width=16)
CAT = PromptKey("a cat")
GROUP = (255 * torch.rand(4, 5, 3, 16, 16, generator=torch.Generator().manual_seed(1))).byte()
WHERE = ["inline", "process", "http"]


class Relative:
    """Of each video of a group: its fingerprint, its place from 0 on, and the size of the group.

    Args:
        fault: what it does wrong: "short", "nan" for the second video, "half" of the group's
            scores, or "raise"; nothing if empty.
        calls: number of calls that are wrong; later ones are not.
    """

    compares_group = True

    def __init__(self, fault: str = "", calls: int = 1000) -> None:
        self.fault = fault
        self.calls = calls
        self.seen: list[list[str]] = []

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        self.seen.append(list(prompts))
        assert len({*prompts}) == 1
        assert len(prompts) == len(videos) >= 2
        assert videos.dtype == torch.float32
        assert 0 <= videos.min() <= videos.max() <= 1
        values = fingerprints(videos)
        place = values.argsort().argsort().double()
        size = torch.full_like(values, len(values))
        if len(self.seen) <= self.calls + 1 and len(self.seen) > 1:  # not the check before the run
            if self.fault == "raise":
                raise ValueError("wrong\nvalue")
            if self.fault == "short":
                place = place[:-1]
            if self.fault == "half":
                place = place[: len(place) // 2]
            if self.fault == "nan":
                place[1] = torch.nan
        return {"value": values, "place": place, "size": size}


def alone(videos: Tensor, prompts: list[str]) -> Tensor:
    """The fingerprint of each video."""
    return fingerprints(videos)


def ranks(videos: Tensor, prompts: list[str]) -> Tensor:
    return fingerprints(videos).argsort().argsort()


ranks.compares_group = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def serving(reward: CompositeReward) -> Iterator[RewardServer]:
    """A server in a thread of this process."""
    server = RewardServer(reward, "127.0.0.1", 0)
    thread = threading.Thread(target=server.listen, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(HANG)


@contextlib.contextmanager
def reached(how: str, fault: str = "", calls: int = 1000, **policy: Any) -> Iterator[Any]:
    """`Relative` in this process, in its own, or behind HTTP, as a run has checked it."""
    reward = RewardConfig(
        name=f"{HERE}:Relative", args={"fault": fault, "calls": calls}, weights={"place": 1.0}
    )
    with contextlib.ExitStack() as stack:
        if how == "http":
            served = CompositeReward.of(reward)
            served.check(SMALL, [CAT])
            server = stack.enter_context(serving(served))
            reward = RewardConfig(name=server.address, weights={"place": 1.0}, **policy)
            # The first call is now the check of the client.
            served.callers[0]._backends[0].reward.seen.clear()  # type: ignore[attr-defined]
        else:
            policy |= {"workers": int(how == "process")}
            reward = RewardConfig(**vars(reward) | policy)
        composite = CompositeReward.of(reward)
        stack.callback(composite.close)
        composite.check(SMALL, [CAT])
        yield composite


def places(videos: Tensor) -> list[float]:
    """The places of uint8 videos by their own sums."""
    sums = fingerprints(videos.float() / 255).tolist()
    return [float(sum(other < own for other in sums)) for own in sums]


# -- what a reward says of itself ------------------------------------------------------------------


def test_a_class_an_instance_or_a_function_says_so() -> None:
    class Late:
        def __init__(self) -> None:
            self.compares_group = True

    for reward in (
        Relative,
        Relative(),
        Relative().score,
        ranks,
        functools.partial(ranks),
        functools.partial(Relative().score),
        Late(),
    ):
        assert compares_group(reward), reward
    for reward in (alone, Late, functools.partial(alone), BrightnessReward()):
        assert not compares_group(reward), reward


def test_what_a_reward_says_of_itself_stands_above_what_it_calls() -> None:
    class Alone:
        compares_group = False

        def __init__(self) -> None:
            self.func = Relative()

        def score(self, videos: Tensor, prompts: list[str]) -> Tensor:
            return self.func.score(videos[:, None], prompts)["value"]

    assert not compares_group(Alone())
    assert not compares_group(Alone().score)


@pytest.mark.parametrize("said", [1, "yes", torch.tensor(True), lambda self: True])
def test_a_reward_that_says_neither_true_nor_false_is_refused(said: Any) -> None:
    """Such a reward would be given videos one by one."""
    kind = type("Unclear", (Relative,), {"compares_group": said})
    with pytest.raises(UserError, match=r"compares_group = .* of Unclear: expected True or False"):
        CompositeReward(kind(), RewardConfig(name="my:Unclear", weights={"place": 1.0}))


def test_an_attribute_that_an_object_makes_up_says_nothing() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> object:
            return print

    class OfInstances:
        @property
        def compares_group(self) -> bool:
            return True

    assert not compares_group(Proxy())
    assert not compares_group(OfInstances)
    assert compares_group(OfInstances())


@pytest.mark.parametrize("how", WHERE)
def test_a_group_is_scored_as_a_whole(how: str) -> None:
    """The videos travel as uint8 and arrive in [0, 1]; nothing of them is rounded a second time."""
    with reached(how) as reward:
        assert reward.compares_group
        assert reward.parts == ["place", "size", "value"]
        scores = reward.compare(GROUP, CAT).result()
    assert scores.parts["place"].tolist() == scores.rewards.tolist() == places(GROUP)
    assert scores.parts["size"].tolist() == [4.0] * 4
    expected = fingerprints(GROUP.float() / 255)
    torch.testing.assert_close(scores.parts["value"].double(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("how", WHERE)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", "ValueError: wrong"),
        ("short", r"part 'place': expected shape \[4\], got \[3\]"),
        ("half", r"part 'place': expected shape \[4\], got \[2\]"),
    ],
)
def test_a_call_that_fails_drops_the_group(how: str, fault: str, why: str) -> None:
    with reached(how, fault) as reward:
        scores = reward.compare(GROUP, CAT).result()
    assert (scores.dropped, scores.retried) == (4, 4)
    assert scores.parts == {}
    text = "\n".join(scores.notes)
    assert re.search(why, text), text
    assert "dropped a sample of 'a cat'" in text


@pytest.mark.parametrize("how", WHERE)
def test_a_call_that_fails_once_is_made_again_for_the_whole_group(how: str) -> None:
    with reached(how, "raise", 1) as reward:
        scores = reward.compare(GROUP, CAT).result()
    assert scores.rewards.tolist() == places(GROUP)
    assert (scores.dropped, scores.retried) == (0, 4)


@pytest.mark.parametrize("how", WHERE)
def test_nan_for_one_video_drops_that_one(how: str) -> None:
    with reached(how, "nan") as reward:
        scores = reward.compare(GROUP, CAT).result()
    expected = places(GROUP)
    expected[1] = math.nan
    assert scores.rewards.tolist() == pytest.approx(expected, nan_ok=True)
    assert scores.parts["value"].isnan().tolist() == [False, True, False, False]
    assert (scores.dropped, scores.retried) == (1, 1)


def test_a_further_call_that_fails_leaves_what_the_first_one_scored() -> None:
    class Worsens(Relative):
        def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
            self.fault = "nan" if len(self.seen) == 1 else "raise"
            return super().score(videos, prompts)

    reward = CompositeReward(Worsens(), RewardConfig(name="my:Worsens", weights={"place": 1.0}))
    reward.check(SMALL, [CAT])
    scores = reward.compare(GROUP, CAT).result()
    assert scores.rewards.isnan().tolist() == [False, True, False, False]


def test_an_answer_that_lacks_more_scores_does_not_replace_the_one_before() -> None:
    """Nor does it leave a part that only the other call returned."""

    class Worsens(Relative):
        def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
            parts = super().score(videos, prompts)
            parts["place"][1:2] = torch.nan
            if len(self.seen) == 3:
                parts["place"][:3] = torch.nan
                parts["extra"] = torch.zeros(len(prompts))
            return parts

    config = RewardConfig(name="my:Worsens", weights={"place": 1.0})
    reward = CompositeReward(Worsens(), config)
    reward.check(SMALL, [CAT])
    scores = reward.compare(GROUP, CAT).result()
    assert scores.rewards.isnan().tolist() == [False, True, False, False]
    assert "extra" not in scores.parts


def test_a_failure_may_stop_the_run() -> None:
    with (
        reached("inline", "raise", on_failure="stop") as reward,
        pytest.raises(RewardError, match=r"no score for prompt 'a cat': reward '.*': .*wrong"),
    ):
        reward.compare(GROUP, CAT).result()


# -- beside rewards that score each video alone ----------------------------------------------------


def mixed(fault: str = "", **policy: Any) -> CompositeReward:
    several = [
        {"name": f"{HERE}:Relative", "args": {"fault": fault}, "weights": {"place": 0.5}},
        {"name": f"{HERE}:alone", "weights": {"alone": 2.0}},
    ]
    reward = CompositeReward.of(RewardConfig(several=several, **policy))
    reward.check(SMALL, [CAT])
    return reward


def test_each_reward_gets_its_own_kind_of_call_and_the_sum_is_of_both() -> None:
    reward = mixed()
    assert reward.parts == ["alone", "place", "size", "value"]
    assert reward.pointwise_weights == {"alone": 2.0}
    floats = GROUP.float() / 255
    pointwise = reward.submit(floats, [CAT] * 4).result()
    assert list(pointwise.parts) == ["alone"]
    compared = reward.compare(GROUP, CAT).result()
    assert list(compared.parts) == ["place", "size", "value"]
    scores = pointwise.combined(compared)
    expected = [2 * a + 0.5 * p for a, p in zip(fingerprints(floats).tolist(), places(GROUP))]
    assert scores.rewards.tolist() == pytest.approx(expected, rel=1e-6)
    assert list(scores.parts) == ["alone", "place", "size", "value"]


def test_a_video_that_either_reward_fails_on_has_no_score() -> None:
    reward = mixed("nan")
    floats = GROUP.float() / 255
    floats[3, 0, 0, 0, 0] = torch.nan
    pointwise = reward.submit(floats, [CAT] * 4).result()
    assert "a sample of 'a cat': the video has values that are not finite" in pointwise.notes[-1]
    scores = pointwise.combined(reward.compare(GROUP, CAT).result())
    assert scores.rewards.isnan().tolist() == [False, True, False, True]
    assert scores.dropped == 2
    for part, values in scores.parts.items():
        assert values.isnan().tolist() == [False, True, False, True], part


def test_a_video_that_is_not_finite_is_dropped_where_nothing_scores_it_alone() -> None:
    with reached("inline") as reward:
        floats = GROUP.float() / 255
        floats[2, 1] = torch.inf
        scores = reward.submit(floats, [CAT] * 4).result()
    assert scores.rewards.isnan().tolist() == [False, False, True, False]


# -- HTTP ------------------------------------------------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """A server of another author: `script` says what GET and POST answer."""

    script: ClassVar[dict[str, Any]] = {}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = len(body["prompts"]) // self.script.get("of", 1)
        self.answer(200, {"parts": {"place": [1.0] * count}, "id": body["id"]})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"schema": "sage-fast-reward/1"} | content).encode())

    def log_message(self, *args: object) -> None: ...


class Announces(Scripted):
    def do_GET(self) -> None:
        self.answer(self.script.get("status", 200), self.script.get("says", {}))


class ShowsPage(Scripted):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>a reward server</html>")


@contextlib.contextmanager
def scripted(kind: type[Scripted], **script: Any) -> Iterator[str]:
    handler = type("Handler", (kind,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("kind", "script", "compares"), [
    (Scripted, {}, False), (ShowsPage, {}, False),
    (Announces, {"status": 404}, False), (Announces, {"status": 405}, False),
    (Announces, {}, False), (Announces, {"says": {"compares_group": "yes"}}, False),
    (Announces, {"says": {"compares_group": False}}, False),
    (Announces, {"says": {"compares_group": True}}, True),
])  # fmt: skip
def test_a_server_announces_that_it_compares(
    kind: type[Scripted], script: dict[str, Any], compares: bool
) -> None:
    """One that does not know the question, such as one of an older version, scores each alone."""
    with scripted(kind, **script) as url:
        reward = CompositeReward.of(RewardConfig(name=url, weights={"place": 1.0}))
        reward.check(SMALL, [CAT])
        assert reward.compares_group == compares


def test_a_server_that_answers_half_the_scores_drops_the_group() -> None:
    with scripted(Announces, says={"compares_group": True}, of=2) as url:
        reward = CompositeReward.of(RewardConfig(name=url, weights={"place": 1.0}))
        with pytest.raises(UserError, match="part 'place': expected a list of 2 numbers or null"):
            reward.check(SMALL, [CAT])
        assert reward.compares_group
        scores = reward.compare(GROUP, CAT).result()
        assert scores.dropped == 4
        assert "expected a list of 4 numbers or null, got '[1.0, 1.0]'" in scores.notes[-1]


@pytest.mark.parametrize(("count", "prompts", "found"), [
    (1, ["a"], "1 video of 1 prompt"), (2, ["a", "b"], "2 videos of 2 prompts"),
])  # fmt: skip
def test_a_server_that_compares_refuses_what_is_no_group(
    count: int, prompts: list[str], found: str
) -> None:
    reward = CompositeReward(Relative(), RewardConfig(name="my:Relative", weights={"place": 1.0}))
    with serving(reward) as server:
        client = HttpReward(server.address)
        assert client.ask(60)
        with pytest.raises(Exception, match=f"status 400: {found}: expected at least 2 of one"):
            client.score(request(GROUP[:count].float() / 255, prompts), 60)


# -- before a run ----------------------------------------------------------------------------------


def config_of(name: str, **overrides: Any) -> Config:
    parts = {"Relative": "place", "alone": "alone", "ranks": "ranks"}
    weights = {parts[name]: 1.0}
    return settings(reward__name=f"{HERE}:{name}", reward__weights=weights, **overrides)


def test_an_evaluation_needs_videos_to_compare() -> None:
    for name in ("Relative", "ranks"):
        config = config_of(name)
        assert comparing_keys(config.reward) == ["reward.name"]
        with pytest.raises(
            UserError, match=r"eval.seeds_per_prompt = 1: expected at least 2, since reward.name ="
        ):
            load_setup(resolve(config))
    check_comparing(config_of("Relative", eval__seeds_per_prompt=2), ["reward.name"])
    assert comparing_keys(config_of("alone").reward) == []
    check_comparing(config_of("alone"), [])


def test_a_judge_that_compares_is_refused() -> None:
    config = config_of("alone", eval__judge=f"{HERE}:ranks")
    with pytest.raises(UserError, match=r"eval.judge = '.*:ranks': compares the videos of a prom"):
        load_rewards(config, [CAT], [CAT], {})
    judge = Judge(f"{HERE}:alone", config.reward)
    judge.check(SMALL, [CAT])
    assert not judge.compares_group


def test_the_best_checkpoint_is_told_by_what_scores_each_video_alone() -> None:
    class Run:
        class setup:
            reward = mixed()

        config = settings()

    assert _weights_of_best(Run()) == {"alone": 2.0}  # type: ignore[arg-type]
    with reached("inline") as Run.setup.reward:
        assert _weights_of_best(Run()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings_of", "says"), [
    ({}, "set eval.judge, or add a reward that scores each video alone"),
    ({"eval__judge": f"{HERE}:alone"}, "eval.judge tells progress, and train.keep_best has no eff"),
])  # fmt: skip
def test_a_run_says_what_its_held_out_score_does_not_tell(
    settings_of: dict[str, Any], says: str
) -> None:
    config = config_of("Relative", **settings_of)
    [note] = notes_on_comparing(config, ["reward.name"])
    assert "held-out scores do not rise when all videos become better" in note
    assert says in note
    several = [
        {"name": f"{HERE}:Relative", "weights": {"place": 1.0}},
        {"name": f"{HERE}:alone", "weights": {"alone": 1.0}},
    ]
    config = settings(reward__several=several, **settings_of)
    [note] = notes_on_comparing(config, comparing_keys(config.reward))
    assert note.endswith("train.keep_best goes by the parts of the other rewards")
    several[0]["weights"] = {}
    config = settings(reward__several=several)
    assert notes_on_comparing(config, comparing_keys(config.reward)) == []


# -- training and evaluation -----------------------------------------------------------------------


def test_a_trainer_gives_each_group_to_the_reward_and_each_sample_its_score() -> None:
    """Pointwise rewards go on chunk by chunk, and get what they got before."""
    several = [
        {"name": "object:relative", "weights": {"place": 1.0}},
        {"name": "object:alone", "weights": {"alone": 1.0}},
    ]
    config = settings(reward__several=several, sampling__batch_size=2)
    relative = Relative()
    reward = CompositeReward.of(
        config.reward, objects={"reward.several[0].name": relative, "reward.several[1].name": alone}
    )
    trainer = tiny_trainer(config)
    trainer.reward = reward
    _, scores = trainer.rollout(trainer.plan(0))
    assert [len(prompts) for prompts in relative.seen] == [3, 3]
    are_of_their_samples(scores.parts, 3)
    row = trainer.iteration(1)
    assert row["reward/dropped"] == 0
    assert row["reward_part/place"] == 1.0


def are_of_their_samples(parts: dict[str, Any], size: int, *, by_prompt: int = 0) -> None:
    """Each video's fingerprint as its group saw it is that of the video alone, up to the rounding
    to uint8; and places are those of the group.

    Args:
        by_prompt: number of prompts, if the videos of a prompt are so far apart; 0: they are next
            to each other.
    """
    value, own, place = (torch.as_tensor(parts[part]).double() for part in ("value", "alone",
        "place"))  # fmt: skip
    torch.testing.assert_close(value, own, rtol=0, atol=0.5 / 255)
    assert value.std() > 1e-3, "the videos differ by more than that"
    assert torch.as_tensor(parts["size"]).tolist() == [float(size)] * len(value)
    for group in range(by_prompt or len(value) // size):
        rows = slice(group * size, (group + 1) * size)
        if by_prompt:
            rows = slice(group, None, by_prompt)
        of_group = value[rows]
        expected = [float((of_group < each).sum()) for each in of_group]
        assert place[rows].tolist() == expected


SHARED: dict[str, Any] = {
    "sampling.steps": 2, "sampling.num_frames": 9, "sampling.batch_size": 1,
    "train.group_size": 3, "train.prompts_per_iteration": 3, "train.optimizer_steps": 1,
    "eval.steps": 2, "eval.num_prompts": 3, "eval.seeds_per_prompt": 2, "eval.judge": "null",
    "reward.several": f"[{{name: '{HERE}:Relative', weights: {{place: 1}}}},"
    f" {{name: '{HERE}:alone', weights: {{alone: 1}}}}]",
}  # fmt: skip


def work(overrides: dict[str, Any]) -> dict[str, Any]:
    """Scores of a rollout and of an evaluation."""
    config = load(PAPER, {key: str(value) for key, value in (SHARED | overrides).items()})
    setup = load_setup(resolve(config))
    setup.encode()
    trainer = Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    _, scores = trainer.rollout(trainer.plan(0))
    evaluation, _ = evaluate(setup, iteration=0)
    return {
        "rollout": {part: values.tolist() for part, values in scores.parts.items()},
        "evaluation": evaluation["parts"],
        "notes": setup.model.notes,
    }


def _work_of_a_rank(folder: Path, overrides: dict[str, Any]) -> None:
    initialize()
    found = work(overrides)
    (folder / f"found-{rank()}").write_text(json.dumps(found))
    shutdown()


@pytest.mark.parametrize(
    ("overrides", "prompts"),
    [
        ({}, 3),
        ({"train.prompts_per_iteration": 1}, 1),
        ({"model.sequence_parallel": 2}, 3),
        ({"train.engine": "zero3"}, 3),
    ],
    ids=["a group on both ranks", "a rank without a group", "sequence parallelism", "ZeRO-3"],
)
def test_two_ranks_that_share_groups(
    overrides: dict[str, Any], prompts: int, tmp_path: Path
) -> None:
    assert run_ranks(_work_of_a_rank, 2, tmp_path, overrides) == [0, 0], screens(tmp_path)
    found, other = (json.loads((tmp_path / f"found-{i}").read_text()) for i in range(2))
    assert found["rollout"] == other["rollout"]
    assert found["evaluation"] == other["evaluation"]
    are_of_their_samples(found["rollout"], 3)
    assert len(found["rollout"]["place"]) == 3 * prompts
    are_of_their_samples(found["evaluation"], 2, by_prompt=3)
    if overrides in ({}, {"train.prompts_per_iteration": 1}):
        assert work(overrides) == found, "as in one process, to the bit"


def _fails_on_a_rank(folder: Path) -> None:
    initialize()
    held = {rank(): HeldVideo(GROUP[rank()], None)}
    reward = CompositeReward(
        Relative("raise"),
        RewardConfig(name="my:Relative", weights={"place": 1.0}, on_failure="stop"),
    )
    reward.check(SMALL, [CAT])
    groups = gather_groups([Group([0, 1], CAT, 0)], held)
    try:
        with fail_together():
            compare_groups(reward, groups, held)
    except (RewardError, RankError) as error:
        (folder / f"error-{rank()}").write_text(f"{type(error).__name__} {len(groups)}")
    shutdown()


def test_a_failure_on_the_rank_that_compares_is_one_on_all(tmp_path: Path) -> None:
    assert run_ranks(_fails_on_a_rank, 2, tmp_path) == [0, 0], screens(tmp_path)
    assert (tmp_path / "error-0").read_text() == "RewardError 1"
    assert (tmp_path / "error-1").read_text() == "RankError 0"


def test_videos_of_other_shapes_or_rates_are_not_compared() -> None:
    other = torch.zeros(6, 3, 16, 16, dtype=torch.uint8)
    for second in (HeldVideo(other, 8.0), HeldVideo(GROUP[1], 9.0)):
        held = {0: HeldVideo(GROUP[0], 8.0), 1: second}
        with pytest.raises(UserError, match=r"videos of 'a cat' are .* expected one shape and one"):
            gather_groups([Group([0, 1], CAT, 0)], held)


def test_videos_of_a_folder_are_compared_by_prompt() -> None:
    with reached("inline") as reward:
        keys = keys_of(["a", "b", "a", "b"])

        def videos_of(share: range) -> Iterator[Chunk]:
            yield Chunk([0, 1, 2], GROUP[:3].float() / 255, 8.0)
            yield Chunk([3], GROUP[3:].float() / 255, 8.0)

        found, _ = score_videos(rewards_of(reward, None), keys, [1, 2, 3, 4], videos_of)
        first, second = places(GROUP[[0, 2]]), places(GROUP[[1, 3]])
        assert found["reward"] == [first[0], second[0], first[1], second[1]]
        with pytest.raises(UserError, match="1 video of 'c': expected at least 2 of each prompt"):
            score_videos(rewards_of(reward, None), keys_of("aaac"), [1, 2, 3, 4], videos_of)


# -- where a group is compared ---------------------------------------------------------------------


@pytest.mark.parametrize(("holders", "ranks"), [
    ([[0, 0], [1, 1]], [0, 1]),  # whole groups stay
    ([[0, 1, 1]], [1]),  # most of its videos
    ([[0, 1], [0, 1], [0, 1], [0, 1]], [0, 1, 0, 1]),  # by load
    ([[0, 1], [0, 0]], [1, 0]),  # what lies whole on a rank counts first
    ([[3, 2, 2, 3], [2, 2, 2, 2]], [3, 2]),
])  # fmt: skip
def test_the_rank_that_compares(holders: list[list[int]], ranks: list[int]) -> None:
    assert assign_groups(holders) == ranks


def test_the_plan_counts_the_videos_that_are_sent() -> None:
    """9 samples on 2 ranks: 5 and 4, so that one group of 3 lies on both; in batches of one, which
    go to the ranks in turn, each group does."""
    config = settings(train__prompts_per_iteration=3, train__group_size=3)
    video = 3 * 9 * 32 * 32
    assert plan(config).gathering is None
    on_one = plan(config, comparing=["r"]).gathering
    assert on_one is not None
    assert (on_one.groups, on_one.sent) == (3, 0)
    assert on_one.in_host_memory == (9 + 3) * video
    on_two = plan(config, comparing=["r"], ranks=2).gathering
    assert on_two is not None
    assert (on_two.groups, on_two.sent) == (3, video)
    assert on_two.in_host_memory == (6 + 3) * video
    in_turn = dataclasses.replace(config.sampling, batch_size=1)
    by_one = plan(dataclasses.replace(config, sampling=in_turn), comparing=["r"], ranks=2).gathering
    assert by_one is not None
    assert by_one.sent == 3 * video
    in_sequence = plan(
        settings(
            train__prompts_per_iteration=1,
            train__group_size=4,
            sampling__batch_size=2,
            model__sequence_parallel=2,
        ),
        comparing=["r"],
        ranks=2,
    ).gathering
    assert in_sequence is not None
    assert in_sequence.sent == 2 * video


def test_scores_that_have_nothing_in_common_are_not_made_up() -> None:
    empty = Scores(rewards=torch.zeros(2), parts={})
    other = Scores(rewards=torch.tensor([1.0, torch.nan]), parts={"a": torch.tensor([1.0, 2.0])})
    joined = empty.combined(other)
    assert joined.rewards.tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
    assert joined.parts["a"].tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
