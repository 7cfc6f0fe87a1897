"""Run parts one after the other, each within its time limit, and gather what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.gpu.install import REPOSITORY
from scripts.gpu.parts import Call, Part
from scripts.gpu.predictions import predicted

MAX_PACKED_BYTES = 16 * 2**20
TINY_SECONDS = 600
"""Time limit of a part on a CPU."""
LEAST_SECONDS = 15
"""Time left in a call below which no part starts."""
GRACE_SECONDS = 10
"""Time that a part has to end once its limit is over."""

OK, FAILED, TIMED_OUT, SKIPPED = "ok", "failed", "timed out", "skipped"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a part ended.

    Attributes:
        part: its name.
        status: one of `OK`, `FAILED`, `TIMED_OUT` and `SKIPPED`.
        seconds: how long it took.
    """

    part: str
    status: str
    seconds: int


class StatusFile:
    """How parts ended, over all calls with the same OUT: a line each, `part status seconds`."""

    def __init__(self, out: Path) -> None:
        self.file = out / "status.tsv"

    def add(self, verdict: Verdict) -> None:
        with self.file.open("a", encoding="utf-8") as opened:
            opened.write(f"{verdict.part}\t{verdict.status}\t{verdict.seconds}\n")

    def latest(self) -> dict[str, Verdict]:
        """Return part -> how it ended the last time."""
        found = {}
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                part, status, seconds = line.split("\t")
                found[part] = Verdict(part, status, int(seconds))
        return found


def run_parts(call: Call, parts: Sequence[Part], everything: Sequence[Part], seconds: float) -> int:
    """Run parts; print and pack the results of all calls with the same OUT.

    Args:
        call: what the commands depend on.
        parts: those to run.
        everything: those that the table lists.
        seconds: how long the call may take.

    Returns:
        The exit status: 1 if one of `parts` did not end well.
    """
    end = time.monotonic() + seconds
    status = StatusFile(call.out)
    for part in parts:
        left = end - time.monotonic()
        log = call.out / f"{part.name}.log"
        if left < LEAST_SECONDS:
            log.write_text("no time left in this call\n", encoding="utf-8")
            status.add(Verdict(part.name, SKIPPED, 0))
            continue
        limit = min(TINY_SECONDS if call.tiny else part.seconds, int(left))
        print(f"{part.name}, at most {limit} s: {log}", flush=True)
        status.add(run_part(call, part, limit, log))

    ended = status.latest()
    text = "\n".join(_table(call, everything, ended)) + "\n"
    print(text, end="")
    (call.out / "table.txt").write_text(text, encoding="utf-8")
    pack(call.out)
    return int(any(ended[part.name].status != OK for part in parts))


def run_part(call: Call, part: Part, limit: float, log: Path) -> Verdict:
    """Run a part. What it has started ends with it."""
    # an earlier run or profile is not overwritten
    for folder in (call.scratch / part.name, call.out / part.name):
        shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    with log.open("wb") as opened:
        process = subprocess.Popen(
            part.command(call),
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
            stdout=opened,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = OK if process.wait(limit) == 0 else FAILED
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
            _signal_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()
    return Verdict(part.name, status, round(time.monotonic() - start))


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and to all that it has started."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, number)


def _table(call: Call, parts: Sequence[Part], ended: dict[str, Verdict]) -> Iterator[str]:
    """Yield the lines of the table: how each part ended, then its predictions."""
    yield f"{'part':<19}{'verdict':<11}{'seconds':>8}  last line of its log"
    for part in parts:
        verdict = ended.get(part.name)
        if verdict is None:
            yield f"{part.name:<19}not run"
            continue
        last = _last_line(call.out / f"{part.name}.log")
        yield f"{part.name:<19}{verdict.status:<11}{verdict.seconds:>8}  {last[:120]}".rstrip()
    lines = list(predicted(parts, call.out, tiny=call.tiny))
    if lines:
        yield ""
        yield from lines


def _last_line(log: Path) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def pack(out: Path) -> None:
    """Pack all results into `results.tar.gz`, without the largest ones if they do not fit."""
    packed = out / "results.tar.gz"
    files = [file for file in out.rglob("*") if file.is_file() and file != packed]
    files.sort(key=lambda file: file.stat().st_size, reverse=True)
    while True:
        with tarfile.open(packed, "w:gz") as opened:
            for file in files:
                opened.add(file, str(file.relative_to(out)))
        if packed.stat().st_size < MAX_PACKED_BYTES or not files:
            return
        largest = files.pop(0).relative_to(out)
        room = MAX_PACKED_BYTES // 2**20
        print(f"left out of results.tar.gz, which has room for {room} MiB: {largest}")
