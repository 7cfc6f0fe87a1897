"""A vision-language model that compares the videos of a prompt in pairs, behind a server of chat
completions that this file runs."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize

from sage_fast.config.schema import RewardConfig, SamplingConfig
from sage_fast.rewards import CompositeReward
from sage_fast.rewards.comparing import notes_on_comparing
from sage_fast.rewards.failure_policy import RewardFailure
from sage_fast.rewards.load import dry_run_reward
from sage_fast.rewards.shipped.bradley_terry import bradley_terry
from sage_fast.rewards.shipped.vlm_pairs import VLMPairsReward, pairs_of
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from tests.tiny import settings

LEVELS = [40, 90, 90, 200]
"""Brightness of each video: the second and the third are equal."""
GROUP = torch.tensor(LEVELS, dtype=torch.uint8)[:, None, None, None, None].expand(4, 20, 3, 32, 48)
CAT = PromptKey("a cat")
ANSWER = (
    "Alignment Winner (1, 2 or tie): {0}\n**Motion Winner (1, 2 or tie): Tie**\n"
    "Quality Winner (1, 2 or tie): 1"
)


def by_brightness(first: int, second: int) -> str:
    """The brighter video is better aligned; all move alike; the first one always looks better."""
    if abs(first - second) < 8:
        return ANSWER.format("tie")
    return ANSWER.format(1 if first > second else 2)


class Model(ThreadingHTTPServer):
    """A model that `answer`s from the brightness of two videos.

    Attributes:
        asked: brightness of the two videos of each request.
        bodies: of the requests.
        busiest: largest number of requests at a time.
    """

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[int, int], str] = by_brightness
        self.asked: list[tuple[int, int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.busy = self.busiest = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Model

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first, second = videos_of(body["messages"][0]["content"])
        with self.server.lock:
            self.server.asked.append((first, second))
            self.server.bodies.append(body)
            self.server.busy -= 1
        message = {"role": "assistant", "content": self.server.answer(first, second)}
        answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: object) -> None: ...


def videos_of(content: list[dict[str, Any]]) -> list[int]:
    """The brightness of the first image of each video, as the level of `LEVELS` that is nearest."""
    found = []
    for before, piece in itertools.pairwise(content):
        if before["type"] == "text" and piece["type"] == "image_url":
            coded = piece["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
            image = Image.open(io.BytesIO(base64.b64decode(coded)))
            level = int(np.asarray(image)[3, 3].mean())
            found.append(min({*LEVELS, level}, key=lambda each: (abs(each - level) > 3, each)))
    return found


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def config(model: Model, **settings: Any) -> RewardConfig:
    args = {"url": model.url, "model": "judge"} | settings.pop("args", {})
    given = {"name": "vlm-pairs", "args": args, "weights": {"alignment": 1.0}, "retries": 0}
    return RewardConfig(**given | settings)


def compared(reward: CompositeReward) -> Any:
    return reward.compare(GROUP, CAT).result()


def posterior(wins: np.ndarray) -> np.ndarray:
    """The scores of largest posterior, by a general optimizer and the formula as the docs print
    it."""

    def loss(scores: np.ndarray) -> float:
        total = 0.0
        for i, j in itertools.permutations(range(len(scores)), 2):
            total += wins[i, j] * np.logaddexp(0, scores[j] - scores[i])
        prior = np.logaddexp(0, scores) / 2 + np.logaddexp(0, -scores) / 2
        return total + float(prior.sum())

    found = minimize(loss, np.zeros(len(wins)), method="BFGS", options={"gtol": 1e-9})
    return found.x


# -- Bradley-Terry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_scores_maximise_the_posterior(seed: int) -> None:
    count = 3 + seed
    numbers = np.random.default_rng(seed).choice([0.0, 0.5, 1.0, 2.0], (count, count))
    wins = np.triu(numbers, 1)
    wins = wins + np.tril(2 - numbers.T, -1)
    found = bradley_terry(torch.from_numpy(wins))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), posterior(wins), rtol=0, atol=1e-5)


def test_a_video_that_wins_all_has_a_finite_score() -> None:
    """For two videos the best one's score solves 2 sigmoid(-2 s) = sigmoid(s) - 1/2."""
    best, worst = bradley_terry(torch.tensor([[0.0, 2.0], [0.0, 0.0]])).tolist()
    assert best == pytest.approx(-worst)
    assert 2 / (1 + np.exp(2 * best)) == pytest.approx(1 / (1 + np.exp(-best)) - 0.5, abs=1e-12)
    many = bradley_terry(2 * torch.triu(torch.ones(64, 64), 1))
    assert many.isfinite().all()
    assert (many.diff() < 0).all()
    assert many.flip(0).tolist() == pytest.approx((-many).tolist())


def test_ties_are_level_and_parts_without_a_chain_are_relative_to_zero() -> None:
    assert bradley_terry(torch.ones(3, 3) - torch.eye(3)).tolist() == pytest.approx([0, 0, 0])
    wins = torch.zeros(4, 4)
    wins[0, 1] = wins[2, 3] = 2
    first, second = bradley_terry(wins).view(2, 2).tolist()
    assert first == pytest.approx(second)
    assert first[0] > 0 > first[1]
    assert bradley_terry(torch.zeros(2, 2)).tolist() == [0, 0]


# -- the judge -------------------------------------------------------------------------------------


def test_each_pair_is_asked_about_in_both_orders(model: Model) -> None:
    """A model that always prefers the first video makes ties."""
    reward = CompositeReward.of(config(model))
    scores = compared(reward)
    expected = Counter(itertools.permutations(LEVELS, 2))
    assert Counter(model.asked) == expected
    assert len(model.asked) == 4 * 3 == reward.callers[0]._backends[0].calls_of_group(4)  # type: ignore[attr-defined]

    wins = np.array([[0, 0, 0, 0], [2, 0, 1, 0], [2, 1, 0, 0], [2, 2, 2, 0]])
    np.testing.assert_allclose(scores.parts["alignment"].numpy(), posterior(wins), atol=1e-5)
    assert scores.rewards.dtype == torch.float64
    for part in ("motion", "quality"):
        assert scores.parts[part].tolist() == pytest.approx([0, 0, 0, 0], abs=1e-12)


def test_a_request_holds_both_videos_and_the_caption(model: Model) -> None:
    args = {"num_frames": 3, "extra_body": {"max_tokens": 64}}
    compared(CompositeReward.of(config(model, args=args)))
    body = model.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("judge", 64, 0)
    content = body["messages"][0]["content"]
    kinds = [piece["type"] for piece in content]
    of_video = ["text", "image_url", "image_url", "image_url"]
    assert kinds == [*of_video, *of_video, "text"]
    assert (content[0]["text"], content[4]["text"]) == ("Video 1:", "Video 2:")
    assert "caption:\n\na cat\n" in content[-1]["text"]


def test_requests_at_a_time_are_bounded(model: Model) -> None:
    compared(CompositeReward.of(config(model, args={"concurrent": 2})))
    assert model.busiest <= 2


def test_an_answer_that_fails_takes_its_pair_out(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """In one order: the pair counts in neither, so that no order is preferred."""
    caplog.set_level(logging.INFO)
    model.answer = lambda *pair: "Hm." if pair == (40, 200) else by_brightness(*pair)
    scores = compared(CompositeReward.of(config(model)))
    assert (scores.dropped, scores.retried) == (0, 0)
    wins = np.array([[0, 0, 0, 0], [2, 0, 1, 0], [2, 1, 0, 0], [0, 2, 2, 0]])
    np.testing.assert_allclose(scores.parts["alignment"].numpy(), posterior(wins), atol=1e-5)
    said = caplog.text
    assert "dropped 1 of 6 pairs of 'a cat': expected one line 'Alignment Winner" in said


def test_a_video_without_a_pair_has_no_score(model: Model) -> None:
    """What is left of the group keeps its scores."""
    model.answer = lambda *pair: "Hm." if 200 in pair else by_brightness(*pair)
    scores = compared(CompositeReward.of(config(model)))
    assert scores.rewards.isnan().tolist() == [False, False, False, True]
    wins = np.array([[0, 0, 0], [2, 0, 1], [2, 1, 0]])
    np.testing.assert_allclose(scores.rewards[:3].numpy(), posterior(wins), atol=1e-5)
    assert "expected one line" in scores.notes[-1]

    model.answer = lambda *pair: "Hm."
    scores = compared(CompositeReward.of(config(model, retries=1)))
    assert (scores.dropped, scores.retried) == (4, 4)


def test_a_model_that_fails_later_takes_no_scores_away(model: Model) -> None:
    """The group is asked about again for one video without scores, and then nothing is answered."""

    def worsens(first: int, second: int) -> str:
        fails = 200 in (first, second) or len(model.asked) > 12
        return "Hm." if fails else by_brightness(first, second)

    model.answer = worsens
    scores = compared(CompositeReward.of(config(model, retries=1)))
    assert len(model.asked) == 24
    assert scores.rewards.isnan().tolist() == [False, False, False, True]


def test_comparisons_end_with_the_time_of_the_call(model: Model) -> None:
    """Those that were made by then count."""
    ended = threading.Event()

    def slow(first: int, second: int) -> str:
        if 200 in (first, second):
            ended.wait(30)
        return by_brightness(first, second)

    model.answer = slow
    scores = compared(CompositeReward.of(config(model, timeout_seconds=5.0)))
    ended.set()
    assert scores.rewards.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize(("answer", "why"), [
    (ANSWER.format(3), "expected one line 'Alignment Winner"),
    (ANSWER.format("1 or 2"), "expected one line 'Alignment Winner"),
    (ANSWER.format(1).replace("Quality", "Style"), "expected one line 'Quality Winner"),
    (ANSWER.format(1) + "\n" + ANSWER.format(2), "expected one line 'Alignment Winner"),
    ("", "expected one line 'Alignment Winner"),
])  # fmt: skip
def test_answers_that_name_no_winner(answer: str, why: str, model: Model) -> None:
    reward = VLMPairsReward(model.url, "judge")
    with pytest.raises(RewardFailure, match=why):
        reward.parse(answer)
    assert reward.parse(ANSWER.format("TIE")) == {"alignment": 0.5, "motion": 0.5, "quality": 1.0}


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "why"), [
    ({"opponents": 3}, "opponents = 3: expected an even number from 2 on, such as 4, or null"),
    ({"opponents": 0}, "opponents = 0: expected an even number from 2 on, such as 2, or null"),
    ({"opponents": 4.0}, r"opponents = 4\.0: expected an even number .* such as 4, or null"),
    ({"opponents": 2.5}, r"opponents = 2\.5: expected an even number .* such as 4, or null"),
    ({"concurrent": 0}, "concurrent = 0: expected a whole number from 1 on"),
    ({"concurrent": 2.5}, r"concurrent = 2\.5: expected a whole number from 1 on"),
    ({"num_frames": 0}, "num_frames = 0: expected at least 1"),
    ({"template": "genral"}, "expected one of general; did you mean 'general'|or a text file"),
    ({"template": "NOTES"}, r"expected \{prompt\} and one 'Name Winner \(1, 2 or tie\): X' per"),
    ({"oponents": 2}, "args: no 'oponents'; .*did you mean 'opponents'"),
])  # fmt: skip
def test_settings_are_checked_by_a_dry_run_too(
    args: dict[str, Any], why: str, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "NOTES").write_text("{prompt}\nMotion Score (1-5): X")
    monkeypatch.chdir(tmp_path)
    for check in (CompositeReward.of, dry_run_reward):
        with pytest.raises(UserError, match=why):
            check(config(model, args=args))
    assert not model.asked


def test_a_run_checks_it_on_a_group_and_says_how_often_it_asks(model: Model) -> None:
    reward = CompositeReward.of(config(model))
    reward.check(SamplingConfig(num_frames=5, height=32, width=32), [CAT])
    assert reward.parts == ["alignment", "motion", "quality"]
    assert len(model.asked) == 2

    args = {"url": model.url, "model": "m", "opponents": 4}
    of_run = settings(
        reward__name="vlm-pairs",
        reward__args=args,
        reward__weights={"alignment": 1.0},
        train__group_size=8,
        train__prompts_per_iteration=2,
    )
    first, _ = notes_on_comparing(of_run, ["reward.name"])
    assert first == "reward 'vlm-pairs' asks its server 32 times for a group, 64 times an iteration"


@pytest.mark.parametrize(("count", "opponents"), [(2, None), (5, None), (5, 2), (8, 4), (4, 4)])
def test_each_video_meets_as_many_others_as_asked(count: int, opponents: int | None) -> None:
    pairs = pairs_of(count, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    met = Counter(i for pair in pairs for i in pair)
    assert met == dict.fromkeys(range(count), min(opponents or count, count - 1))

    reachable = {0}
    for _ in pairs:
        reachable |= {i for pair in pairs if reachable & {*pair} for i in pair}
    assert reachable == {*range(count)}
