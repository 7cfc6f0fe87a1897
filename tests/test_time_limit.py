"""Time limits that do not count the time in which a run was suspended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_fast.util import time_limit
from sage_fast.util.time_limit import LOOK_S, TimeLimit

REPOSITORY = Path(__file__).parent.parent


def test_a_suspended_hour_counts_as_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now[0])
    limit = TimeLimit(3)
    assert limit.next_look == LOOK_S
    now[0] = 3600
    assert not limit.is_over()
    for _ in range(3):
        now[0] += LOOK_S
        assert not limit.is_over()
    now[0] += LOOK_S
    assert limit.is_over()
    assert limit.next_look == 0


def test_no_limit_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now[0])
    limit = TimeLimit(0)
    now[0] = 1e9
    assert not limit.is_over()
    assert limit.next_look == LOOK_S


SLOW = """
import asyncio, pathlib, sys, time
import torch
from sage_fast.rewards.http import _limited
from sage_fast.rewards.worker import Worker
from sage_fast.callbacks.trackers import _Thread

def slow(*_):
    print("begun", flush=True)
    for _ in range(10):
        time.sleep(0.2)
    return {"a": torch.zeros(1)}

async def wait():
    async with _limited(6):
        print("begun", flush=True)
        for _ in range(10):
            await asyncio.sleep(0.2)

if sys.argv[1] == "worker":
    killed = []
    # without its process, whose start may take as long as the limit
    worker = Worker.__new__(Worker)
    worker._kill = lambda: killed.append(True)
    with worker._ended_after(6, "late"):
        slow()
    assert not killed
elif sys.argv[1] == "http":
    asyncio.run(wait())
else:
    assert _Thread().call(slow, seconds=6).done()
"""


@pytest.mark.fault(
    "a run is suspended for longer than a reward may take (SIGSTOP, SIGCONT)", "it goes on"
)
def test_waits_go_on_after_the_process_was_suspended() -> None:
    """Two seconds of work under a limit of six, with seven in which nothing runs."""
    waits = ("worker", "http", "tracker")
    processes = [
        subprocess.Popen([sys.executable, "-c", SLOW, what], cwd=REPOSITORY, stdout=subprocess.PIPE)
        for what in waits
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(7)
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)
    assert [process.wait(600) for process in processes] == [0, 0, 0]
