"""Profile chosen iterations while a run trains.

    <run>/profiles/iteration-000002/rank-000.json.gz         trace, for ui.perfetto.dev
    <run>/profiles/iteration-000002/rank-000-memory.pickle   snapshot, for pytorch.org/memory_viz
    <run>/profiles/iteration-000002/rates.txt                TFLOP/s and GB/s of rank 0, as logged

`sage-fast profile` measures one iteration of a configuration apart from any run, and prints more
tables.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sage_fast.algorithm.rates import format_rates, rate_table
from sage_fast.callbacks.interface import Callback
from sage_fast.config.schema import ProfileConfig
from sage_fast.util.console import wrapped
from sage_fast.util.environment import synchronize
from sage_fast.util.errors import UserError, reason
from sage_fast.util.files import atomic_path
from sage_fast.util.profiling import annotate, ranges
from sage_fast.util.ranks import rank

if TYPE_CHECKING:
    from sage_fast.run.train import Run

log = logging.getLogger(__name__)

SNAPSHOT_EVENTS = 1_000_000
"""Most allocations and frees in a memory snapshot; older ones are left out."""

RATES = "rates.txt"
"""File of rank 0's table of rates."""


class Profiler(Callback):
    """Writes a trace of chosen iterations, and on request a memory snapshot, for each rank.

    Rank 0 logs a table of the TFLOP/s of attention and matmuls and the GB/s of our operators, and
    keeps it beside the traces. The trace holds the phases and steps of an iteration as named ranges
    (docs/how-to/profile.md). A file that cannot be written is a note, and the run goes on.

    Args:
        iterations: iterations to profile, as the screen counts them, from 1.
        memory: also record allocations: in the trace and, on a GPU, as a snapshot of the caching
            allocator with the stack of each allocation.

    Raises:
        UserError: an iteration is not a whole number of at least 1.
    """

    def __init__(self, *, iterations: Sequence[int], memory: bool = False) -> None:
        settings = ProfileConfig(iterations=list(iterations), memory=memory)
        self.iterations = frozenset(settings.iterations)
        self.memory = settings.memory
        self._profiler: Any = None  # torch.profiler.profile, while an iteration is profiled
        self._records_memory = False
        self._ranges = contextlib.ExitStack()

    def on_run_start(self, run: Run) -> None:
        planned = run.config.train.iterations
        beyond = sorted(number for number in self.iterations if number > planned)
        if beyond:
            raise UserError(
                f"Profiler: iterations = {beyond}: expected at most train.iterations = {planned}"
            )

    def on_iteration_start(self, run: Run, iteration: int) -> None:
        if iteration + 1 not in self.iterations:
            return

        device = run.trainer.device
        if self.memory and device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
            self._records_memory = True
        self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=self.memory)
        synchronize(device)  # what earlier iterations have left is not part of this one
        self._profiler.start()
        self._ranges.enter_context(ranges("torch"))
        self._ranges.enter_context(annotate("iteration", iteration + 1))

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        if self._profiler is None:
            return

        profiler = self._profiler
        synchronize(run.trainer.device)
        number = row["iteration"] + 1
        folder = Path(run.folder) / "profiles" / f"iteration-{number:06d}"
        snapshot = folder / f"rank-{rank():03d}-memory.pickle"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._records_memory:
                with atomic_path(snapshot) as partial:
                    torch.cuda.memory._dump_snapshot(str(partial))
            self._stop()
            write_trace(profiler, folder / f"rank-{rank():03d}.json.gz")
            if rank() == 0:
                _tell_rates(profiler, folder, on_gpu=run.trainer.device.type == "cuda")
        except OSError as error:  # a profile is only looked at: the run is worth more
            log.warning(wrapped(f"note: no profile of iteration {number}: {reason(error)}"))
        else:
            log.info(wrapped(f"profile of iteration {number}: {folder}"))
        finally:
            self._stop()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        """Stop whatever records; what has been recorded since is the profiler's until it goes."""
        self._ranges.close()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._records_memory:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records_memory = False


def _tell_rates(profiler: Any, folder: Path, *, on_gpu: bool) -> None:
    """Log the table of rates of a stopped profiler, and write it into the folder.

    Raises:
        OSError: the file cannot be written; the table has been logged.
    """
    lines = format_rates(rate_table(profiler.events(), on_gpu=on_gpu), on_gpu=on_gpu)
    for line in lines:
        log.info(line)
    with atomic_path(folder / RATES) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_trace(profiler: Any, file: Path) -> None:
    """Write the trace of a stopped profiler, compressed.

    Args:
        file: `.json.gz`; replaced if it exists.

    Raises:
        OSError: the file cannot be written; no part of it is left.
    """
    # torch.profiler chooses compression by the suffix, which an unfinished file does not have.
    with tempfile.NamedTemporaryFile(suffix=".json") as plain:
        profiler.export_chrome_trace(plain.name)
        with (
            atomic_path(file) as partial,
            open(plain.name, "rb") as trace,
            gzip.open(partial, "wb") as packed,
        ):
            shutil.copyfileobj(trace, packed)
