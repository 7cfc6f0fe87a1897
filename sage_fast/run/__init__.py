"""One run: the loop, its checkpoints and resumes, signals, and the lock on its folder."""

import importlib.util
from pathlib import Path
from typing import Any

from sage_fast.run_folder import RunFolder


def read_metrics(folder: str | Path) -> Any:
    """Read `metrics.jsonl` of a run, finished or not, as columns.

    Returns:
        Metric -> one value per iteration: float64 `[iterations]`, NaN for null and where a row
        lacks it; a list where values are no numbers. It is a dict, or a `pandas.DataFrame` where
        pandas is installed.

    Raises:
        UserError: the folder holds no run, or a line is damaged.
    """
    import numpy as np

    run = RunFolder(folder)
    run.check()
    names = dict.fromkeys(name for row in run.rows for name in row)
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in run.rows]
        if all(isinstance(value, int | float | None) for value in values):
            columns[name] = np.array(values, dtype=np.float64)
        else:
            columns[name] = values

    if importlib.util.find_spec("pandas") is None:
        return columns
    return importlib.import_module("pandas").DataFrame(columns)
