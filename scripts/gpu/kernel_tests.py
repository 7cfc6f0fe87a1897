"""Run tests, on their own or under a tool, and write how many passed:
`python -m scripts.gpu.kernel_tests --json FILE [--under TOOL] PYTEST_ARGUMENT...`.

`consan` is Triton's sanitizer, which makes integer overflow an error too. `memcheck` and
`racecheck` are tools of compute-sanitizer; without it their tests are skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_fast.ops import implementation
from sage_fast.util.environment import environment
from sage_fast.util.files import write_json
from sage_fast.util.ranks import local_device

COMPUTE_SANITIZER = ("memcheck", "racecheck")
TOOLS = ("consan", *COMPUTE_SANITIZER)


def prefix_of(tool: str) -> list[str]:
    """Return the words before Python that run it under a tool of compute-sanitizer."""
    return [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "1",
        "--report-api-errors",
        "no",
        "--padding",
        "4096",
        "--target-processes",
        "application-only",
        "--kernel-name",
        "regex=^_[a-z_]+_kernel$",
    ]


def run_tests(arguments: Sequence[str], tool: str | None) -> tuple[int, dict[str, Any]]:
    """Run pytest; return its exit status and the counts."""
    variables = {}
    prefix = []
    if tool == "consan":
        variables = {"TRITON_INSTRUMENTATION_MODE": "consan"}
    elif tool is not None:
        # every tensor gets its own allocation, so that accesses past its end are seen
        variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        prefix = prefix_of(tool)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run([*prefix, *pytest, *arguments], env=os.environ | variables)
        if not report.exists():
            return done.returncode or 1, {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0}
        return done.returncode, counts(report)


def counts(report: Path) -> dict[str, Any]:
    """Return the counts of a JUnit report."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    seconds = 0.0
    for suite in suites:
        for key in total:
            total[key] += int(suite.get(key, 0))
        seconds += float(suite.get("time", 0))
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"],
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--under", choices=TOOLS)
    options, arguments = parser.parse_known_args()
    tool = options.under
    if tool in COMPUTE_SANITIZER and shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: skipped")
        return 0
    status, found = run_tests(arguments, tool)
    device = local_device()
    result = {
        "environment": environment(device, implementation(device)),
        "under": tool,
        "arguments": arguments,
        "tests": found,
    }
    write_json(result, options.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
