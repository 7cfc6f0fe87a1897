"""Metrics of a run as columns: `sage_fast.run.read_metrics`."""

import importlib.machinery
import importlib.util
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sage_fast.run import read_metrics
from sage_fast.util.errors import UserError


def a_run(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("{}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ROWS = (
    {"iteration": 0, "loss": 0.5, "velocity_grad_norm": [1.0, None], "log_prob/parity": 0.0},
    {"iteration": 1, "loss": None, "velocity_grad_norm": [2.0, None], "memory/rollout": 7},
)


def test_metrics_are_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pandas" else found_spec(name)
    )
    columns = read_metrics(a_run(tmp_path / "run", *ROWS))
    assert [*columns] == [
        "iteration",
        "loss",
        "velocity_grad_norm",
        "log_prob/parity",
        "memory/rollout",
    ]
    assert columns["velocity_grad_norm"] == [[1.0, None], [2.0, None]]
    for name, values in {"iteration": [0, 1], "loss": [0.5, math.nan], "log_prob/parity": [0,
        math.nan],
                         "memory/rollout": [math.nan, 7]}.items():  # fmt: skip
        assert columns[name].dtype == np.float64
        np.testing.assert_array_equal(columns[name], values)
    assert read_metrics(str(a_run(tmp_path / "new"))) == {}
    with pytest.raises(UserError, match="is no run folder"):
        read_metrics(tmp_path)


def test_metrics_are_a_frame_where_pandas_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DataFrame(dict[str, Any]):
        pass

    pandas: Any = types.ModuleType("pandas")
    pandas.__spec__, pandas.DataFrame = importlib.machinery.ModuleSpec("pandas", None), DataFrame
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    frame = read_metrics(a_run(tmp_path / "run", *ROWS))
    assert isinstance(frame, DataFrame)
    np.testing.assert_array_equal(frame["loss"], [0.5, math.nan])
