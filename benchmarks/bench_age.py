"""`pytest benchmarks/`: pages name the commits of their timings, and what has changed since is a
warning. README says so itself where code has changed since. It times nothing."""

import json
import re
import warnings
from pathlib import Path

import pytest

from scripts.result_age import TIMED, changed_files, commit_of, timed_code

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CHANGED = "The kernels have changed since these commits"
"""What README says where a timing is older than the code."""


def timings() -> list[tuple[Path, Path]]:
    """Pages with files of timings that they link to: README, the results it links to, and
    operators.md."""
    pages = {
        ROOT / found
        for found in re.findall(r"\((docs/results/[^)#]*\.md)", README.read_text(encoding="utf-8"))
    }
    found = set()
    for page in (README, ROOT / "docs/reference/operators.md", *pages):
        for name in re.findall(
            r"benchmarks/results/([\w.-]*\.json)", page.read_text(encoding="utf-8")
        ):
            result = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
            if "commit" in result.get("environment", {}) and TIMED.keys() & result.keys():
                found.add((page, ROOT / "benchmarks/results" / name))
    return sorted(found)


@pytest.mark.parametrize(("page", "file"), timings(), ids=lambda path: path.name)
def test_a_timing_is_of_the_code_as_it_is(page: Path, file: Path) -> None:
    """A page names the commit of a file; what has changed since is a warning. README then says that
    the code has changed."""
    result = json.loads(file.read_text(encoding="utf-8"))
    commit = commit_of(result)
    assert commit is not None
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert commit[:7] in text, f"{page}: name the commit of {file.name}, {commit[:7]}"
    changed = changed_files(commit, timed_code(result))
    if changed is None:
        pytest.skip(f"no history here that reaches {commit}")
    old = (
        f"{page.name}: {file.name} was measured at {commit[:7]}; since then these "
        f"changed:\n{chr(10).join(changed)}"
    )
    if changed:
        assert page != README or CHANGED in text, old
        warnings.warn(old, stacklevel=1)
