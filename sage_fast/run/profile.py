"""A profile of some iterations of a run: each rank's trace and, on a GPU, a snapshot of its memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from sage_fast.util.profiling import annotate, ranges
from sage_fast.util.ranks import rank

log = logging.getLogger(__name__)


class RunProfile:
    """Profiles the iterations of `profiling.iterations` and writes `rank-NNN.json.gz` (trace) and `.pickle` (memory).

    Args:
        iterations: first and last one, counted from 1; empty: none.
        folder: created when the last one has ended.
    """

    def __init__(self, iterations: Sequence[int], folder: Path) -> None:
        self._window = range(iterations[0] - 1, iterations[1]) if iterations else range(0)
        self._folder = folder
        self._open: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def over(self, index: int) -> Iterator[None]:
        """Profile the block if iteration `index`, counted from 0, is one of them. An error ends the profile."""
        if index not in self._window:
            yield
            return
        if self._open is None:
            self._start()
        assert self._open is not None
        try:
            with annotate("iteration", index):
                yield
        except BaseException:
            self._open.close()
            raise
        if index + 1 == self._window.stop:
            self._write()

    def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ranges("torch"))
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history()
                stack.callback(torch.cuda.memory._record_memory_history, None)
            self._profiler = stack.enter_context(torch.profiler.profile())
            self._open = stack.pop_all()

    def _write(self) -> None:
        assert self._open is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank-{rank():03d}"
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{file}.pickle")
        self._open.close()
        self._profiler.export_chrome_trace(f"{file}.json.gz")
        log.info(f"profile: {file}.json.gz, for perfetto.dev")
