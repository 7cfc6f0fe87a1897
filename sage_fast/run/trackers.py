"""The metrics of a run on disk, and in the trackers that its user chose."""

from __future__ import annotations

import json
import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class MetricsWriter:
    """`metrics.jsonl` and TensorBoard events of a run.

    Args:
        folder: the run.
        iteration: the next iteration; rows from there on (of a run that is resumed) are dropped.
    """

    def __init__(self, folder: Path, iteration: int = 0) -> None:
        path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(path) if json.loads(line)["iteration"] < iteration]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration or None)

    def write(self, row: dict[str, object]) -> None:
        """Append one iteration; numbers that are not finite are written as null."""
        self._file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
        self._file.flush()
        for key, value in row.items():
            if isinstance(value, int | float) and key != "iteration":
                self._events.add_scalar(key, value, int(str(row["iteration"])))

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_lines(path: Path) -> list[str]:
    """Complete lines of a JSONL file; a last line cut off by a kill is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
