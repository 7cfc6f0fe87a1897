"""Whether a result in benchmarks/results is of the code as it is.

A result names its commit. It is stale once files that it timed have changed since. Pages, the test
benchmarks/bench_age.py and `scripts/gpu.sh --unknown` ask here. Only the standard library is used,
since the last of them runs before anything is installed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"

OPERATORS = ("csrc", "kernels", "sage_fast/ops")
MODEL = (*OPERATORS, "sage_fast/models", "sage_fast/rollout")
ITERATION = (
    *MODEL,
    "sage_fast/trainer.py",
    "sage_fast/algorithm",
    "sage_fast/parallel/plain.py",
    "configs/recipes/paper.yaml",
)
TIMED: dict[str, tuple[str, ...]] = {
    "rows": OPERATORS,
    "ceiling_flops_per_second": MODEL,
    "phases": ITERATION,
}
"""Key in a result -> the code that it timed; the last key that is there decides."""
LIMITS: dict[str, tuple[str, ...]] = {"ceiling": (), "attention": (), "adapter_rows": OPERATORS}
"""Part of `bench limits` -> the code that it timed. Matrix products and attention run kernels of
PyTorch and of other packages, so that no change here makes their numbers old."""
EVERYTHING = ("csrc", "kernels", "sage_fast", "configs")
"""What any other result may depend on."""


def timed_code(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files and folders whose change makes a result old."""
    if "limits" in result:
        return tuple(path for part in result["limits"] for path in LIMITS.get(part, ()))
    found = [paths for key, paths in TIMED.items() if key in result]
    return found[-1] if found else EVERYTHING


def commit_of(result: Mapping[str, Any]) -> str | None:
    """Return the commit that a result was measured at; None if it names none."""
    named = result.get("environment", {}).get("commit")
    return named.removesuffix("+changes") if named else None


def changed_files(commit: str, code: tuple[str, ...]) -> list[str] | None:
    """Return the files in `code` that differ from those of a commit; None without a history that
    reaches it."""
    if not code:
        return []
    command = ["git", "diff", "--name-only", commit, "--", *code]
    try:
        made = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, encoding="utf-8"
        )
    except OSError:  # no git
        return None
    return made.stdout.split("\n")[:-1] if made.returncode == 0 else None


def is_of_this_code(result: Mapping[str, Any]) -> bool:
    """Whether nothing that a result timed has changed since; False if that cannot be told."""
    commit = commit_of(result)
    return commit is not None and changed_files(commit, timed_code(result)) == []


def measured_on_a_gpu(part: str, folder: Path = RESULTS) -> list[Path]:
    """Return the results of a part of scripts/gpu.sh, `DATE-CARD-PART.json`, that are of this code.

    Args:
        part: its name.
        folder: of the results.
    """
    found = []
    for file in sorted(folder.glob(f"[0-9]*-{part}.json")):
        card = file.stem.removesuffix(f"-{part}").split("-")[3:]
        # "cpu", or a longer name of which the part's is the end
        if len(card) != 1 or card == ["cpu"]:
            continue
        if is_of_this_code(json.loads(file.read_text(encoding="utf-8"))):
            found.append(file)
    return found
