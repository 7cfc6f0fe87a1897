"""Rewards in their own processes and behind HTTP: whatever fails, every video keeps its own score
or has none."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gc
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import sage_fast.rewards.http as reward_http
from sage_fast.config.schema import RewardConfig, SamplingConfig
from sage_fast.rewards import CompositeReward, Scores
from sage_fast.rewards.composite import RewardCaller
from sage_fast.rewards.failure_policy import BATCH_DEADLINE_FACTOR, RewardFailure
from sage_fast.rewards.http import HttpReward, read_request
from sage_fast.rewards.in_process import checked
from sage_fast.rewards.interface import Request
from sage_fast.rewards.server import RewardServer
from sage_fast.rewards.worker import Worker
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from tests.reward_faults import Fingerprint, Returns, fingerprints, request
from tests.tiny import keys_of
from tests.waits import HANG, wait_until

REPOSITORY = Path(__file__).parent.parent
SMALL = SamplingConfig(num_frames=5, height=16, width=16)
VIDEOS = torch.rand(8, 5, 3, 16, 16, generator=torch.Generator().manual_seed(5))
PROMPTS = keys_of(f"prompt {i}" for i in range(8))


def config(**settings: Any) -> RewardConfig:
    args = settings.pop("args", {})
    return RewardConfig(
        **{"name": "tests.reward_faults:Fingerprint", "weights": {"print": 1.0}, "args": args}
        | settings
    )


def in_chunks(reward: CompositeReward, size: int = 2) -> list[Scores]:
    """Submit all chunks before waiting for the first, as beside a rollout."""
    pending = [
        reward.submit(VIDEOS[i : i + size], PROMPTS[i : i + size])
        for i in range(0, len(VIDEOS), size)
    ]
    return [scores.result() for scores in pending]


def are_their_own(
    scores: Scores, first: int = 0, dropped: tuple[int, ...] = (), exact: bool = True
) -> None:
    expected = fingerprints(VIDEOS[first : first + len(scores.rewards)])
    expected[list(dropped)] = torch.nan
    tolerance = 1e-6 if exact else 1e-3
    torch.testing.assert_close(
        scores.rewards.double(), expected, rtol=0, atol=tolerance, equal_nan=True
    )
    torch.testing.assert_close(
        scores.parts["print"].double(), expected, rtol=0, atol=tolerance, equal_nan=True
    )


class Fake:
    """A backend that does what the test says."""

    in_background = True
    compares_group = False

    def __init__(self, score: Callable[[torch.Tensor, list[str]], dict[str, torch.Tensor]]) -> None:
        self._score = score

    def score(self, request: Request, seconds: float) -> dict[str, torch.Tensor]:
        return self._score(request.videos, request.prompts)

    def close(self) -> None:
        pass


def through(*backends: Fake) -> CompositeReward:
    return CompositeReward(
        [RewardCaller(config(), "reward.name", backends, config(), {"print"})], config()
    )


@contextlib.contextmanager
def serving(reward: CompositeReward, device: str = "cpu") -> Iterator[RewardServer]:
    """A server in a thread of this process."""
    server = RewardServer(reward, "127.0.0.1", 0, device)
    thread = threading.Thread(target=server.listen, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(HANG)


METADATA = {
    prompt: {"count": i, "box": {"at": [i, None]}} for i, prompt in enumerate(PROMPTS) if i != 5
}


@contextlib.contextmanager
def reached(how: str) -> Iterator[CompositeReward]:
    """A reward that takes metadata: in this process, in its own, or behind HTTP."""
    settings = config(
        name="tests.reward_faults:count_and_print", weights={"count": 1.0, "print": 0.0}
    )
    if how != "http":
        yield CompositeReward.of(
            dataclasses.replace(settings, workers=int(how == "process")), metadata=METADATA
        )
        return
    with serving(CompositeReward.of(settings)) as server:  # which knows no metadata itself
        yield CompositeReward.of(
            dataclasses.replace(settings, name=server.address), metadata=METADATA
        )


@pytest.mark.parametrize("how", ["inline", "process", "http"])
def test_each_sample_keeps_its_metadata(how: str) -> None:
    """Also when a batch fails and its videos are scored one by one, and where a prompt has none."""
    with reached(how) as reward:
        chunks = in_chunks(reward, 4)
    assert [chunk.parts["count"].tolist() for chunk in chunks] == [[0, 1, 2, 3], [4, -1, 6, 7]]
    assert [chunk.retried for chunk in chunks] == [4, 0]
    for place, chunk in enumerate(chunks):
        expected = fingerprints(VIDEOS[4 * place : 4 * place + 4])
        torch.testing.assert_close(chunk.parts["print"], expected, rtol=0, atol=1e-3)


def test_metadata_is_sent_only_where_there_is_some() -> None:
    """Servers of others may not know the key; a reward that does not ask for it never sees it."""
    plain = json.loads(reward_http.format_request(request(VIDEOS[:1]), "id"))
    assert sorted(plain) == ["id", "prompts", "schema", "seed", "videos"]
    assert CompositeReward(Fingerprint().score, config(), METADATA)(VIDEOS, PROMPTS).dropped == 0  # type: ignore[arg-type]


# -- one process, every failure --------------------------------------------------------------------


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    """Makes processes with a `Fingerprint`, and ends them after the tests."""
    made: list[CompositeReward] = []

    def make(**settings: Any) -> CompositeReward:
        made.append(
            CompositeReward.of(
                config(workers=1) if not settings else config(**{"workers": 1} | settings)
            )
        )
        return made[-1]

    yield make
    for reward in made:
        if reward.callers[0].in_background:
            reward.callers[0].close()


@pytest.mark.soak
def test_dead_or_hanging_process_is_restarted_and_its_videos_rescored(
    process: Any, tmp_path: Path
) -> None:
    args = {"folder": str(tmp_path), "plan": ["2 kill", "5 exit", "8 hang"]}
    chunks = in_chunks(process(args=args, timeout_seconds=12.0))
    for place, scores in enumerate(chunks):
        are_their_own(scores, 2 * place)
    assert [scores.retried for scores in chunks] == [0, 2, 2, 2]
    for scores, expected in zip(chunks[1:], (
        "its process ended: signal SIGKILL", "its process ended: exit status 3",
        "no answer for 2 videos within 12 s; its process was ended",
    )):  # fmt: skip
        assert scores.notes == (
            f"reward 'tests.reward_faults:Fingerprint': {expected}; 2 of 2 videos had no scores",
        )
    processes = [int(path.name[4:]) for path in tmp_path.glob("0/pid-*")]
    assert len(processes) == 4
    assert sum(Path("/proc", str(number)).exists() for number in processes) == 1


def test_what_kills_its_process_is_dropped_alone(process: Any) -> None:
    reward = process(args={"how": "exit", "poison": "prompt 1"})
    scores = reward(VIDEOS[:2], PROMPTS[:2])
    are_their_own(scores, dropped=(1,))
    assert scores.retried == 2
    assert scores.notes[-1].startswith(
        "dropped a sample of 'prompt 1': reward 'tests.reward_faults:Fingerprint': its"
    )
    assert scores.parts["watched"].isnan().all(), "a part without a weight may be what it likes"


@pytest.mark.parametrize("how", ["raise", "nan", "sys.exit"])  # KeyboardInterrupt is Ctrl-C there
def test_a_failing_sample_is_dropped_within_the_runs_process_too(how: str) -> None:
    reward = CompositeReward(Fingerprint(how, poison="prompt 1").score, config())  # type: ignore[arg-type]
    scores = reward(VIDEOS[:3], PROMPTS[:3])
    are_their_own(scores, dropped=(1,))
    assert scores.dropped == 1
    assert scores.retried == (1 if how == "nan" else 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_is_called_without_gradients(workers: int, process: Any) -> None:
    name = "tests.reward_faults:gradients"
    assert process(name=name, weights={"on": 1.0}, workers=workers)(
        VIDEOS[:2], PROMPTS[:2]
    ).rewards.tolist() == [0, 0]


def test_all_processes_make_their_reward_before_the_first_call(
    process: Any, tmp_path: Path
) -> None:
    process(args={"folder": str(tmp_path)}, workers=2)
    wait_until(lambda: len(list(tmp_path.glob("0/pid-*"))) == 2)


def test_a_wrong_reward_is_found_in_its_process(process: Any) -> None:
    why = r"^reward.name = 'tests.reward_faults:Fingerprint': args: no 'hwo'; .*did you mean 'how'"
    with pytest.raises(UserError, match=why):
        process(args={"hwo": 1}).check(SMALL, [PromptKey("a")])


def test_scores_are_made_beside_what_comes_next_and_the_queue_is_bounded() -> None:
    gate, begun = threading.Event(), threading.Event()

    def score(videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
        begun.set()
        assert gate.wait(HANG)
        return {"print": fingerprints(videos).float()}

    reward = through(Fake(score))
    pending = [reward.submit(VIDEOS[:2], PROMPTS[:2])]
    assert begun.wait(HANG)
    pending.append(reward.submit(VIDEOS[2:4], PROMPTS[2:4]))
    order = []

    def submit() -> None:
        pending.append(reward.submit(VIDEOS[4:6], PROMPTS[4:6]))
        order.append(gate.is_set())

    third = threading.Thread(target=submit, daemon=True)
    third.start()
    third.join(0.5)
    assert not any(scores.done() for scores in pending)
    gate.set()
    third.join(HANG)
    assert order == [True], "one in its hands and one in the queue: the rollout waits"
    for place, scores in enumerate(pending):
        are_their_own(scores.result(), 2 * place)


def test_a_call_that_failed_keeps_no_videos() -> None:
    reward = CompositeReward(Fingerprint("raise", poison="x").score, config())  # type: ignore[arg-type]
    videos = VIDEOS[:2].clone()
    kept = weakref.ref(videos)
    gc.disable()
    try:
        scores = reward(videos, keys_of(["x", "x"]))
        del videos
        wait_until(lambda: kept() is None)
        assert scores.dropped == 2
    finally:
        gc.enable()


# -- what a reward may return ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["ints", "bools", "float64", "list", "numpy", "graph"])
def test_numbers_of_any_kind(what: str) -> None:
    reward = CompositeReward(Returns(what), RewardConfig(name="r", weights={"a": 1.0}))  # type: ignore[arg-type]
    scores = reward(VIDEOS[:2].clone(), PROMPTS[:2])
    assert scores.dropped == 0
    wide = what in ("ints", "float64", "list", "numpy")
    assert scores.rewards.dtype == (torch.float64 if wide and what != "numpy" else torch.float32)
    assert not scores.rewards.requires_grad


@pytest.mark.parametrize(("what", "why"), [
    ("empty", r"weights names 'a'; reward .* returns \[\]"), ("none",
        "returned NoneType; expected a mapping"),
    ("text", r"part 'a': expected numbers \[2\], got list"), ("matrix",
        r"expected shape \[2\], got \[2, 1\]"),
    ("number", r"expected shape \[2\], got \[\]"), ("complex",
        "expected real numbers, got torch.complex64"),
    ("key", "a part named 3; expected 1 to"), ("nan",
        r"part 'a' is \[nan, nan\] on made-up .*; expected num"),
])  # fmt: skip
def test_what_is_no_score_is_found_before_the_run(what: str, why: str) -> None:
    settings = RewardConfig(
        name="tests.reward_faults:Returns", args={"what": what}, weights={"a": 1.0}
    )
    with pytest.raises(UserError, match=rf"reward.*tests.reward_faults:Returns.*{why}|{why}"):
        CompositeReward.of(settings).check(SMALL, [PromptKey("a")])


def test_forks_of_a_reward_and_what_is_printed_do_no_harm(process: Any) -> None:
    """The reward ends all of its children, waits for them, and forks another one that returns from
    it."""
    reward = process(
        name="tests.reward_faults:Returns",
        args={"what": "children"},
        weights={"a": 1.0},
        timeout_seconds=60,
        retries=0,
    )
    for _ in range(3):
        assert reward(VIDEOS[:2], PROMPTS[:2]).rewards.tolist() == [1, 1]


# -- several together ------------------------------------------------------------------------------


def test_several_rewards_with_weights_and_prefix() -> None:
    same = {"name": "tests.reward_faults:Fingerprint"}
    settings = RewardConfig(several=[
        same | {"weights": {"print": 2.0}},
        same | {"weights": {"print": -1.0}, "prefix": "second_"},
        {"name": "tests.reward_faults:Returns", "args": {"what": "ints"}, "weights": {"a": 0}},
    ])  # fmt: skip
    reward = CompositeReward.of(settings)
    reward.check(SMALL, [PromptKey("a")])
    assert reward.parts == ["a", "print", "second_print", "second_watched", "watched"]
    prints = fingerprints(VIDEOS[:4])
    scores = reward(VIDEOS[:4], PROMPTS[:4])
    torch.testing.assert_close(scores.parts["print"], prints)
    torch.testing.assert_close(scores.rewards, 2 * prints - prints)
    assert settings.part_weights == {"print": 2.0, "second_print": -1.0, "a": 0}

    twice = CompositeReward.of(
        RewardConfig(several=[same | {"weights": {"print": 2.0}}, same | {"weights": {}}])
    )
    with pytest.raises(
        UserError, match=r"\[1\].name = .*returns 'print', and so does .*; give one a prefix"
    ):
        twice.check(SMALL, [PromptKey("a")])


# -- HTTP ------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    monkeypatch.setattr(reward_http, "FIRST_WAIT", 0.05)
    with serving(
        CompositeReward(Fingerprint("raise", poison="prompt 6").score, config())
    ) as server:  # type: ignore[arg-type]
        yield server


def test_a_server_that_answers_500_and_comes_back(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, scores = iter([True, False, True, True]), server._answer

    def refuse(body: bytes, client: str) -> tuple[int, dict[str, Any]]:
        return (500, {"error": "out of order"}) if next(broken, False) else scores(body, client)

    monkeypatch.setattr(server, "_answer", refuse)
    reward = CompositeReward.of(config(name=server.address, workers=2))
    for place, chunk in enumerate(in_chunks(reward)):
        are_their_own(chunk, 2 * place, dropped=(0,) if place == 3 else (), exact=False)
        assert chunk.retried == (2 if place == 3 else 0), "a 500 is tried again by the client"
    dropped = reward(VIDEOS[6:], PROMPTS[6:])
    assert "tests/reward_faults.py:" in dropped.notes[-1]
    assert "ValueError: wrong" in dropped.notes[-1]


def test_an_address_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_http, "SECONDS_TO_FIND", 0.2)
    reward = CompositeReward.of(config(name="http://127.0.0.1:9"))
    with pytest.raises(
        UserError, match=r"http://127.0.0.1:9: no scores within \d s; last: ConnectError"
    ):
        reward.check(SMALL, [PromptKey("a")])
    with pytest.raises(
        UserError, match=r"^reward.name = 'http://': 'http://': expected an address such as [^\n]*$"
    ):
        CompositeReward.of(config(name="http://"))
    with pytest.raises(
        UserError,
        match=r"reward.name = 'http://a': args = .*: the address of a server takes no arg",
    ):
        CompositeReward.of(config(name="http://a", args={"dtype": "float16"}))


def test_a_server_that_hangs_is_left_alone_before_the_other_ranks_give_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        hangs.setblocking(False)

        def requests() -> int:
            count = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    hangs.accept()[0].close()
                    count += 1
            return count

        url = f"http://127.0.0.1:{hangs.getsockname()[1]}"
        reward = CompositeReward.of(config(name=url, timeout_seconds=0.2))
        scores = reward(VIDEOS[:4], PROMPTS[:4])
        assert scores.dropped == 4
        assert "no scores within 0 s; last: no whole answer" in scores.notes[-1]
        assert requests() == BATCH_DEADLINE_FACTOR, "not one by one"


def test_a_server_scores_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Videos come over the network and are moved there; in a run they are there already."""
    # tensors on `meta` have no values to compare
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    seen: list[str] = []

    def where(videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
        seen.append(videos.device.type)
        return {"print": torch.zeros(len(prompts))}

    with serving(CompositeReward(where, config()), "meta") as server:
        assert HttpReward(server.address).score(request(VIDEOS[:2]), 60)["print"].tolist() == [0, 0]
    assert seen == ["meta"]


@pytest.mark.parametrize(("body", "headers", "status", "why"), [
    (b"{}", {}, 400, "expected an object with schema"), (b"\x80\x04N.", {}, 400,
        "expected an object with schema"),
    (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
    (b"", {"Content-Length": str(2**30 + 1)}, 413, "at most 1073741824"),
    (iter([b"{}"]), {"Transfer-Encoding": "chunked"}, 411, "expected a Content-Length"),
    (b"{}", {"Host": "page.example:8000"}, 421,
     "Host 'page.example:8000': expected one of 127.0.0.1, localhost"),
])  # fmt: skip
def test_what_the_server_refuses(
    body: Any, headers: dict[str, str], status: int, why: str, server: RewardServer
) -> None:
    connection = http.client.HTTPConnection(*server.socket.getsockname(), timeout=HANG)
    connection.request("POST", "/score", body, {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    assert response.status == status
    assert why in json.loads(response.read())["error"]
    connection.close()


@pytest.mark.parametrize("head", [
    b"Content-Length: -1", b"Content-Length: " + b"9" * 5000,
    b"Content-Length: 2\r\nContent-Length: 3", b"A" * 10**5,
    b"\x80\x04N.", b"A: \x00", b"Host: localhost", b"Transfer-Encoding: a, chunked",
])  # fmt: skip
def test_what_is_no_http_ends_its_connection(head: bytes, server: RewardServer) -> None:
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.settimeout(20)
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            answer = b"".join(iter(lambda: connection.recv(1000), b""))
            assert re.match(rb"HTTP/1.1 (400|411|415|501) ", answer), answer


def test_requests_that_are_none() -> None:
    texts = ["prompt 0", "prompt 1"]
    sound = json.loads(reward_http.format_request(request(VIDEOS[:2], texts), "id"))
    assert read_request(json.dumps(sound).encode())[1].prompts == texts

    def videos(kind: str, shape: list[int]) -> str:
        header = json.dumps(
            {"videos": {"dtype": kind, "shape": shape, "data_offsets": [0, 0]}}
        ).encode()
        return base64.b64encode(len(header).to_bytes(8, "little") + header).decode()

    wrong = [
        ("id", 3),
        ("id", "\ud800"),
        ("prompts", ["one"]),
        ("prompts", ["one", "\ud800"]),
        ("schema", "other/1"),
    ]
    wrong += [("metadata", value) for value in (3, [{}], [{}, 3])]
    wrong += [("videos", text) for text in ("!!", "\ud800", 3, *(
        videos(kind, shape) for kind in ("F16", "BOOL") for shape in ([2, 0, 3, 2**63, 1], [2,
            2**62, 3, 4, 4], [2**64])
    ))]  # fmt: skip
    for key, value in wrong:
        with pytest.raises(ValueError, match=f"{key}|expected a|prompts"):
            read_request(json.dumps(sound | {key: value}).encode())
    with pytest.raises(Exception, match="answers request 'other' instead of 'mine'"):
        reward_http.read_response(
            {"schema": reward_http.SCHEMA, "id": "other", "parts": {}}, "mine", "http://a", 1
        )
    assert HttpReward("http://a:1/prefix/").address == "http://a:1/prefix/score"


class Peer:
    """A server that answers every request with given pieces of bytes, a moment apart, and counts
    the requests."""

    def __init__(self, *answers: Sequence[bytes], every: float = 0.0) -> None:
        self.answers, self.every, self.count, self.finished = answers, every, 0, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection = self.socket.accept()[0]
            self.count += 1
            threading.Thread(
                target=self._answer, args=(connection, self.count), daemon=True
            ).start()

    def _answer(self, connection: socket.socket, number: int) -> None:
        with connection, contextlib.suppress(OSError):
            asked = b""
            while b'"}' not in asked:
                asked += connection.recv(1 << 20)
            name = re.search(rb'"id": "(\w+)"', asked)
            for piece in self.answers[min(number, len(self.answers)) - 1]:
                connection.sendall(piece.replace(b"NAME", name[1] if name else b""))
                time.sleep(self.every)
            self.finished += 1


SOUND = b'{"schema": "sage-fast-reward/1", "id": "NAME", "parts": {"print": [0.5]}}'
PARTS = b'{"schema": "sage-fast-reward/1", "id": "NAME", "parts": %s}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


def whole(body: bytes) -> bytes:
    return HEAD % len(body.replace(b"NAME", bytes(32))) + body


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX: ", HEAD % 10**6])
def test_a_server_that_drips_is_given_up_in_time(start: bytes) -> None:
    """It drips within the status line, a header or the body; each byte comes well within the
    time-out of a read."""
    peer = Peer([start, *[b"x"] * 10 * HANG], every=0.1)
    with pytest.raises(RewardFailure, match=r"no scores within \d+ s; last: no whole answer"):
        HttpReward(peer.url).score(request(VIDEOS[:1]), 0.5)
    assert peer.finished == 0


def test_a_server_that_always_says_continue_is_given_up_in_time() -> None:
    peer = Peer([b"HTTP/1.1 100 Continue\r\n\r\n"] * 10 * HANG, every=0.1)
    with pytest.raises(RewardFailure, match=r"no scores within \d+ s; last: no whole answer"):
        HttpReward(peer.url).score(request(VIDEOS[:1]), 0.5)
    assert peer.finished == 0


@pytest.mark.parametrize("cut", [
    HEAD % 200 + SOUND, b"HTTP/1.0 200 OK\r\n\r\n" + SOUND[:-20],
    b"HTTP/1.1 422 No\r\nContent-Length: 80\r\n\r\n{",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n" + SOUND[:20],
])  # fmt: skip
def test_an_answer_that_is_cut_off_is_asked_for_again(
    cut: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut answer is no verdict of the reward: no video is dropped and no failure counted."""
    monkeypatch.setattr(reward_http, "FIRST_WAIT", 0.05)
    peer = Peer([cut], [b"HTTP/1.0 200 OK\r\n\r\n" + SOUND])
    scores = CompositeReward.of(config(name=peer.url, timeout_seconds=20))(
        VIDEOS[:1], [PromptKey("a")]
    )
    assert (scores.rewards.tolist(), scores.retried, peer.count) == ([0.5], 0, 2)


@pytest.mark.parametrize(("body", "why"), [
    (SOUND, r"part 'print': expected a list of 2 numbers or null, got '\[0.5\]'"),
    (PARTS % b'{"\\u001b": [1, 1]}', r"a part named '\\x1b'"),
    (PARTS % (b'{"print": [1' + b"0" * 400 + b", 1]}"), "expected a list of 2 numbers or null"),
    (b"{}", "an answer that is no sage-fast-reward/1"),
])  # fmt: skip
def test_an_answer_that_does_not_fit_is_a_fault_of_the_reward(body: bytes, why: str) -> None:
    peer = Peer([whole(body)])
    with pytest.raises(RewardFailure, match=why):
        HttpReward(peer.url).score(request(VIDEOS[:2]), 20)
    assert peer.count == 1, "it is not sent again"


@pytest.mark.parametrize("answer", [
    b'HTTP/1.1 422 No\r\n\r\n{"error": "\\u001b]0;title\\u0007\\u001b[2Jnothing to see\\ntwo '
    b'\\ud800"}',
    b'HTTP/1.1 500 No\r\n\r\n{"error": "\\u001b[2J"}', b"HTTP/1.1 422 No\r\n\r\n\x1b[2J",
    b"HTTP/1.1 \x1b[2J\r\n\r\n",
    b"\x1b[2J\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n\x1b[2J",
    whole(b'{"id": "\\u001b[2J", "parts": {}}'),
])  # fmt: skip
def test_what_a_server_says_cannot_steer_the_terminal(answer: bytes) -> None:
    with pytest.raises(RewardFailure) as error:
        HttpReward(Peer([answer]).url).score(request(VIDEOS[:1]), 0.5)
    assert str(error.value).replace("\n", "").isprintable()


BOUNDS = b'{"id": "NAME", "parts": {%s: [1]}}'


@pytest.mark.parametrize("answer", [
    whole(BOUNDS % b'"tok-en7 xyz"'), whole(BOUNDS % b'"Bearer tok-en7 xyz"'),
    whole(BOUNDS % b'"tok\\u002den7 xyz"'),
    whole(b'{"id": "tok-en7 xyz", "parts": {}}'), whole(b'["tok-en7 xyz"]'), whole(b"tok-en7 xyz"),
    whole(b'{"id": "' + b"x" * 30 + b'tok-en7 xyz", "parts": {}}'),
    whole(b"x" * 75 + b"tok-en7 xyz"),
    b'HTTP/1.1 422 No\r\n\r\n{"error": {"message": "Authorization: Bearer tok-en7 xyz"}}',
    b'HTTP/1.1 500 No\r\n\r\n{"error": "tok\\u002den7 xyz"}', b"HTTP/1.1 403 No\r\n\r\ntok-en7 xyz",
    b"HTTP/1.1 200 OK\r\ntok-en7 xyz\r\n\r\n", b"tok-en7 xyz\r\n\r\n",
    b'HTTP/1.1 422 No\r\n\r\n{"error": "' + b"x" * 3995 + b'tok-en7 xyz"}',
])  # fmt: skip
def test_the_token_does_not_come_back_in_an_answer(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(reward_http.TOKEN, "tok-en7 xyz")
    with pytest.raises(RewardFailure) as error:
        HttpReward(Peer([answer]).url).score(request(VIDEOS[:1]), 0.5)
    assert not re.search("tok.{,5}en7|xyz", str(error.value)), error.value


@pytest.mark.parametrize("answer", [
    whole(b'["' + b"x" * 65 + b'", 7123456789123456]'),
    whole(b'{"id": [' + b"1, " * 10 + b"7123456789123456]}"),
    b'HTTP/1.1 422 No\r\n\r\n{"error": ["' + b"x" * 3985 + b'", 7123456789123456]}',
])  # fmt: skip
def test_a_token_of_digits_is_masked_before_an_answer_is_cut(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(reward_http.TOKEN, "7123456789123456")
    with pytest.raises(RewardFailure) as error:
        HttpReward(Peer([answer]).url).score(request(VIDEOS[:1]), 0.5)
    assert "7123" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["", " a", "a ", "a\tb", "a\nb", "x" * 101, "a<b>", "${KEY}", "\u202e"]
)
def test_names_of_parts_have_an_alphabet(name: str) -> None:
    with pytest.raises(
        RewardFailure, match=r"returned a part named .*; expected 1 to 100 letters, digits and _"
    ):
        checked({name: [1.0]}, 1)
    assert list(checked({"größe/v1.0-$%+_": [1.0], "Motion Score": [1.0]}, 1)) == [
        "Motion Score",
        "größe/v1.0-$%+_",
    ]


def test_tensors_of_every_layout_are_read_or_refused() -> None:
    row = torch.tensor([0.0, 2.0])
    for given in (row.to_sparse(), row.to_sparse().coalesce()):
        assert checked({"a": given}, 2)["a"].tolist() == [0, 2]
    for odd in (
        row.to("meta"),
        torch.nested.nested_tensor([row, row[:1]]),
        torch.ones(2, 1).to_sparse(),
    ):
        with pytest.raises(RewardFailure, match=r"part 'a': expected (numbers|shape)"):
            checked({"a": odd}, 2)


BEGUN = (
    b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    b"100000\r\n\r\n"
)


def is_closed(connection: socket.socket, drip: bytes = b"") -> bool:
    """Whether the server has closed a connection; otherwise it gets more bytes."""
    connection.settimeout(0.05)
    try:
        with contextlib.suppress(TimeoutError):
            if connection.recv(1000) == b"":
                return True
        connection.sendall(drip)
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("start", [b"", b"POST /score HTTP/1.1\r\nA: "], ids=["silent", "headers"])
def test_a_client_that_sends_no_request_is_closed(
    start: bytes, server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.rewards.server.SECONDS_TO_BEGIN", 0.5)
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.sendall(start)
        wait_until(lambda: is_closed(connection, b"x" if start else b""))


def test_a_body_that_never_ends_is_refused(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.rewards.server.SECONDS_TO_READ", 0.5)
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.settimeout(HANG)
        connection.sendall(BEGUN + b"x")
        assert b" 408 " in connection.recv(1000)


def test_the_oldest_of_too_many_connections_without_a_request_is_closed(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.rewards.server.MAX_CONNECTIONS", 12)
    monkeypatch.setattr("sage_fast.rewards.server.SECONDS_TO_BEGIN", 10.0 * HANG)
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(server.socket.getsockname()))
            for _ in range(20)
        ]
        assert HttpReward(server.address).score(request(VIDEOS[:1]), HANG)["print"].isfinite().all()
        wait_until(lambda: all(map(is_closed, idle[:8])))
        assert not any(map(is_closed, idle[9:]))


def test_many_clients_at_once_are_all_accepted(server: RewardServer) -> None:
    """As the ranks of several runs, which begin to score together."""
    client = HttpReward(server.address)
    with ThreadPoolExecutor(200) as clients:
        scores = clients.map(lambda n: client.score(request(VIDEOS[:1]), HANG), range(200))
        assert all(parts["print"].isfinite().all() for parts in scores)


def test_a_server_that_ends_says_so_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sage_fast.rewards.server.SECONDS_TO_END", 1)
    begun, gate = threading.Event(), threading.Event()

    def waits(videos: torch.Tensor, prompts: list[str]) -> dict[str, torch.Tensor]:
        begun.set()
        gate.wait(HANG)
        return {"print": torch.zeros(len(prompts))}

    with serving(CompositeReward(waits, config())) as server:  # type: ignore[arg-type]
        connection = http.client.HTTPConnection(*server.socket.getsockname(), timeout=HANG)
        body = reward_http.format_request(request(VIDEOS[:1]), "id")
        connection.request("POST", "/score", body, {"Content-Type": "application/json"})
        assert begun.wait(HANG)
        server.should_exit = True
        response = connection.getresponse()
        assert response.status == 503
        assert json.loads(response.read())["error"] == "the server ends"
        gate.set()


def test_only_who_has_the_token_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv(reward_http.TOKEN, "open sesame")
    with serving(CompositeReward(Fingerprint().score, config())) as server:  # type: ignore[arg-type]
        assert HttpReward(server.address).score(request(VIDEOS[:1]), HANG)["print"].isfinite().all()
        for token in ("open sesam", "open sesam\xe9", ""):
            monkeypatch.setenv(reward_http.TOKEN, token)
            with pytest.raises(
                RewardFailure, match="status 401: expected the token of this server"
            ):
                HttpReward(server.address).score(request(VIDEOS[:1]), HANG)
        monkeypatch.setenv(reward_http.TOKEN, "open\nsesame")
        with pytest.raises(RewardFailure, match="the token is no text that HTTP can send") as error:
            HttpReward(server.address).score(request(VIDEOS[:1]), HANG)
        assert "sesam" not in str(error.value)
    assert "refused a request of 127.0.0.1: expected the token" in caplog.text
    assert "sesam" not in caplog.text


def test_a_client_that_goes_away_costs_a_line(
    server: RewardServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.sendall(BEGUN + b"x")
    wait_until(lambda: caplog.messages)
    assert caplog.messages == ["refused a request of 127.0.0.1: client disconnected"]


# -- nothing is left -------------------------------------------------------------------------------


def test_the_process_ends_with_the_last_reference_to_its_reward() -> None:
    backend = Worker(config(), "reward.name", "cpu")
    caller = RewardCaller(config(), "reward.name", [backend], config(), None)
    assert caller.call(request(VIDEOS[:1])).result()["print"].shape == (1,)
    del caller
    assert backend._process.exitcode == 0, "it had the time to clean up"


def in_group(leader: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            found += [int(path.parent.name)] if int(group) == leader and state != "Z" else []
    return found


@pytest.mark.parametrize("how", ["hang", "fork"])
def test_no_process_outlives_its_owner(how: str, tmp_path: Path) -> None:
    """The parent is killed while its process, and what that has forked, hang in a call."""
    code = (
        "import sys; from tests.test_reward_workers import *\n"
        f"args = {{'folder': {str(tmp_path)!r}, 'plan': ['2 {how}']}}\n"
        "reward = CompositeReward.of(config(workers=1, args=args))\n"
        "print(reward(VIDEOS[:1], [PromptKey('a')]).dropped, flush=True); "
        "reward.submit(VIDEOS[:1], [PromptKey('b')]); "
        "input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "0\n"
    [child] = [int(path.name[4:]) for path in tmp_path.glob("0/pid-*")]
    wait_until(lambda: (tmp_path / "0" / "calls").stat().st_size == 2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: in_group(child) == [])


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_code_of_a_reward_has_started_ends_with_the_run(
    workers: int, tmp_path: Path
) -> None:
    """At the import, in a session of its own, and in a call."""
    (tmp_path / "starts.py").write_text(
        "import os, subprocess, torch\n"
        "def start(**options):\n"
        "    with open('pids', 'a') as file:\n"
        '        file.write(f\'{subprocess.Popen(["sleep", "1000"], **options).pid}\\n\')\n'
        "start(start_new_session=True)\n"
        "def score(videos, prompts):\n"
        "    start()\n"
        "    return {'a': torch.ones(len(prompts))}\n"
    )
    code = (
        "from sage_fast.config.schema import RewardConfig\n"
        "from sage_fast.rewards import CompositeReward\n"
        "from sage_fast.util.captions import PromptKey\n"
        "import torch\n"
        "if __name__ == '__main__':\n"
        f"    config = RewardConfig(name='starts:score', weights={{'a': 1.0}}, workers={workers})\n"
        "    reward = CompositeReward.of(config)\n"
        "    assert reward(torch.rand(1, 5, 3, 8, 8), [PromptKey('a')]).rewards.tolist() == [1]\n"
    )
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(int(pid))]


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
