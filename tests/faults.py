"""docs/reference/faults.md: `pytest -m fault`, as in `make soak`, writes its table from the tests
that it ran.

A test that does a fault to a run is marked `fault(what, outcome, times)`: it passes if that is the
outcome. `times` is 1 for each of the test's parameters, unless it is given there or, by hypothesis,
as an attribute of the test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "faults.md"
PLACE = re.compile(
    r"(?<=<!-- faults: written by pytest -m fault -->\n)(.*?)(?=<!-- end of faults -->)", re.S
)
HEAD = "| fault | times | outcome | test |\n|---|---|---|---|\n"


def marked() -> list[tuple[str, str, str]]:
    """What, outcome and file of every marked test, as they stand in the sources."""
    rows = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for function in ast.parse(file.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                for part in (
                    part for decorator in function.decorator_list for part in ast.walk(decorator)
                ):
                    if isinstance(part, ast.Call) and ast.unparse(part.func) == "pytest.mark.fault":
                        what, outcome = (ast.literal_eval(argument) for argument in part.args[:2])
                        rows.append((what, outcome, f"tests/{file.name}"))
    return list(dict.fromkeys(rows))  # some tests are of one kind of fault


def written() -> list[tuple[str, int, str, str]]:
    """What, times, outcome and file of every row in the documentation."""
    found = PLACE.search(PAGE.read_text())
    assert found is not None
    rows = re.findall(
        r"^\| (.+?) \| (\d+) \| (.+?) \| `(.+?)` \|$", found[1].removeprefix(HEAD), re.M
    )
    return [(what, int(times), outcome, file) for what, times, outcome, file in rows]


def write(times: Mapping[str, int]) -> None:
    """The table, of faults that were done so many times in tests that all passed."""
    rows = [
        f"| {what} | {times[what]} | {outcome} | `{file}` |\n" for what, outcome, file in marked()
    ]
    page = PAGE.read_text()
    assert PLACE.search(page) is not None
    PAGE.write_text(PLACE.sub(lambda _: HEAD + "".join(rows), page))
