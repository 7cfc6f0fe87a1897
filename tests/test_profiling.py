"""Ranges for profilers, and the command that profiles one iteration."""

import builtins
import sys
import threading
from typing import Any

import pytest
import torch

from sage_fast import profiling
from sage_fast.metrics import Stopwatch
from sage_fast.profiling import annotate, ranges
from tests.tiny import settings, tiny_trainer


class RecordingDomain:
    """Stands in for an NVTX domain: the stack of names at every push."""

    def __init__(self) -> None:
        self.stacks: dict[int, list[str]] = {}
        self.pushed: list[tuple[str, ...]] = []

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, attributes: str) -> None:
        stack = self.stacks.setdefault(threading.get_ident(), [])
        stack.append(attributes)
        self.pushed.append(tuple(stack))

    def pop_range(self) -> None:
        self.stacks[threading.get_ident()].pop()


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> RecordingDomain:
    nvtx = pytest.importorskip("nvtx")
    recording, asked = RecordingDomain(), []
    monkeypatch.setattr(nvtx, "get_domain", lambda name: asked.append(name) or recording)
    monkeypatch.setattr(recording, "asked", asked, raising=False)
    return recording


def test_ranges_of_an_iteration(domain: RecordingDomain) -> None:
    config = settings(kl__strategy="fixed", sampling__batch_size=4)  # 6 samples: two batches
    trainer = tiny_trainer(config)
    trainer.iteration(0)
    with ranges("nvtx"):
        trainer.iteration(1)
    assert domain.asked == ["sage_fast"]
    steps = [
        [("rollout", f"step {k}"), ("rollout", f"step {k}", "transformer"), ("rollout", f"step {k}", "transition")]
        for k in range(config.sampling.steps)
    ]
    assert domain.pushed == [
        ("rollout",),
        *[path for _ in range(2) for step in steps for path in step],
        *[("decode",), ("reward",), ("anchor",), ("train",), ("train", "optimizer")],
    ]
    assert not any(domain.stacks.values())


def test_off_means_nothing(domain: RecordingDomain, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []
    real_import = builtins.__import__

    def importing(name: str, *arguments: Any) -> Any:
        imported.append(name)
        return real_import(name, *arguments)

    trainer = tiny_trainer(settings())
    monkeypatch.delitem(sys.modules, "nvtx")
    monkeypatch.setattr(builtins, "__import__", importing)
    monkeypatch.setattr(torch.profiler, "record_function", None)
    trainer.iteration(0)
    assert "nvtx" not in sys.modules
    assert "nvtx" not in imported
    assert domain.pushed == []
    assert annotate("step", 3) is annotate("rollout")  # one shared null context, and no name is made


def test_ranges_close_on_an_error_and_stay_on_their_thread(domain: RecordingDomain) -> None:
    def other() -> None:
        with annotate("elsewhere"):
            pass

    watch = Stopwatch(torch.device("cpu"))
    with ranges("nvtx"), pytest.raises(OSError, match="away"), watch("reward"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        raise OSError("went away")
    assert domain.pushed == [("reward",), ("elsewhere",)]
    assert not any(domain.stacks.values())


def test_switches_nest_without_doubling(domain: RecordingDomain) -> None:
    with ranges("nvtx"), torch.profiler.profile() as profiler:
        with ranges("nvtx", "torch"), annotate("both"):
            pass
        with annotate("nvtx alone"):
            pass
    assert domain.pushed == [("both",), ("nvtx alone",)]
    assert [event.name for event in profiler.events() if event.is_user_annotation] == ["both"]
    assert profiling._tools == {}
