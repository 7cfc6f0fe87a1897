"""Several ranks: torchrun runs them with gloo; NCCL is not run, only its arguments are checked."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sage_fast.config.schema import Config
from sage_fast.util.files import read_metrics
from sage_fast.util.process_group import _name_start, initialize
from tests.tiny import FEW_STEPS, BrightnessReward, arguments

REPOSITORY = Path(__file__).parent.parent


def torchrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command on two gloo ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={port}",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [*command, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_nccl_is_told_its_device_and_the_timeout_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **options: given.update(options, backend=backend),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert initialize(Config().timeout_minutes) == torch.device("cuda", 1)
    assert given == {
        "backend": "nccl",
        "timeout": timedelta(minutes=60),
        "device_id": torch.device("cuda", 1),
    }


@pytest.mark.parametrize("missing", [0, 2], ids=["rank 0 ended early", "rank 2 ended early"])
def test_ranks_agree_on_a_new_name_whatever_an_earlier_start_left(missing: int) -> None:
    """In the second of three starts one of three ranks is missing, and others wait for it until
    they are ended."""
    store, seconds = dist.HashStore(), 0.3
    store.set_timeout(timedelta(seconds=seconds))
    ranks = set(range(3))

    def start(present: set[int]) -> set[str]:
        with ThreadPoolExecutor(3) as pool:
            named = [
                pool.submit(_name_start, store, rank, 3, timedelta(seconds=seconds))
                for rank in present
            ]
        return {future.result() for future in named if future.exception() is None}

    (first,) = start(ranks)
    between = start(ranks - {missing})
    (last,) = start(ranks)
    assert last not in {first} | between


class HangsOnce(BrightnessReward):
    """Hangs on the second rank in the second iteration, but not after torchrun has restarted the
    ranks."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, videos: torch.Tensor, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        self.calls += 1
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], self.calls) == (
            "1",
            "0",
            3,
        ):
            # after the check and the first iteration; the first rank scores the only evaluation
            # video
            time.sleep(60)
        return super().__call__(videos, prompts)


@pytest.mark.soak
@pytest.mark.fault(
    "a reward hangs on one of two ranks under `torchrun --max-restarts`",
    "the others end after `timeout_minutes`; torchrun restarts all, and they resume",
)
@pytest.mark.fault("fewer evaluation videos than ranks", "evaluated as usual")
def test_a_reward_that_hangs_on_one_rank_ends_the_ranks_and_torchrun_goes_on(
    tmp_path: Path,
) -> None:
    """Two ranks evaluate one video. The run stops in time; restarted, it resumes."""
    run, reward = tmp_path / "run", f"{__name__}:HangsOnce"
    train = [
        "-m",
        "sage_fast",
        "train",
        "configs/recipes/paper.yaml",
        "--output",
        str(run),
        "--resume",
        *FEW_STEPS,
    ]
    options = arguments(
        train__iterations=3, train__prompts_per_iteration=2, train__group_size=2,
        train__checkpoint_interval=1,
        eval__num_prompts=1, eval__seeds_per_prompt=1, eval__num_videos=1, reward__name=reward,
        timeout_minutes=0.1,
    )  # fmt: skip
    done = torchrun("--max-restarts=1", *train, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"no run in {run} yet: it begins" in done.stdout
    assert "resumed after 1 iteration" in done.stdout
    assert [row["iteration"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert [
        start["iteration"] for start in json.loads((run / "run.json").read_text())["resumed"]
    ] == [1]
    for name in ("before", "after"):
        scores = json.loads((run / "eval" / f"{name}.json").read_text())
        assert len(scores["reward"]) == 1
        assert {"vq", "mq", "ta"} < scores["parts"].keys()  # plus the judge's parts
        assert all(len(values) == 1 for values in scores["parts"].values())
    assert (run / "report.html").is_file()
