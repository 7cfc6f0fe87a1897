"""A vision-language model as a judge, behind a server of chat completions that this file runs."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sage_fast.config.schema import Config, RewardConfig, SamplingConfig
from sage_fast.rewards import CompositeReward
from sage_fast.rewards.failure_policy import RewardFailure
from sage_fast.rewards.load import dry_run_reward, load_reward, reward_bytes
from sage_fast.rewards.shipped.vlm import TEMPLATES, VLMReward
from sage_fast.run.resume import _compared
from sage_fast.util.errors import UserError
from tests.reward_faults import request
from tests.tiny import keys_of

GREY = torch.tensor([0.1, 0.3, 0.5, 0.8])
VIDEOS = GREY[:, None, None, None, None].expand(4, 20, 3, 32, 48).clone()
PROMPTS = ["a cat", "a dog", "a cow", "a hen"]
EXPECTED = [1 + 4 * round(255 * grey) / 255 for grey in GREY.tolist()]
ANSWER = "Alignment Score (1-5): {0:.4f}\nPhysics Score (1-5): 3.0987\nStyle Score (1-5): 2"


class VLM(ThreadingHTTPServer):
    """A model whose alignment is 1 + 4 x the brightness of the first image; `plan` has other
    answers for a caption.

    A plan is a list of (status, text), one per request; the last one stays.
    """

    def __init__(self, key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.key, self.requests, self.plan = (
            key,
            list[tuple[str, Any]](),
            dict[str, list[tuple[int, str]]](),
        )
        self.together = threading.Barrier(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def captions(self) -> list[str]:
        return sorted(caption for caption, _ in self.requests)


class Handler(BaseHTTPRequestHandler):
    server: VLM

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.together.wait(600)
        if self.path != "/v1/chat/completions":
            return self.answer(404, {"detail": "Not Found"})
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            message = (
                "Incorrect API key provided: "
                f"{self.headers['Authorization'].removeprefix('Bearer ')}"
            )
            return self.answer(
                401, {"error": {"message": message, "type": "invalid_request_error"}}
            )
        if body["model"] != "judge":
            return self.answer(
                404, {"object": "error", "message": f"The model `{body['model']}` does not exist."}
            )
        *images, text = body["messages"][0]["content"]
        caption = re.search(r"Text Caption: \[(.*)\]|caption:\n\n(.*)", text["text"])
        assert caption is not None
        name = caption[1] or caption[2]
        self.server.requests.append((name, body))
        first = base64.b64decode(
            images[0]["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
        )
        level = (
            torch.tensor(Image.open(io.BytesIO(first)).getpixel((3, 3))).float().mean().item() / 255
        )
        plan = self.server.plan.get(name, [(200, ANSWER.format(1 + 4 * level))])
        status, answer = plan.pop(0) if len(plan) > 1 else plan[0]
        if status != 200:
            return self.answer(status, {"error": {"message": answer}})
        ended = "length" if answer.endswith("...") else "stop"
        self.answer(
            200,
            {
                "choices": [
                    {"message": {"role": "assistant", "content": answer}, "finish_reason": ended}
                ]
            },
        )

    def answer(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def vlm() -> Iterator[VLM]:
    with VLM() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def config(vlm: VLM, **settings: Any) -> RewardConfig:
    args = {"url": vlm.url, "model": "judge", "template": "unified-reward"} | settings.pop(
        "args", {}
    )
    return RewardConfig(**{"name": "vlm", "args": args, "weights": {"alignment": 1.0}} | settings)


def test_each_video_keeps_its_own_scores(vlm: VLM) -> None:
    """The published request: 16 of 20 frames as JPEG, then the text; all videos of a call at
    once."""
    vlm.together = threading.Barrier(4)
    scores = CompositeReward.of(config(vlm))(VIDEOS, keys_of(PROMPTS))
    torch.testing.assert_close(scores.rewards, torch.tensor(EXPECTED), rtol=0, atol=4.1 / 255)
    assert scores.parts["physics"].tolist() == pytest.approx([3.0987] * 4)
    assert scores.parts["style"].tolist() == [2] * 4
    assert vlm.captions() == sorted(PROMPTS)
    body = vlm.requests[0][1]
    assert {key: value for key, value in body.items() if key != "messages"} == {
        "model": "judge",
        "temperature": 0,
        "max_tokens": 4096,
    }
    kinds = [piece["type"] for piece in body["messages"][0]["content"]]
    assert kinds == ["image_url"] * 16 + ["text"]


def test_frames_are_evenly_spaced_from_the_first_on(vlm: VLM) -> None:
    """The rule of UnifiedReward's script, floor(i F / n).

    The general prompt asks for other parts.
    """
    video = torch.linspace(0, 1, 10)[None, :, None, None, None].expand(1, 10, 3, 16, 16)
    vlm.plan["a cat"] = [
        (
            200,
            (
                "**Alignment Score (1-10): 9**\n\n* Motion Score (1-10): 7.25 \nQuality Score "
                "(1-10): 1"
            ),
        )
    ]
    args = {"num_frames": 4, "template": "general", "extra_body": {"max_tokens": 64, "seed": 1}}
    scores = CompositeReward.of(config(vlm, args=args))(video, keys_of(["a cat"]))
    assert {part: values.item() for part, values in scores.parts.items()} == {
        "alignment": 9,
        "motion": 7.25,
        "quality": 1,
    }
    [(_, body)] = vlm.requests
    assert (body["max_tokens"], body["seed"]) == (64, 1)
    images = [
        piece["image_url"]["url"].partition(",")[2] for piece in body["messages"][0]["content"][:-1]
    ]
    seen = [Image.open(io.BytesIO(base64.b64decode(image))).getpixel((8, 8))[0] for image in images]  # type: ignore[index]
    assert seen == pytest.approx([round(255 * i / 9) for i in (0, 2, 5, 7)], abs=2)


def test_an_answer_that_does_not_parse_costs_its_own_video_alone(vlm: VLM) -> None:
    """Asked again once; then dropped, with the reason. No other video is asked about again."""
    vlm.plan = {"a dog": [(200, "A fine dog.")], "a cow": [(200, "Hm."), (200, ANSWER.format(2))]}
    videos = VIDEOS.clone()
    videos[3, 7] = torch.nan
    scores = CompositeReward.of(config(vlm))(videos, keys_of(PROMPTS))
    assert scores.rewards.isnan().tolist() == [False, True, False, True]
    assert (scores.dropped, scores.retried) == (2, 3)
    assert vlm.captions() == ["a cat", "a cow", "a cow", "a dog", "a dog"]
    text = "\n".join(scores.notes)
    assert "expected one line 'Alignment Score (1-5): X' in the answer 'A fine dog.'" in text
    assert "the video has values that are not finite" in text
    assert "; 3 of 4 videos had no scores" in text


def test_a_busy_server_is_asked_again_for_what_is_missing(
    vlm: VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.rewards.http.FIRST_WAIT", 0.01)
    vlm.plan["a cow"] = [(429, "Rate limit"), (503, "Loading"), (200, ANSWER.format(3))]
    scores = CompositeReward.of(config(vlm))(VIDEOS, keys_of(PROMPTS))
    assert (scores.retried, scores.dropped, scores.notes) == (0, 0, ())
    assert scores.rewards[2] == 3
    assert vlm.captions() == ["a cat", "a cow", "a cow", "a cow", "a dog", "a hen"]


LINES = ANSWER.format(3)


@pytest.mark.parametrize(("answer", "why"), [
    (LINES.replace("3.0987", "5.1"), r"'Physics Score \(1-5\): 5.1': expected 1 to 5"),
    (LINES.replace("3.0987", "nan"), r"expected one line 'Physics Score \(1-5\): X'"),
    (LINES.replace("3.0987", "4/5"), "expected one line 'Physics"), (LINES.replace("3.0987", "²"),
        "one line 'Physics"),
    (LINES.replace("Physics Score (1-5)", "Physics Score (1-10)"),
     r"expected one line 'Physics Score \(1-5\): X'"),
    (f"{LINES}\n{LINES}", "expected one line 'Alignment"), ("", "expected one line 'Alignment"),
    (f"{LINES}\nI rate it so since ...", "the answer was cut off at max_tokens"),
])  # fmt: skip
def test_answers_that_are_no_scores(answer: str, why: str, vlm: VLM) -> None:
    vlm.plan["a cat"] = [(200, answer)]
    with pytest.raises(RewardFailure, match=why):
        load_reward(config(vlm)).score(request(VIDEOS[:1], ["a cat"]), 20)


@pytest.mark.parametrize(("args", "why"), [
    ({"template": "unified_reward"},
     "expected one of general, unified-reward; did you mean 'unified-reward'"),
    ({"template": "NOTES"},
     r"expected \{prompt\} and one 'Name Score \(1-5\): X' per part, got \[\]"),
    ({"template": "TWICE"}, r"per part, got \['motion', 'motion'\]"),
    ({"num_frames": 0}, "num_frames = 0: expected at least 1"), ({"url": "localhost:8000"},
        "expected an address such"),
    ({"modle": "a"}, "args: no 'modle'; expected one of .*did you mean 'model'"),
])  # fmt: skip
def test_settings_are_checked_by_a_dry_run_too(
    args: dict[str, Any], why: str, vlm: VLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "NOTES").write_text("Rate {prompt} as you like.")
    (tmp_path / "TWICE").write_text("{prompt}\nMotion Score (1-5): X \nmotion Score (1-9): Y")
    monkeypatch.chdir(tmp_path)
    for check in (CompositeReward.of, dry_run_reward):
        with pytest.raises(UserError, match=why):
            check(config(vlm, args=args))
    assert not vlm.requests


def test_a_wrong_key_or_model_ends_the_run_before_it_begins(
    vlm: VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key comes from the environment alone, and no message shows it."""
    vlm.key, sampling = "sk-123456", SamplingConfig(num_frames=5, height=32, width=32)
    key = {"api_key": "${JUDGE_KEY}"}
    monkeypatch.setenv("JUDGE_KEY", "sk-wrong")
    with pytest.raises(UserError, match=r"status 401: Incorrect API key provided: \$\{JUDGE_KEY\}"):
        CompositeReward.of(config(vlm, args=key)).check(sampling, keys_of(["a cat"]))
    monkeypatch.setenv("JUDGE_KEY", "sk-\nsecret")
    with pytest.raises(UserError, match="the token is no text that HTTP can send") as error:
        CompositeReward.of(config(vlm, args=key)).check(sampling, keys_of(["a cat"]))
    assert "secret" not in str(error.value)
    monkeypatch.setenv("JUDGE_KEY", vlm.key)
    with pytest.raises(UserError, match="status 404: The model `other` does not exist"):
        CompositeReward.of(config(vlm, args=key | {"model": "other"})).check(
            sampling, keys_of(["a cat"])
        )
    with pytest.raises(UserError, match=r"status 404: .*Not Found"):
        CompositeReward.of(config(vlm, args=key | {"url": vlm.url.removesuffix("/v1")})).check(
            sampling, keys_of(["a cat"])
        )
    reward = CompositeReward.of(config(vlm, args=key))
    reward.check(sampling, keys_of(["a cat"]))
    assert reward.parts == ["alignment", "physics", "style"]


def test_the_server_may_move_and_takes_no_gpu_here(vlm: VLM) -> None:
    first, moved, other = (
        Config(reward=config(vlm, args=args))
        for args in ({}, {"url": "http://there/v1"}, {"template": "general"})
    )
    of_first, of_moved, of_other = (
        _compared(each, "reward.args") for each in (first, moved, other)
    )
    assert of_first == of_moved != of_other
    assert reward_bytes(first.reward) == 0
    assert dry_run_reward(first.reward) == []


def test_the_templates_of_the_package() -> None:
    parts = {name: VLMReward("http://a/v1", "m", template=name).parts for name in TEMPLATES}
    assert parts == {
        "general": ["alignment", "motion", "quality"],
        "unified-reward": ["alignment", "physics", "style"],
    }


def test_a_template_may_ask_for_the_duration(tmp_path: Path) -> None:
    """A prompt that holds the same word is left as it is; a rate that is not known makes no
    number."""
    file = tmp_path / "asks.txt"
    file.write_text("{seconds} s of: {prompt}\nMotion Score (1-5): X\n")
    asked = []

    class Echo(VLMReward):
        async def post(self, body: bytes, seconds: float, key: str) -> Any:
            asked.append(json.loads(body)["messages"][0]["content"][-1]["text"].splitlines()[0])
            message = {"message": {"content": "Motion Score (1-5): 3"}, "finish_reason": "stop"}
            return {"choices": [message]}

    reward = Echo("http://127.0.0.1:1", "m", template=str(file))
    of_one = request(VIDEOS[:1], ["a {seconds} cat"])
    assert reward.score(dataclasses.replace(of_one, fps=8.0), 0)["motion"].tolist() == [3.0]
    assert asked == ["2.5 s of: a {seconds} cat"]
    with pytest.raises(
        RewardFailure, match=r"asks for .seconds., and the frame rate of the videos is not known"
    ):
        reward.score(of_one, 0)
