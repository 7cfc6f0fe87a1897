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
    for weights, about in WEIGHTS.items():
        for arm, (other, label) in CONFIGURATIONS.items():
            signal = _signal(f"{weights}-{other}")
            of_label = signal.get(label) or next(iter(signal.values()))
            rows.append((about, TITLES[arm], *(_cell(of_label[row]) for row in ROWS)))
    return rows


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
