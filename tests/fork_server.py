"""A process that has imported everything once, and forks a `sage-fast` command for each line that
it reads.

Each line on standard input is JSON. {"arguments": [...], "log": file, "environment": {...},
"fault": null or the arguments of `Fault`} starts a child; the reply is its process id. {"wait":
process id} waits for a child; the reply is its exit status, negative for a signal. Reports are
written without their charts, which take longer than the runs.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a child.

    Args:
        name: part of the name of the file or folder that is written, saved (by safetensors) or
            renamed.
        at: `write` and `save` leave half of the file behind; `rename` strikes before the rename and
            `renamed` after it; `loss` makes the loss of a micro-batch NaN.
        nth: strike at the nth match, counted from 1.
        do: `kill` is kill -9, `full` the error of a full disk.
    """

    name: str
    at: str = "write"
    nth: int = 1
    do: str = "kill"


class ForkServer:
    """The client's side; use it in a `with` block."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.fork_server"], cwd=REPOSITORY, env=environment,
            text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)

    def start(
        self, arguments: Sequence[str], log: Path, fault: Fault | None = None, **environment: str
    ) -> int:
        """Start a command that writes its output to `log`; return its process id."""
        wanted = {
            "arguments": list(arguments),
            "log": str(log),
            "fault": None if fault is None else asdict(fault),
        }
        return self._ask(wanted | {"environment": environment})

    def wait(self, process: int) -> int:
        return self._ask({"wait": process})

    def _ask(self, question: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


# -- the server ------------------------------------------------------------------------------------


def serve() -> None:
    gc.disable()  # imports are a fifth faster without the collector
    import torch

    import sage_fast.callbacks.trackers
    import sage_fast.report.page
    import sage_fast.run.train
    import sage_fast.testbed.rewards
    import tests.tiny  # noqa: F401  imports the testbed's model, which a command imports late
    from sage_fast.cli import main

    torch.set_num_threads(1)
    sage_fast.report.page._charts = lambda data: []
    gc.freeze()  # otherwise each child copies the pages that the collector writes to
    gc.enable()
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _become(question, main)
        print(answer, flush=True)


def _become(question: dict[str, Any], main: Callable[[list[str]], int]) -> None:
    """Run the command in the child; never return."""
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # background jobs of a shell ignore SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= question["environment"]
    if question["fault"] is not None:
        prepare(Fault(**question["fault"]))
    status = 1
    try:
        status = main(question["arguments"])
    except SystemExit as ended:  # from argparse
        status = int(ended.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def prepare(fault: Fault) -> None:
    """Set up the fault in this process."""
    strikes = Strikes(fault)
    if fault.at == "write":
        _tear_writes(strikes)
    elif fault.at == "save":
        _tear_saves(strikes)
    elif fault.at == "loss":
        _spoil_loss(strikes)
    else:
        _interrupt_renames(strikes)


class Strikes:
    """When a fault strikes, and what it does then."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.seen = 0

    def happens(self, name: object) -> bool:
        """Count a name that matches; true for the nth."""
        if self.fault.name not in str(name):
            return False
        self.seen += 1
        return self.seen == self.fault.nth

    def strike(self) -> None:
        if self.fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Torn:
    """A file whose first write stops halfway."""

    def __init__(self, file: Any, strikes: Strikes) -> None:
        self.file = file
        self.strikes = strikes

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> None:
        # of metrics.jsonl the lines are counted, not how often it is opened
        if "metrics" in str(self.file.name) and not self.strikes.happens(self.file.name):
            return self.file.write(data)
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        self.strikes.strike()


def _tear_writes(strikes: Strikes) -> None:
    original = io.open

    def torn_open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        opened = original(file, mode, *arguments, **options)
        is_written = any(letter in mode for letter in "wxa")
        if not is_written or strikes.fault.name not in str(file):
            return opened
        torn = "metrics" in str(file) or strikes.happens(file)
        return Torn(opened, strikes) if torn else opened

    io.open = torn_open  # what pathlib calls


def _tear_saves(strikes: Strikes) -> None:
    import safetensors.torch

    save = safetensors.torch.save_file

    def saving(state: Any, file: Any, *arguments: Any, **options: Any) -> None:
        save(state, file, *arguments, **options)
        if strikes.happens(file):
            os.truncate(file, os.path.getsize(file) // 2)
            strikes.strike()

    safetensors.torch.save_file = saving


def _spoil_loss(strikes: Strikes) -> None:
    from sage_fast.trainer import Trainer

    loss_of = Trainer._loss

    def not_finite(self: Trainer, *arguments: Any) -> Any:
        loss, *norms = loss_of(self, *arguments)
        if strikes.happens("loss"):
            loss = replace(loss, total=loss.total * float("nan"))
        return loss, *norms

    Trainer._loss = not_finite


def _interrupt_renames(strikes: Strikes) -> None:
    rename = os.replace

    def renamed(source: Any, target: Any, **options: Any) -> None:
        if not strikes.happens(target):
            return rename(source, target, **options)
        if strikes.fault.at == "renamed":
            rename(source, target, **options)
        strikes.strike()

    os.replace = renamed


if __name__ == "__main__":
    serve()
