"""Train on all GPUs of a machine, and do something with the run:
`python -m scripts.gpu.several KIND --gpus N --folder FOLDER --json FILE CONFIG [SETTING VALUE]...`.

    train         two iterations
    no-prefetch   the same without FSDP's prefetch
    resume        stop after one iteration, and continue from its checkpoint
    killed        kill a rank after the second iteration: the others must end, and a resume go on
    hybrid        two groups of half the GPUs each, as two nodes

The rows of the run's metrics are written as JSON.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from sage_fast.ops import implementation
from sage_fast.util.environment import environment
from sage_fast.util.files import read_metrics, write_json
from sage_fast.util.ranks import local_device

PORT, PORT_OF_NODES = 29511, 29512
RESUMED = "resumed after"
"""How the line begins that a run says once it has found its checkpoint."""


class SeveralGpus:
    """Starts runs on the GPUs of this machine.

    Args:
        gpus: their number.
        folder: of the run.
        arguments: configuration and settings.
    """

    def __init__(self, gpus: int, folder: Path, arguments: Sequence[str]) -> None:
        self.gpus = gpus
        self.folder = folder
        self.arguments = list(arguments)
        self.metrics = folder / "metrics.jsonl"

    def torchrun(self, *options: str, ranks: int | None = None) -> list[str]:
        words = ["-m", "torch.distributed.run", *options]
        return [sys.executable, *words, "--nproc-per-node", str(ranks or self.gpus)]

    def training(self, *settings: str, module: str = "sage_fast") -> list[str]:
        """Return the command that trains on all GPUs."""
        launcher = self.torchrun("--nnodes", "1", "--master-port", str(PORT))
        run = ["train", *self.arguments, "--output", str(self.folder), *settings]
        return [*launcher, "-m", module, *run]

    def train(self) -> None:
        subprocess.run(self.training(), check=True)

    def no_prefetch(self) -> None:
        subprocess.run(self.training(module="scripts.gpu.no_prefetch"), check=True)

    def resume(self) -> None:
        subprocess.run(self.training("--train.iterations", "1"), check=True)
        self._continue(2)
        rows = len(read_metrics(self.metrics))
        if rows != 2:
            sys.exit(f"{rows} rows of metrics after a resume, expected 2")
        print("resumed after one of two iterations")

    def killed(self) -> None:
        job = subprocess.Popen(self.training("--train.iterations", "50"))
        while self._rows() < 2:
            if job.poll() is not None:
                sys.exit("the run ended before its second iteration")
            time.sleep(1)
        ranks = psutil.Process(job.pid).children()
        ranks[-1].send_signal(signal.SIGKILL)
        if job.wait() == 0:
            sys.exit("the run ended well without one of its ranks")
        self._continue(self._rows() + 1)
        print("resumed after a killed rank")

    def hybrid(self) -> None:
        half = self.gpus // 2
        nodes = []
        for node in range(2):
            visible = ",".join(str(gpu) for gpu in range(node * half, (node + 1) * half))
            options = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1"]
            options += ["--master-port", str(PORT_OF_NODES)]
            run = ["-m", "sage_fast", "train", *self.arguments, "--output", str(self.folder)]
            command = [*self.torchrun(*options, ranks=half), *run]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
            nodes.append(subprocess.Popen(command, env=environment))
        statuses = [node.wait() for node in nodes]
        if any(statuses):
            sys.exit("a node failed")

    def _rows(self) -> int:
        return len(read_metrics(self.metrics)) if self.metrics.exists() else 0

    def _continue(self, iterations: int) -> None:
        """Continue the run up to an iteration.

        Raises:
            SystemExit: it finds no checkpoint and begins anew, or fails.
        """
        launcher = self.torchrun("--nnodes", "1", "--master-port", str(PORT))
        run = ["-m", "sage_fast", "train", str(self.folder), "--resume"]
        command = [*launcher, *run, "--train.iterations", str(iterations)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        print(done.stdout, flush=True)
        if done.returncode or f"\n{RESUMED}" not in f"\n{done.stdout}":
            sys.exit(f"the run did not go on: exit status {done.returncode}")


KINDS: dict[str, Callable[[SeveralGpus], None]] = {
    "train": SeveralGpus.train,
    "no-prefetch": SeveralGpus.no_prefetch,
    "resume": SeveralGpus.resume,
    "killed": SeveralGpus.killed,
    "hybrid": SeveralGpus.hybrid,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options, arguments = parser.parse_known_args()
    run = SeveralGpus(options.gpus, options.folder, arguments)
    KINDS[options.kind](run)
    rows = read_metrics(run.metrics)
    device = local_device()
    facts = environment(device, implementation(device))
    result = {"environment": facts, "ranks": options.gpus, "metrics": rows}
    write_json(result | {"kind": options.kind, "arguments": arguments}, options.json)
    print(f"iteration {rows[-1]['iteration'] + 1}: {rows[-1]['time/total']:.2f} s")


if __name__ == "__main__":
    main()
