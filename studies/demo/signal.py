"""The signal of the demo and of what it is compared with: a table from the files of
`sage-fast profile --signal`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.util.files import read_json
from studies.demo.early import DEMO, ENDPOINT, NFT
from studies.demo.titles import TITLES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WEIGHTS = {"base": "the base model", "40": "40 of 100 iterations of the demo"}
"""What a file's name calls the weights -> what they are."""
CONFIGURATIONS = {
    DEMO: ("endpoint", "configs/demo.yaml"),
    ENDPOINT: ("endpoint", "configs/recipes/endpoint.yaml"),
    NFT: ("nft", "configs/demo-nft.yaml"),
}
"""Arm -> (end of the name of the file that has it, its label there)."""
ROWS = (
    "signal / noise of an iteration",
    "signal / noise by Muon",
    "signal / noise by AdamW",
)


def table() -> list[Sequence[str]]:
    """Return a row for each configuration at each of the weights."""
    heading = ("at", "runs", *ROWS)
    rows: list[Sequence[str]] = [heading]
    for weights, what in WEIGHTS.items():
        for arm in CONFIGURATIONS:
            of_arm = _row(weights, arm)
            rows.append((what, TITLES[arm], *(_cell(of_arm[row]) for row in ROWS)))
    return rows


def about() -> str:
    """Return what the table says of the endpoint direction, and of the weights after training."""
    raw, muon, adamw = (_value("base", ENDPOINT, row) / _value("base", DEMO, row) for row in ROWS)
    left = max(
        _value("40", arm, row) / _value("base", arm, row) for arm in CONFIGURATIONS for row in ROWS
    )
    return (
        f"At the base the endpoint direction has {raw:.1f} times the demo's ratio, but only "
        f"{muon:.1f} times of what Muon makes of the gradients, which trains these runs, and "
        f"{adamw:.1f} times of what AdamW makes of them. After 40 iterations of the demo each "
        f"ratio is at most {left:.2f} of the base's."
    )


def _value(weights: str, arm: str, row: str) -> float:
    return float(_row(weights, arm)[row]["value"])


def _row(weights: str, arm: str) -> Mapping[str, Any]:
    """Return row -> cell of an arm at some weights."""
    other, label = CONFIGURATIONS[arm]
    signal = _signal(f"{weights}-{other}")
    # The label of the demo is its checkpoint's where it was trained.
    return signal.get(label) or next(iter(signal.values()))


def _signal(name: str) -> Mapping[str, Any]:
    """Return label -> row -> cell of a file; the first label is what was measured against the
    others."""
    signal: Mapping[str, Any] = read_json(RESULTS / f"2026-11-29-cpu-signal-{name}.json")["signal"]
    return signal


def _cell(found: Mapping[str, float | None]) -> str:
    value, error = found["value"], found["error"]
    if value is None or error is None:
        return "undefined"
    return f"{value:.3f} ± {error:.3f}"
