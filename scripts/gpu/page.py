"""Write the tables of docs/how-to/first-gpu.md from the parts: `python -m scripts.gpu.page`.

tests/test_gpu_script.py fails while they differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from scripts.gpu.install import REPOSITORY
from scripts.gpu.parts import PARTS, PARTS_OF_SEVERAL, Part, in_calls

PAGE = REPOSITORY / "docs" / "how-to" / "first-gpu.md"
TABLE = re.compile(
    r"(<!-- table of (\w+): written by python -m scripts\.gpu\.page -->\n).*?(<!-- end -->)", re.S
)


def parts_table(parts: Sequence[Part]) -> str:
    """Return the table of parts."""
    lines = ["| part | limit | leaves | what it tells |", "|---|---|---|---|"]
    for number, part in enumerate(parts, 1):
        leaves = ", ".join(f"`{name}`" for name in part.leaves)
        lines.append(f"| {number} `{part.name}` | {part.seconds} s | {leaves} | {part.tells} |")
    return "\n".join(lines)


def predictions_table(parts: Sequence[Part]) -> str:
    """Return the table of what is expected."""
    lines = ["| part | quantity | expected |", "|---|---|---|"]
    for part in parts:
        for prediction in part.predictions:
            lines.append(f"| `{part.name}` | {prediction.quantity} | {prediction.expected} |")
    return "\n".join(lines)


def calls_table(parts: Sequence[Part]) -> str:
    """Return the table of calls, if every part is asked for."""
    lines = ["| call | parts | limits together |", "|---|---|---|"]
    for number, call in enumerate(in_calls(list(parts)), 1):
        names = ", ".join(f"`{part.name}`" for part in call)
        lines.append(f"| {number} | {names} | {sum(part.seconds for part in call)} s |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "parts": lambda: parts_table(PARTS),
    "predictions": lambda: predictions_table(PARTS),
    "calls": lambda: calls_table(PARTS),
    "several": lambda: parts_table(PARTS_OF_SEVERAL),
}


def written(page: str) -> str:
    """Return the page with the tables of today."""
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
