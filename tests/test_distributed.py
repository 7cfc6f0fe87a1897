"""Several ranks: torchrun with gloo here, what NCCL is told in words."""

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sage_fast.config import Config
from sage_fast.distributed import initialize

REPOSITORY = Path(__file__).parent.parent


def start_two_ranks(code: str, folder: Path, ranks: int = 2) -> "subprocess.CompletedProcess[str]":
    """Run `code` on so many gloo ranks, with `folder` as its argument."""
    (folder / "ranks.py").write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, str(folder / "ranks.py"), str(folder)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


ENCODE = """
import json, sys
from pathlib import Path
from sage_fast.distributed import all_gather_object, initialize, shutdown
from sage_fast.run.setup import load_setup
from sage_fast.settings import load

initialize()
folder = Path(sys.argv[1])
for cache in (folder / "cache", None):
    setup = load_setup(load("configs/demo.yaml"))
    load_encoder, encoded = setup.model.load_encoder, []

    def recording():
        encode = load_encoder()
        return lambda prompt: (encoded.append(prompt), encode(prompt))[1]

    setup.model.load_encoder = recording
    setup.encode(cache, quiet=False)
    rows = all_gather_object({"encoded": encoded, "known": sorted(setup.embeddings)})
    name = "temporary" if cache is None else "cache"
    (folder / f"{name}.json").write_text(json.dumps(rows))
    again = load_setup(load("configs/demo.yaml"))
    again.model.load_encoder = None  # all is there
    if cache is not None:
        again.encode(cache, quiet=True)
shutdown()
"""


def test_each_rank_encodes_its_share_of_the_prompts(tmp_path: Path) -> None:
    done = start_two_ranks(ENCODE, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("cache", "temporary"):
        first, second = json.loads((tmp_path / f"{name}.json").read_text())
        assert first["known"] == second["known"] == sorted(first["encoded"] + second["encoded"])
        assert abs(len(first["encoded"]) - len(second["encoded"])) <= 1
        assert len(first["encoded"]) > 10
    assert len(list((tmp_path / "cache").iterdir())) == len(first["known"])


WAIT = """
import time
from sage_fast.distributed import barrier, initialize, rank
initialize(timeout_minutes=2 / 60)
barrier()
time.sleep(8 * rank())
barrier()
"""


def test_the_timeout_is_that_of_every_collective(tmp_path: Path) -> None:
    """Rank 0 waits 2 s for rank 1, which is away for 8; with the default of minutes it would wait."""
    done = start_two_ranks(WAIT, tmp_path)
    assert done.returncode != 0
    assert "Timed out waiting 2000ms" in done.stderr
    start = time.monotonic()
    patient = start_two_ranks(WAIT.replace("2 / 60", "1"), tmp_path)
    assert patient.returncode == 0, patient.stderr[-3000:]
    assert time.monotonic() - start > 8


def test_nccl_is_told_its_device_and_the_timeout_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: told.update(options, backend=backend))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert initialize(Config().timeout_minutes) == torch.device("cuda", 1)
    assert told == {"backend": "nccl", "timeout": timedelta(minutes=60), "device_id": torch.device("cuda", 1)}
