"""Columns that callbacks add to the row of an iteration, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sage_fast.callbacks.interface import Histogram
from sage_fast.util.errors import in_one_line

BINS = 32
"""Bins of a histogram in `metrics.jsonl`."""


def make_plain(row: dict[str, Any], of_the_run: Mapping[str, Any]) -> str | None:
    """Turn the columns that a callback has added into plain numbers; return what is wrong, if
    anything is.

    A column that is wrong is taken out of the row, and one of the run's put back.
    """
    problem = None
    for name, value in of_the_run.items():
        if name not in row or row[name] is not value:
            row[name] = value
            problem = f"{name!r} is a column of the run's: expected another name"

    for name in [name for name in row if name not in of_the_run]:
        value = row[name]
        if not isinstance(name, str):
            del row[name]
            problem = f"{name!r}: expected a text as the name of a column"
            continue
        try:
            row[name] = _plain(value)
        except (TypeError, ValueError, RuntimeError) as error:
            del row[name]
            why = f" ({in_one_line(error)})" if isinstance(value, Histogram) else ""
            problem = (
                f"column {name!r} = {value!r:.60}: expected a number, a list of numbers or a "
                f"Histogram of them{why}"
            )
    return problem


def _plain(value: Any) -> Any:
    """Return a number, a list of numbers, or a histogram of finite float64 values `[N]`.

    Raises:
        TypeError, ValueError, RuntimeError: it is none of these.
    """
    if isinstance(value, Histogram):
        return Histogram(_finite_values(value.values))
    # a tensor or an array, also of one number
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return value
    raise TypeError("no number")


def _finite_values(values: Any) -> np.ndarray:
    """Return the finite ones of some numbers of any shape, float64 `[N]`."""
    if isinstance(values, Tensor):
        if values.is_complex():
            raise TypeError("complex numbers")
        values = values.detach().double().cpu().numpy()
    elif isinstance(values, list | tuple):
        values = [item.tolist() if hasattr(item, "tolist") else item for item in values]
    numbers = np.asarray(values, dtype=np.float64).flatten()
    return numbers[np.isfinite(numbers)]


def counts_and_edges(values: np.ndarray) -> tuple[list[int], list[float]]:
    """Count finite values `[N]` in `BINS` bins of equal width.

    One bin holds all where float64 has no edges between them: they are too near each other for
    their size, or too far apart.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            counts, edges = np.histogram(values, bins=BINS)
    except ValueError:
        return [len(values)], [float(values.min()), float(values.max())]
    return counts.tolist(), edges.tolist()
