"""What each rank was doing when a rank failed: its Python stacks, and its last collectives.

<folder>/hangs/<time of the start>/stacks-3.txt   stacks of all threads of rank 3, and the
                                                  collective that it waits in
<folder>/hangs/<time of the start>/collectives-3  its last collectives, as PyTorch's flight recorder
                                                  writes them; `torchfrtrace` reads NCCL's

A file is written only if a rank fails. With NCCL, a collective that times out ends the process by
PyTorch's own watchdog, which writes `collectives-3`; the stacks are then in the rank's log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from sage_fast.util.files import HANGS
from sage_fast.util.ranks import rank

STACKS = "stacks-"
COLLECTIVES = "collectives-"
"""Prefix of the files of the flight recorder; `torchfrtrace` takes what follows for the rank."""
DUMP_TIMEOUT_S = 20.0
"""Seconds after which a rank that cannot write its dump ends without it."""
TORCH = str(Path(torch.__file__).parent)
WRAPPERS = str(Path("sage_fast", "util", "ranks.py"))


class HangDump:
    """The dump of this rank.

    Attributes:
        folder: where all ranks write theirs.
    """

    def __init__(self, folder: Path, started: str) -> None:
        """
        Args:
            folder: the folder of the run, or of what another command writes.
            started: the time of the start, the same on all ranks.
        """
        self.folder = folder.absolute() / HANGS / started

    @contextlib.contextmanager
    def for_watchdog(self) -> Iterator[None]:
        """Make the folder, and let NCCL's watchdog dump into it. It does not make folders itself.

        A folder that stayed empty is removed after the block.
        """
        variables = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        is_set = any(os.environ.get(name) for name in variables)
        if dist.get_backend() != "nccl" or is_set:
            yield
            return

        with contextlib.suppress(OSError):  # a run does not need it
            self.folder.mkdir(parents=True, exist_ok=True)
        # The watchdog reads it at its first dump.
        os.environ[variables[0]] = str(self.folder / COLLECTIVES)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # another rank has removed it, or it is not empty
                self.folder.rmdir()
                self.folder.parent.rmdir()

    def write(self, why: str, error: BaseException | None = None) -> str:
        """Write this rank's files. The process ends soon after this call, even if it hangs.

        Args:
            why: first line of the stacks.
            error: the error of this rank; its traceback comes first.

        Returns:
            What this rank was waiting for; "" if the flight recorder does not say.

        Raises:
            OSError: a file cannot be written.
        """
        with _ends_by_itself():
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"{STACKS}{rank()}.txt").open("w", encoding="utf-8") as file:
                _write_stacks(file, why, error)
                # NCCL's recorder asks the GPU for the state of each collective, so it comes last.
                trace = _flight_record()
                if not trace:
                    return ""
                (self.folder / f"{COLLECTIVES}{rank()}").write_bytes(trace)
                waited_for = what_waits(pickle.loads(trace))
                print(f"\nwaits in {waited_for}", file=file)
        return waited_for


def _write_stacks(file: TextIO, why: str, error: BaseException | None) -> None:
    """Write the traceback of an error, and the stacks of all threads."""
    print(f"rank {rank()} on {socket.gethostname()}, process {os.getpid()}", file=file)
    print(why, file=file)
    if error is not None:
        print(file=file)
        traceback.print_exception(error, file=file)
    print("\nthreads:", file=file)
    for thread in threading.enumerate():
        print(f"0x{thread.ident or 0:016x} {thread.name}", file=file)
    print(file=file, flush=True)  # the next call writes past Python's buffer
    faulthandler.dump_traceback(file, all_threads=True)


@contextlib.contextmanager
def _ends_by_itself() -> Iterator[None]:
    """End the process if the block takes longer than `DUMP_TIMEOUT_S`: a disk or a GPU may not
    answer, and a call into the driver may hold Python's lock."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # it is closed
            faulthandler.dump_traceback_later(DUMP_TIMEOUT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def _flight_record() -> bytes:
    """Return what the flight recorder of the backend holds, pickled; empty if there is none."""
    name = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
    dump = getattr(c10d, name, None)  # not in every build and version
    return bytes(dump()) if dump is not None else b""


def what_waits(record: Mapping[str, Any]) -> str:
    """Return the oldest collective of a flight record that has not ended, or else the newest.

    After a timeout, gloo counts the collective as ended.
    """
    entries = record.get("entries", [])
    if not entries:
        return ""
    pending = [entry for entry in entries if not entry.get("retired")]
    entry = pending[0] if pending else entries[-1]

    call, place = _called_at(entry.get("frames", []))
    operation = entry["profiling_name"]
    group = entry["process_group"][1] or entry["process_group"][0]
    sizes = ", ".join(str(size) for size in entry["input_sizes"][:3])
    number = entry["collective_seq_id"]
    details = f"{operation} of {sizes}, collective {number} of group {group}"
    return f"{call or operation}{place} ({details})"


def _called_at(frames: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the function of torch.distributed that was called, and where it was called.

    Args:
        frames: of a collective, innermost first.
    """
    call = ""
    for frame in frames:
        if frame["filename"].startswith(TORCH):
            if frame["name"] != "wrapper":
                call = frame["name"]
        elif not frame["filename"].endswith(WRAPPERS):
            return call, f", called in {frame['name']}, {frame['filename']}:{frame['line']}"
    return call, ""
