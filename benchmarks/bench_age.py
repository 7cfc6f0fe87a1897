"""`pytest benchmarks/`: the release check that README's timings are of the code as it is. It times nothing."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPERATORS = ("csrc", "kernels", "sage_fast/ops")
MODEL = (*OPERATORS, "sage_fast/models", "sage_fast/rollout")
PAPER = "configs/recipes/paper.yaml"
ITERATION = (*MODEL, "sage_fast/trainer.py", "sage_fast/algorithm", "sage_fast/parallel/plain.py", PAPER)
TIMED = {"rows": OPERATORS, "ceiling_flops_per_second": MODEL, "phases": ITERATION}
"""Key in a benchmark's JSON -> the code it times; the last key that is there decides."""


def timings() -> list[Path]:
    """Files of timings that README links to."""
    linked = {
        ROOT / found for found in re.findall(r"\((benchmarks/results/[^)]*\.json)\)", (ROOT / "README.md").read_text())
    }
    return sorted(file for file in linked if "commit" in json.loads(file.read_text()).get("environment", {}))


@pytest.mark.parametrize("file", timings(), ids=lambda file: file.name)
def test_a_timing_is_of_the_code_as_it_is(file: Path) -> None:
    result = json.loads(file.read_text())
    commit = result["environment"]["commit"]
    code = [paths for key, paths in TIMED.items() if key in result][-1]
    command = ["git", "diff", "--name-only", commit, "--", *code]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no history here that reaches {commit}: {made.stderr.strip()}")
    assert not made.stdout, f"measured at {commit[:7]}; since then these changed:\n{made.stdout}"
