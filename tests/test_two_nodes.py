"""Two nodes on one machine: network namespaces with a cable between them, which is cut within an
iteration."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.numpy import load_file

from sage_fast.cli import main
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.run import fail_fast
from sage_fast.trainer import Trainer
from sage_fast.util.files import read_metrics
from tests.ranks import command_on_ranks, run_ranks, screens
from tests.test_docs import blocks
from tests.test_fail_fast import needs_deepspeed
from tests.tiny import FEW_STEPS, arguments
from tests.waits import HANG, wait_until

REPOSITORY = Path(__file__).parent.parent
ADDRESSES = ["10.231.7.1", "10.231.7.2"]
CABLE = "eth1"
LIMIT = 6
"""Seconds that a rank waits for the other: `timeout_minutes`."""
LOST = "failed: another rank is gone, hangs or cannot be reached: RuntimeError: "
TRAIN = [str(REPOSITORY / "configs" / "recipes" / "paper.yaml"), *FEW_STEPS, *arguments(
    train__iterations=3, train__prompts_per_iteration=2, train__group_size=2,
    train__optimizer_steps=1,
    train__checkpoint_interval=1, eval__num_prompts=2, eval__seeds_per_prompt=1, eval__num_videos=1,
    eval__interval=0,
    eval__judge="null", tracking__trackers="[]", timeout_minutes=LIMIT / 60,
)]  # fmt: skip
ENGINES = ["plain", "zero3", pytest.param("zero2", marks=needs_deepspeed)]
pytestmark = pytest.mark.soak


@dataclass
class Nodes:
    """Nodes with a network, a name and a file /etc/hosts of their own; a process of each keeps
    them."""

    processes: list[subprocess.Popen[str]]

    def on(self, node: int, *words: str) -> list[str]:
        """Return the command that runs `words` on a node."""
        return [
            "nsenter",
            "--target",
            str(self.processes[node].pid),
            "--net",
            "--uts",
            "--mount",
            *words,
        ]

    def cable(self, state: str) -> None:
        """Set the cable `up` or `down`, at the end of the second node."""
        subprocess.run(self.on(1, "ip", "link", "set", CABLE, state), check=True)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    hosts = tmp_path_factory.mktemp("nodes") / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{ip} node-{i}\n" for i, ip in enumerate(ADDRESSES))
    )
    begin = (
        f"mount --bind {shlex.quote(str(hosts))} /etc/hosts && ip link set lo up && hostname $0 && "
        "echo ready && cat"
    )
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", begin]
    try:
        found = Nodes(
            [subprocess.Popen([*command, f"node-{i}"], text=True, **pipes) for i in range(2)]
        )
    except FileNotFoundError as error:
        pytest.skip(f"needs {error.filename}")
    try:
        if [process.stdout.readline() for process in found.processes if process.stdout] != [
            "ready\n"
        ] * 2:
            pytest.skip("needs root, which may make network namespaces")
        first, second = (str(process.pid) for process in found.processes)
        veth = [
            "ip",
            "link",
            "add",
            CABLE,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            CABLE,
            "netns",
            second,
        ]
        subprocess.run(veth, check=True)
        for node, ip in enumerate(ADDRESSES):
            subprocess.run(
                found.on(node, "ip", "address", "add", f"{ip}/24", "dev", CABLE), check=True
            )
            subprocess.run(found.on(node, "ip", "link", "set", CABLE, "up"), check=True)
        yield found
    finally:
        for process in found.processes:
            process.communicate()  # `cat` ends, and with it the node


def train(folder: Path, holders: list[int], cut: bool, words: list[str]) -> None:
    """Train with a rank on each node; the cable is cut before the second of three updates if
    `cut`."""
    node = int(os.environ["RANK"])
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("uts", "net"):
        with open(f"/proc/{holders[node]}/ns/{kind}") as namespace:
            assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.environ |= {
        "MASTER_ADDR": ADDRESSES[0], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": CABLE,
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    update, calls = Trainer.update, list[int]()

    def updated(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if cut and node == 1 and len(calls) == 2:
            subprocess.run(["ip", "link", "set", CABLE, "down"], check=True)
        return update(*args, **options)

    with mock.patch.object(Trainer, "update", updated), mock.patch.object(fail_fast, "ANSWER", 3.0):
        sys.exit(main(["train", *TRAIN, "--output", str(folder / "cut"), *words]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.fault(
    "the network between two nodes is cut in an iteration",
    "both ends say so after `timeout_minutes`; resumed, it ends",
)
def test_a_cut_cable_ends_both_ends_and_a_resume_ends_like_one_node(
    engine: str, nodes: Nodes, tmp_path: Path
) -> None:
    """The weights are then, to the bit, those of two ranks on one node that nothing disturbs."""
    holders, words = [process.pid for process in nodes.processes], ["--train.engine", engine]
    try:
        assert run_ranks(train, 2, tmp_path, holders, True, words) == [1, 1], screens(tmp_path)
    finally:
        nodes.cable("up")
    for rank, screen in enumerate(screens(tmp_path)):
        assert screen.count(f"sage-fast: rank {rank} {LOST}") == 1, screen
        assert "Traceback" not in screen
    assert len(read_metrics(tmp_path / "cut" / "metrics.jsonl")) == 1
    assert run_ranks(train, 2, tmp_path, holders, False, [*words, "--resume"]) == [0, 0], screens(
        tmp_path
    )
    assert "resumed after 1 iteration" in screens(tmp_path)[0]
    command_on_ranks(["train", *TRAIN, "--output", "whole", *words], tmp_path, DS_ACCELERATOR="cpu")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def weights(run: Path) -> dict[str, bytes]:
    return {
        name: tensor.tobytes() for name, tensor in load_file(run / "weights" / LORA_FILE).items()
    }


@pytest.mark.fault(
    "the network between two nodes is cut under `torchrun --max-restarts`",
    "when it is back, torchrun goes on",
)
def test_torchrun_goes_on_when_the_cable_is_back(nodes: Nodes, tmp_path: Path) -> None:
    """The recipe of docs/how-to/many-gpus.md, with a rank on each node."""
    page = REPOSITORY / "docs" / "how-to" / "many-gpus.md"
    recipe = next(block.text for block in blocks(page) if "--nnodes" in block.text).replace(
        "\\\n", " "
    )
    own = {"8": "1", "$HEAD:29500": "node-0:29500", "runs/first": str(tmp_path / "run")}
    words = [own.get(word, word) for word in shlex.split(recipe)]
    words[words.index("--nnodes") + 1] = "2"
    at = words.index("config.yaml")
    words[at : at + 1] = [
        *TRAIN,
        "--train.iterations",
        "12",
        "--reward.name",
        "tests.test_survive:SlowReward",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    out = [tmp_path / f"node-{node}" for node in range(2)]
    logs = [tmp_path / f"screen-{node}" for node in range(2)]
    started = []
    for node in range(2):
        out[node].mkdir()
        with logs[node].open("w") as log:
            launch = nodes.on(node, sys.executable, "-m", "torch.distributed.run", *words[1:])
            started.append(
                subprocess.Popen(launch, cwd=out[node], env=environment, stdout=log, stderr=log)
            )

    def wait_for(text: str, *where: int) -> None:
        read = lambda: [logs[node].read_text() for node in where]  # noqa: E731
        wait_until(lambda: all(text in screen for screen in read()), read)

    try:
        wait_for(" 3/12 ", 0)
        nodes.cable("down")
        wait_for(LOST, 0, 1)
        nodes.cable("up")
        assert [process.wait(HANG) for process in started] == [0, 0], [
            log.read_text() for log in logs
        ]
    finally:
        nodes.cable("up")
        for process in started:
            process.kill()
            process.wait()
    assert "yet: it begins" in logs[0].read_text()
    assert "resumed after " in logs[0].read_text()
    assert [row["iteration"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(
        range(12)
    )
